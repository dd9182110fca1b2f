"""Trains an image classifier: the training loop of each rank, its validation, and the evaluation of checkpoints.

Copy this file to begin a training of your own, as `workload: train:train`; the copy runs as it is. `Images` in data.py
reads batches, model.py builds the network.
"""

from __future__ import annotations

import csv
import inspect
import io
import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, Optimizer

from ddptrain.config.wording import counted, listed
from ddptrain.errors import UsageError
from ddptrain.workloads.images.data import BadImages, Batch, image_list, train_loader, val_loader
from ddptrain.workloads.images.listing import evaluated_only, evaluated_params
from ddptrain.workloads.images.manifest import Manifest
from ddptrain.workloads.images.model import ModelInput, SavedConfig, answer_names, load_classifier, new_model
from ddptrain.workloads.images.params import ImagesParams
from ddptrain.workloads.schedules import make_schedule

if TYPE_CHECKING:
    from ddptrain.rank.context import RankContext
    from ddptrain.rank.evaluation import SavedCheckpoint

# DDP need not synchronise buffers in each step: training does not read them, and a checkpoint has those of rank 0.
# Newer versions of torch warn about the old name of the option.
_IS_NEW = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
NO_SYNC_OF_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _IS_NEW else "broadcast_buffers": False}
_EXAMPLES = 8  # images in a picture
_MOST_TRAINED, _MOST_MISTAKES = 1000, 24  # rows of all ranks in the tables train_predictions and val_mistakes
_STEPS_BETWEEN = 4  # one batch of this many is in the table of training images
_THUMBNAIL = 160  # pixels
_MOST_NAMED = 5


# --8<-- [start:train]
def train(ctx: RankContext, **params: Any) -> None:
    """Train an image classifier on all ranks; `params` are those of ImagesParams."""
    settings = ImagesParams.model_validate(params)
    images = image_list(ctx, params)

    torch.manual_seed(settings.seed + ctx.rank)  # all ranks get rank 0's weights; each rank has a dropout of its own
    model, config = new_model(ctx, settings, images.classes)
    ddp = ctx.prepare(model, gradient_as_bucket_view=True, **NO_SYNC_OF_BUFFERS)
    warm_up(ddp, settings, ctx.device)
    optimizer = make_optimizer(settings, model.parameters())
    batches = train_loader(ctx, images, settings)
    held_out = val_loader(ctx, images, settings) if len(images.val) else None

    resumed = ctx.resume(model=ddp, optimizer=optimizer)
    step, saved = (resumed.step, resumed.data) if resumed else (0, {})
    if resumed:
        config = described_again(saved["model_config"], images, settings.image_size)
    share = lambda: batches.position / settings.epochs  # noqa: E731
    schedule = make_schedule(settings.scheduler, optimizer, settings.base_lr, share, saved.get("schedule"))
    state: dict[str, Any] = {"model": ddp, "optimizer": optimizer, "schedule": schedule, "model_config": config}
    inputs = ModelInput(config, ctx.device, channels_last=is_channels_last(ddp))
    bad, pictures = BadImages(images, settings.max_bad_fraction), Pictures(ctx, images.keys, config)
    steps_per_epoch, rows = math.ceil(len(batches) / ctx.accumulate), math.ceil(len(images.train) / ctx.world_size)
    log_every = 10 if ctx.device.type == "cuda" else 1  # a GPU has to be waited for
    ctx.say(
        f"training {settings.architecture}, {sum(each.numel() for each in model.parameters()):,} parameters, "
        f"on {len(images.train):,} images, {counted(steps_per_epoch, 'step')} an epoch over "
        f"{counted(ctx.world_size, 'rank')}{continuing(step, batches.epoch, settings.epochs) if resumed else ''}"
    )

    def report() -> None:
        ctx.progress(round(batches.position * rows), settings.epochs * rows, unit="images")

    epoch = 0
    for epoch in ctx.epochs(settings.epochs):
        pictures.begin_epoch()
        sums = torch.zeros(3, dtype=torch.float64, device=ctx.device)  # loss, right answers, images of this rank
        began, first = time.perf_counter(), batches.position
        for number, batch in enumerate(batches):
            bad.add(batch.bad)
            targets = inputs.targets(batch.labels)
            logits = forward(ddp, inputs(batch.images)).float()
            loss = cross_entropy(logits, targets)
            ctx.backward(loss)
            right = (logits.detach().argmax(1) == targets).sum()
            sums += torch.stack([loss.detach() * len(targets), right, right.new_tensor(len(targets))])
            if ctx.step(optimizer):
                step += 1
                if step % log_every == 0 or not batches.remaining:
                    values = {"train/loss": loss.detach(), "train/correct": right / len(targets)}
                    rate = optimizer.param_groups[0]["lr"]
                    ctx.log({**values, "train/learning_rate": rate}, step=step, epoch=batches.position)
                if settings.scheduler != "plateau":
                    schedule.step()
                pictures.example(batch, logits, step, every=steps_per_epoch)
            pictures.trained(number, batch, logits)
            report()
            if batches.remaining:  # the checkpoint of a whole epoch has the validation
                ctx.checkpoint(step=step, epoch=batches.position, **state)
        speed = (epoch - first) * len(images.train) / (time.perf_counter() - began)

        loss_sum, n_right, count = sums.tolist()
        metrics = {"train/loss": ctx.mean(loss_sum / count, count), "train/accuracy": ctx.mean(n_right / count, count)}
        if held_out is not None:
            with ctx.timed("evaluation"):
                share_buffers(model)
                metrics |= validate(model, inputs, held_out, bad, pictures, report)
        bad.check(ctx.device)
        if settings.scheduler == "plateau":
            schedule.step(metrics.get("val/loss", metrics["train/loss"]))
        if ctx.rank == 0:
            logged = {name: value for name, value in metrics.items() if name != "train/loss"}  # each step has that
            whole = {"samples": epoch * len(images.train), "samples_per_s": speed}  # of all ranks
            ctx.log({**logged, **whole}, step=step, epoch=epoch)
        text = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        ctx.say(f"epoch {epoch}/{settings.epochs}: {text}, {speed:,.0f} images/s")
        ctx.checkpoint(step=step, epoch=epoch, metrics=metrics, last=epoch == settings.epochs, **state)
    if epoch:  # the last one, which stop_early may have chosen
        pictures.save(step, has_validated=held_out is not None)


# --8<-- [end:train]


@torch.inference_mode()
def validate(
    model: nn.Module,
    inputs: ModelInput,
    batches: Iterable[Batch],
    bad: BadImages,
    pictures: Pictures | None = None,
    report: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Return val/loss in nats, val/accuracy and val/top5: the means over the images of all ranks, NaN without images.

    All ranks must call it; each may have any number of batches. Unreadable images do not count, and go into `bad`.
    report: is called after each batch, to report activity.
    """
    was_training = model.training
    model.eval()
    sums = torch.zeros(4, dtype=torch.float64, device=inputs.device)
    for batch in batches:
        report()
        bad.add(batch.bad)
        if len(batch.labels) == 0:
            continue
        logits, targets = model(inputs(batch.images)).float(), inputs.targets(batch.labels)
        loss = cross_entropy(logits, targets, reduction="sum")
        is_right = logits.topk(min(5, logits.shape[1]), dim=1).indices == targets[:, None]
        sums += torch.stack([loss, is_right[:, 0].sum(), is_right.sum(), targets.new_tensor(len(targets))]).double()
        if pictures is not None:
            pictures.validated(batch, logits)
    model.train(was_training)
    dist.all_reduce(sums)
    *totals, count = sums.tolist()
    names = ("val/loss", "val/accuracy", "val/top5")
    return {name: total / count if count else math.nan for name, total in zip(names, totals, strict=True)}


def make_optimizer(settings: ImagesParams, parameters: Iterable[Tensor]) -> Optimizer:
    """Return the optimizer that params.optimizer selects."""
    shared: dict[str, Any] = {"lr": settings.base_lr, "weight_decay": settings.weight_decay, "fused": True}
    if settings.optimizer == "sgd":
        return SGD(parameters, momentum=0.9, **shared)
    kind = AdamW if settings.optimizer == "adamw" else Adam
    return kind(parameters, betas=(0.9, 0.999), eps=1e-6, **shared)


def warm_up(ddp: nn.Module, settings: ImagesParams, device: torch.device) -> None:
    """Run one backward pass with gradient 0.

    DDP fixes the order of its reduction after the first backward pass. Without this pass, the first step of a resumed
    run would sum the gradients of the ranks in another order than the same step of an uninterrupted run. On a GPU the
    pass has as many images as a step, so that a lack of memory shows at once.
    """
    buffers = [buffer.clone() for buffer in ddp.buffers()]
    n_shown = max(2, settings.batch_size) if device.type == "cuda" else 2
    images = torch.zeros(n_shown, 3, settings.image_size, settings.image_size, device=device)
    if is_channels_last(ddp):
        images = images.to(memory_format=torch.channels_last)
    (0.0 * ddp(images).float().sum()).backward()
    ddp.zero_grad(set_to_none=True)
    for buffer, before in zip(ddp.buffers(), buffers, strict=True):
        buffer.copy_(before)


def is_channels_last(model: nn.Module) -> bool:
    """Return whether the weights of the convolutions are stored channels last."""
    return any(
        weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
        for weight in model.parameters()
    )


def forward(model: nn.Module, images: Tensor) -> Tensor:
    """Return the logits of some images. BatchNorm needs two: a single one is duplicated, with the same gradient."""
    logits: Tensor = model(images if len(images) > 1 else torch.cat([images, images]))
    return logits[: len(images)]


def share_buffers(model: nn.Module) -> None:
    """Copy the buffers of rank 0 (BatchNorm statistics), which a checkpoint contains, to all ranks."""
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)


def continuing(step: int, epoch: int, epochs: int) -> str:
    """Return how the line about the start of a resumed run ends."""
    if epoch > epochs:
        return f": all {epochs} epochs are done, raise params.epochs to continue training"
    return f", continuing after step {step} in epoch {epoch}"


def described_again(model_config: dict[str, Any], images: Manifest, image_size: int) -> dict[str, Any]:
    """Return the model description of a checkpoint, with the image size of this run.

    Raises UsageError if the checkpoint has other classes.
    """
    known, here = tuple(model_config["classes"]), images.classes
    if known != here:
        those, these = (f"{counted(len(names), 'class')} ({listed(names, 3)})" for names in (known, here))
        raise UsageError(
            f"the checkpoint is of {those}, the images are of {these}: resume with the images that it was trained on"
        )
    return {**model_config, "image_size": image_size}


# --- pictures and tables ---

Answer = tuple[Tensor, int, int, float]  # pixels uint8 [3, s, s], label, output, and the probability of the output


class Pictures:
    """What a rank shows of its images: examples while it trains, and three tables at the end.

    The table train_predictions has images of the last epoch; predictions/rank-<r>.csv all images of the last
    validation; and val_mistakes those of all ranks that the model was most sure about, and wrong.
    """

    def __init__(self, ctx: RankContext, keys: Sequence[str], model_config: Mapping[str, Any]) -> None:
        self._ctx, self._keys = ctx, keys
        self._classes, self._names = model_config["classes"], answer_names(model_config)
        self._outputs, self._side = model_config["outputs"], min(_THUMBNAIL, model_config["image_size"])
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Forget the images of the epoch before: any epoch may be the last."""
        self._trained: list[Answer] = []
        self._mistakes: list[Answer] = []
        self._csv = io.StringIO(newline="")
        self._predictions = csv.writer(self._csv, lineterminator="\n")
        self._predictions.writerow(("key", "label", "prediction", "probability"))

    def example(self, batch: Batch, logits: Tensor, step: int, every: int) -> None:
        """Log a picture of some images of rank 0, side by side, at each `every`-th step.

        Its caption has the class and the predicted class of each image, as "cat: dog 51 %".
        """
        if self._ctx.rank == 0 and (step - 1) % every == 0:
            answers = answers_of(batch, logits)[:_EXAMPLES]
            words = ["{}: {} {:.0%}".format(*self._words(label, output), score) for _, label, output, score in answers]
            strip = torch.cat([pixels for pixels, *_ in answers], dim=2)
            self._ctx.log_image("examples", strip, step=step, caption=", ".join(words))

    def trained(self, number: int, batch: Batch, logits: Tensor) -> None:
        """Keep the images of every fourth batch for the table, until all ranks together have 1,000."""
        n_left = math.ceil(_MOST_TRAINED / self._ctx.world_size) - len(self._trained)
        if n_left > 0 and number % _STEPS_BETWEEN == 0:  # the first batch, too: an epoch may be short
            kept = answers_of(batch, logits)[:n_left]
            self._trained += [(pixels.clone(), label, output, score) for pixels, label, output, score in kept]

    def validated(self, batch: Batch, logits: Tensor) -> None:
        """Add the predictions of a batch, and keep its mistakes if they are among the worst of this rank."""
        answers = answers_of(batch, logits)
        for index, (_, label, output, score) in zip(batch.index.tolist(), answers, strict=True):
            self._predictions.writerow((self._keys[index], *self._words(label, output), f"{score:.6g}"))
        least = self._mistakes[-1][3] if len(self._mistakes) == _MOST_MISTAKES else 0.0
        self._mistakes += [
            (thumbnail(pixels, self._side), label, output, score)  # the batch need not stay
            for pixels, label, output, score in answers
            if output != self._outputs[label] and score > least
        ]
        self._mistakes = sorted(self._mistakes, key=lambda answer: -answer[3])[:_MOST_MISTAKES]

    def save(self, step: int, *, has_validated: bool) -> None:
        """Save the tables. All ranks must call it."""
        self._log_table("train_predictions", self._trained, step)
        if has_validated:
            self._ctx.save_file(f"predictions/rank-{self._ctx.rank}.csv", self._csv.getvalue().encode())
            worst = self._worst()
            if self._ctx.rank == 0:
                self._log_table("val_mistakes", worst, step)

    def _log_table(self, name: str, answers: Sequence[Answer], step: int) -> None:
        rows = [(pixels, *self._words(label, output), score) for pixels, label, output, score in answers]
        self._ctx.log_table(name, ("image", "label", "prediction", "score"), rows, step=step)

    def _words(self, label: int, output: int) -> tuple[str, str]:
        return self._classes[label], self._names[output]

    def _worst(self) -> list[Answer]:
        """Return the mistakes of all ranks with the highest scores, as thumbnails."""
        device, rank, n = self._ctx.device, self._ctx.rank, _MOST_MISTAKES
        scores = torch.zeros(self._ctx.world_size, n, device=device)
        scores[rank, : len(self._mistakes)] = torch.tensor([answer[3] for answer in self._mistakes])
        dist.all_reduce(scores)
        highest, places = scores.flatten().sort(descending=True, stable=True)
        pixels = torch.zeros(n, 3, self._side, self._side, dtype=torch.uint8, device=device)
        labels = torch.zeros(n, 2, dtype=torch.int64, device=device)
        for row, place in enumerate(places[:n].tolist()):
            owner, number = divmod(place, n)
            if owner == rank and number < len(self._mistakes):
                image, label, output, _ = self._mistakes[number]
                pixels[row], labels[row] = image, torch.tensor([label, output])
        dist.all_reduce(pixels)  # each row comes from one rank, the others have 0
        dist.all_reduce(labels)
        found = zip(pixels.cpu(), labels.tolist(), highest[:n].tolist(), strict=True)
        return [(image, *which, score) for image, which, score in found if score > 0]


def answers_of(batch: Batch, logits: Tensor) -> list[Answer]:
    """Return what the model says about each image of a batch."""
    scores, outputs = (column.tolist() for column in logits.detach().float().softmax(1).max(1))
    return list(zip(batch.images, batch.labels.tolist(), outputs, scores, strict=True))


def thumbnail(image: Tensor, side: int) -> Tensor:
    """Scale an image, uint8 [3, s, s], to [3, side, side]."""
    return interpolate(image[None].float(), size=side, mode="bilinear", antialias=True)[0].round().to(torch.uint8)


# --- the evaluation of a checkpoint ---


def evaluate(ctx: RankContext, checkpoint: SavedCheckpoint) -> dict[str, float]:
    """Return val/loss, val/accuracy and val/top5 on the images whose classes all compared models know.

    Raises UsageError if the checkpoint is not one of this workload, or knows none of the classes.
    """
    if ctx.inputs is None:
        raise UsageError("there are no images to evaluate on: start an evaluation with `ddptrain evaluate`")
    model, config = load_classifier(checkpoint.path)
    everything = Manifest.read(ctx.inputs)
    classes = comparable_classes(everything.classes, _known_classes(checkpoint.compared))
    if missing := [name for name in classes if name not in config.classes]:
        raise UsageError(f"it knows none of the classes of the images to evaluate on: {listed(missing, _MOST_NAMED)}")
    manifest = evaluated_only(everything, classes)
    _note_classes(checkpoint, everything, manifest, classes)
    settings = evaluated_params(ImagesParams.model_validate(dict(checkpoint.params)), checkpoint.data)
    settings = settings.model_copy(update={"image_size": config.image_size})
    numbers, bad = itertools.count(1), BadImages(manifest, settings.max_bad_fraction)
    outputs = class_outputs(everything.classes, config)
    metrics = validate(
        model.to(ctx.device),
        ModelInput({**config.model_dump(), "outputs": outputs}, ctx.device),
        val_loader(ctx, manifest, settings),
        bad,
        report=lambda: ctx.progress(next(numbers), unit="batches"),
    )
    if n_bad := bad.check(ctx.device):
        checkpoint.notes.append(f"{n_bad:,} of {len(manifest.val):,} images could not be read")
    return metrics


def comparable_classes(images: Sequence[str], models: Sequence[Sequence[str]]) -> list[str]:
    """Return the classes of the images that all models know; models that know none of them do not count.

    All classes of the images if no model knows any.
    """
    able = [set(known) for known in models if set(known) & set(images)]
    return [name for name in images if all(name in known for known in able)] if able else list(images)


def class_outputs(classes: Sequence[str], config: SavedConfig) -> list[int]:
    """Return the model's output for each class; 0 for one that the model does not know: its images are left out."""
    output_of = dict(zip(config.classes, config.outputs, strict=True))
    return [output_of.get(name, 0) for name in classes]


def _known_classes(compared: Mapping[str, Path]) -> list[list[str]]:
    """Return the classes of each model that can be read; the others cannot be scored."""
    known = []
    for folder in compared.values():
        try:
            state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
            known.append(list(SavedConfig.restored(state["extra"]["model_config"]).classes))
        except Exception:  # damaged files raise arbitrary errors; the evaluation of that checkpoint reports them
            continue
    return known


def _note_classes(
    checkpoint: SavedCheckpoint, everything: Manifest, compared: Manifest, classes: Sequence[str]
) -> None:
    all_images = evaluated_only(everything).val
    left_out = [name for name in everything.classes if name not in classes]
    n_left_out = len(all_images) - len(compared.val)
    if n_left_out:
        checkpoint.notes.append(
            f"{counted(n_left_out, 'image')} of {len(all_images):,} are left out, because not all models know their "
            f"classes: {listed(left_out, _MOST_NAMED)}"
        )
    if not len(compared.val):
        raise UsageError("no image to evaluate on has a class that all models know")
