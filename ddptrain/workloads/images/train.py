"""Trains an image classifier: the training loop of each rank. Copy it to begin a workload of your own."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softmax
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, Optimizer

from ddptrain.config.wording import counted, listed
from ddptrain.errors import UsageError
from ddptrain.rank.context import RankContext
from ddptrain.workloads.images.data.manifest import Manifest
from ddptrain.workloads.images.loader.batches import BadImages, Batch, train_loader, val_loader
from ddptrain.workloads.images.model.build_model import PixelNormalizer
from ddptrain.workloads.images.model.initial_weights import begin_with_weights, built_model, described_model
from ddptrain.workloads.images.params import ImagesParams
from ddptrain.workloads.images.prediction_tables import (
    TRAINED,
    TRAINED_COLUMNS,
    PredictionTable,
    TrainingTable,
    example_strip,
    example_words,
    table_file,
)

_EXAMPLES_KEPT = 1000  # of all ranks, in the table train_predictions
# Newer versions of torch warn about the old name.
_SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)
_STEPS_PER_READING = 10  # on a GPU
# one_cycle as in torch's OneCycleLR (Smith and Topin, 2017: super-convergence).
_RISE = 0.3  # share of the run in which the rate rises
_START, _END = 1 / 25, 1 / 25e4  # rate of the first and the last step, relative to the highest
_MOMENTUM, _EPSILON = 0.9, 1e-6
_MOMENTA = (0.95, 0.85)  # at both ends, and at the highest rate


def train(ctx: RankContext, **params: Any) -> None:
    """Train an image classifier on all ranks; `params` are those of ImagesParams."""
    settings = ImagesParams.model_validate(params)
    if ctx.inputs is None:
        raise UsageError("there is no list of images: start `workload: images` with `ddptrain train`, which makes it")
    manifest = Manifest.read(ctx.inputs)

    torch.manual_seed(settings.seed + ctx.rank)  # all ranks get rank 0's weights; each rank has a dropout of its own
    config = described_model(settings, manifest.classes)
    model = built_model(config)
    if ctx.resume_folder is None:
        begin_with_weights(ctx, settings, model, config)
    ddp = distributed(ctx, settings, model)
    optimizer = make_optimizer(settings, model.parameters())
    batches = train_loader(ctx, manifest, settings)
    held_out = val_loader(ctx, manifest, settings) if len(manifest.val) else None
    resumed = ctx.resume(model=ddp, optimizer=optimizer)
    if resumed:
        config = described_again(resumed.data["model_config"], manifest, settings.image_size)
    step = resumed.step if resumed else 0
    steps_per_epoch = math.ceil(len(batches) / ctx.accumulate)
    set_learning_rate(optimizer, settings, batches.position, steps_per_epoch)

    pixels = PixelNormalizer(config, ctx.device, channels_last=is_channels_last(ddp))
    outputs = torch.tensor(config["outputs"], device=ctx.device)  # of the model, for each class
    bad, steps = BadImages(manifest, settings.max_bad_fraction), StepLog(ctx)
    state: dict[str, Any] = {"model": ddp, "optimizer": optimizer, "model_config": config}
    rows = math.ceil(len(manifest.train) / ctx.world_size)
    size = sum(parameter.numel() for parameter in model.parameters())
    ctx.say(
        f"training {settings.architecture}, {size:,} parameters, on {len(manifest.train):,} images, "
        f"{counted(steps_per_epoch, 'step')} an epoch over {counted(ctx.world_size, 'rank')}"
        + (f", continuing after step {step} in epoch {batches.epoch}" if resumed else "")
    )
    if batches.epoch > settings.epochs:
        ctx.say(f"all {settings.epochs} epochs are done: raise params.epochs to continue training")

    def report() -> None:
        ctx.progress(round(batches.position * rows), settings.epochs * rows, unit="images")

    for epoch in ctx.epochs(settings.epochs):
        is_last = epoch == settings.epochs
        table = TrainingTable(config, -(-_EXAMPLES_KEPT // ctx.world_size) if is_last else 0)
        sums = torch.zeros(3, dtype=torch.float64, device=ctx.device)  # loss, right answers, images of this rank
        began, first = time.perf_counter(), batches.position
        for batch in batches:
            bad.add(batch.bad)
            targets = outputs[batch.labels.to(ctx.device, non_blocking=True)]
            logits = forward(ddp, pixels(batch.images)).float()
            loss = cross_entropy(logits, targets)
            ctx.backward(loss)
            hits = (logits.detach().argmax(1) == targets).sum()
            sums += torch.stack([loss.detach() * len(targets), hits, hits.new_tensor(len(targets))])
            if ctx.step(optimizer):
                step += 1
                steps.add(step, batches.position, optimizer.param_groups[0]["lr"], loss.detach(), hits / len(targets))
                set_learning_rate(optimizer, settings, batches.position, steps_per_epoch)
                if ctx.rank == 0 and (step - 1) % steps_per_epoch == 0:
                    caption = example_words(logits, batch.labels, config)
                    ctx.log_image("examples", example_strip(batch.images), step=step, caption=caption)
            table.add(batch.images, batch.labels, logits)
            report()
            if batches.remaining:  # the checkpoint of a whole epoch has the validation
                if ctx.preempted:
                    steps.flush()
                ctx.checkpoint(step=step, epoch=batches.position, **state)
        rate = (epoch - first) * len(manifest.train) / (time.perf_counter() - began)
        steps.flush()
        if shown := table.rows():
            ctx.log_table(TRAINED, TRAINED_COLUMNS, shown, step=step)
        loss_sum, hit_sum, count = sums.tolist()
        metrics = {"train/loss": ctx.mean(loss_sum / count, count), "train/accuracy": ctx.mean(hit_sum / count, count)}
        if held_out is not None:
            with ctx.timed("evaluation"):
                share_buffers(model)
                predictions = PredictionTable(manifest.keys, config) if is_last else None
                keep = predictions.add if predictions else None
                metrics |= evaluate(model, pixels, held_out, outputs, bad, keep, report)
            if predictions is not None:
                ctx.save_file(f"predictions/rank-{ctx.rank}.csv", table_file(predictions.rows()))
        bad.check(ctx.device)
        logged = {name: value for name, value in metrics.items() if name != "train/loss"}
        if ctx.rank == 0:
            samples = epoch * len(manifest.train)  # of all ranks
            ctx.log({**logged, "samples": samples, "samples_per_s": rate}, step=step, epoch=epoch)
        text = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        ctx.say(f"epoch {epoch}/{settings.epochs}: {text}, {rate:,.0f} images/s")
        ctx.checkpoint(step=step, epoch=epoch, metrics=metrics, last=is_last, **state)


def forward(model: nn.Module, images: Tensor) -> Tensor:
    """Return the logits of some images. BatchNorm needs two: a single one is duplicated, with the same gradient."""
    logits: Tensor = model(images if len(images) > 1 else torch.cat([images, images]))
    return logits[: len(images)]


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    pixels: nn.Module,
    batches: Iterable[Batch],
    outputs: Tensor,
    bad: BadImages,
    keep: Callable[[Tensor, Tensor, Tensor, Tensor], None] | None = None,
    report: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Return val/loss in nats, val/accuracy and val/top5: the means over the images of all ranks, NaN without images.

    All ranks must call it; each may have any number of batches. Unreadable images do not count, and go into `bad`.

    pixels: converts the bytes of a batch to the model's input.
    outputs: int64 [classes], on the device: the model's output for each class.
    keep: receives index, label, predicted output and probability [n] of the images of a batch.
    report: is called after each batch, to report activity.
    """
    was_training = model.training
    model.eval()
    sums = torch.zeros(4, dtype=torch.float64, device=outputs.device)
    for batch in batches:
        report()
        bad.add(batch.bad)
        if len(batch.labels) == 0:
            continue
        labels = batch.labels.to(outputs.device, non_blocking=True)
        logits, targets = model(pixels(batch.images)).float(), outputs[labels]
        loss = cross_entropy(logits, targets, reduction="sum")
        is_right = logits.topk(min(5, logits.shape[1]), dim=1).indices == targets[:, None]
        sums += torch.stack([loss, is_right[:, 0].sum(), is_right.sum(), targets.new_tensor(len(targets))]).double()
        if keep is not None:
            probability, output = softmax(logits, 1).max(1)
            keep(batch.index, labels, output, probability)
    model.train(was_training)
    dist.all_reduce(sums)
    *totals, count = sums.tolist()
    names = ("val/loss", "val/accuracy", "val/top5")
    return {name: total / count if count else math.nan for name, total in zip(names, totals, strict=True)}


def share_buffers(model: nn.Module) -> None:
    """Copy the buffers of rank 0 (BatchNorm statistics), which a checkpoint contains, to all ranks."""
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)


def distributed(ctx: RankContext, settings: ImagesParams, model: nn.Module) -> nn.Module:
    """Prepare the model, wrap it in DDP, and run one backward pass with gradient 0.

    DDP fixes the order of its reduction after the first backward pass. Without this pass, the first step of a resumed
    run would sum the gradients of the ranks in another order than the same step of an uninterrupted run. On a GPU the
    pass has as many images as a step, so that a lack of memory shows at once. Buffers are not synchronised in each
    step: training does not read them, and a checkpoint contains those of rank 0.
    """
    options: dict[str, Any] = {_SYNC_BUFFERS: False}
    ddp = ctx.prepare(model, gradient_as_bucket_view=True, **options)
    buffers = [buffer.clone() for buffer in ddp.buffers()]
    n_shown = max(2, settings.batch_size) if ctx.device.type == "cuda" else 2
    images = torch.zeros(n_shown, 3, settings.image_size, settings.image_size, device=ctx.device)
    if is_channels_last(ddp):
        images = images.to(memory_format=torch.channels_last)
    (0.0 * ddp(images).float().sum()).backward()
    ddp.zero_grad(set_to_none=True)
    for buffer, before in zip(ddp.buffers(), buffers, strict=True):
        buffer.copy_(before)
    return ddp


def is_channels_last(model: nn.Module) -> bool:
    """Return whether the weights of the convolutions are stored channels last."""
    return any(
        weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
        for weight in model.parameters()
    )


def described_again(model_config: dict[str, Any], manifest: Manifest, image_size: int) -> dict[str, Any]:
    """Return the model description of a checkpoint, with the image size of this run.

    Raises UsageError if the checkpoint has other classes.
    """
    if tuple(model_config["classes"]) != manifest.classes:
        raise UsageError(
            f"the checkpoint is of {_some(model_config['classes'])}, the images are of {_some(manifest.classes)}: "
            "resume with the images that it was trained on"
        )
    return {**model_config, "image_size": image_size}


def _some(classes: Sequence[str]) -> str:
    return f"{counted(len(classes), 'class')} ({listed(classes, 3)})"


class StepLog:
    """Logs loss, share of right answers and learning rate of each step; on a GPU several steps at a time."""

    def __init__(self, ctx: RankContext) -> None:
        self._ctx = ctx
        self._most = _STEPS_PER_READING if ctx.device.type == "cuda" else 1
        self._waiting: list[tuple[int, float, float, Tensor]] = []

    def add(self, step: int, epoch: float, learning_rate: float, loss: Tensor, right: Tensor) -> None:
        """Add a step, with the mean loss and the share of right answers of this rank's batch."""
        self._waiting.append((step, epoch, learning_rate, torch.stack([loss, right])))
        if len(self._waiting) >= self._most:
            self.flush()

    def flush(self) -> None:
        """Log the steps that were added since the last flush."""
        waiting, self._waiting = self._waiting, []
        read = torch.stack([values for *_, values in waiting]).tolist() if waiting else []
        for (step, epoch, learning_rate, _), (loss, right) in zip(waiting, read, strict=True):
            values = {"train/loss": loss, "train/correct": right, "train/learning_rate": learning_rate}
            self._ctx.log(values, step=step, epoch=epoch)


def make_optimizer(settings: ImagesParams, parameters: Iterable[Tensor]) -> Optimizer:
    """Return the optimizer that params.optimizer selects."""
    if settings.optimizer == "sgd":
        return SGD(parameters, settings.base_lr, momentum=_MOMENTUM, weight_decay=settings.weight_decay, fused=True)
    kind = AdamW if settings.optimizer == "adamw" else Adam
    return kind(
        parameters,
        settings.base_lr,
        betas=(_MOMENTUM, 0.999),
        eps=_EPSILON,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def set_learning_rate(optimizer: Optimizer, settings: ImagesParams, epochs: float, steps_per_epoch: int) -> None:
    """Set the rate of the step after `epochs` epochs; one_cycle sets the momentum as well."""
    step, steps = epochs * steps_per_epoch, settings.epochs * steps_per_epoch
    factor, momentum = 1.0, _MOMENTUM
    if settings.scheduler == "one_cycle":
        factor, momentum = _one_cycle(step, steps)
    elif settings.scheduler == "cosine":
        factor = _between(1.0, 0.0, step / steps)
    for group in optimizer.param_groups:
        group["lr"] = settings.base_lr * factor
        if "betas" in group:
            group["betas"] = (momentum, *group["betas"][1:])
        else:
            group["momentum"] = momentum


def _one_cycle(step: float, steps: float) -> tuple[float, float]:
    """Return the rate relative to the highest, and the momentum, at a step, counted from 0."""
    top = max(_RISE * steps - 1, 0.0)
    calm, fast = _MOMENTA
    if step < top:
        return _between(_START, 1.0, step / top), _between(calm, fast, step / top)
    done = (step - top) / max(steps - 1 - top, 1e-9)
    return _between(1.0, _END, done), _between(fast, calm, done)


def _between(start: float, end: float, done: float) -> float:
    """Interpolate from start to end along half a cosine; `done` is 0 to 1."""
    return end + (start - end) * (1 + math.cos(math.pi * min(1.0, done))) / 2
