"""The training loop of the image workload, executed by each rank."""

from __future__ import annotations

import contextlib
import inspect
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, Optimizer

from ddptrain.config.wording import counted, listed
from ddptrain.errors import UsageError
from ddptrain.rank.context import PreemptedExit, RankContext, Resumed
from ddptrain.workloads.data_shards import EpochProgress, plan_epoch
from ddptrain.workloads.images.data.manifest import Manifest
from ddptrain.workloads.images.loader.batcher import Batch
from ddptrain.workloads.images.loader.image_loader import ImageLoader
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
from ddptrain.workloads.images.validation import check_bad_on_all_ranks, evaluate, share_buffers

# Newer versions of torch warn about the old name.
_EXAMPLES_KEPT = 1000  # of all ranks, in the table train_predictions
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
    location = manifest.location(settings)
    accumulate = ctx.accumulate  # `prepare` sets it to 1
    ranks = (ctx.rank, ctx.world_size)
    with ImageLoader(manifest, location, settings, ctx.device, *ranks, _tell, accumulate=accumulate) as feeder:
        trainer = ImageTrainer(ctx, settings, manifest, feeder, accumulate)
        trainer.greet()
        for epoch in ctx.epochs(settings.epochs):
            trainer.train_epoch(epoch)
            metrics = trainer.finish_epoch(epoch)
            trainer.save(epoch, metrics, last=epoch == settings.epochs)


class ImageTrainer:
    """The training of one rank: the model, its optimizer, and its progress.

    With `accumulate` a step has that many times params.batch_size images; a forward pass has at most
    params.batch_size.

    A checkpoint within an epoch also contains `taken` (how many ranks took how many steps of the epoch, for
    plan_epoch) and, per rank, the sums of its meter, so that train/accuracy covers the whole epoch after a resume.
    """

    def __init__(
        self, ctx: RankContext, settings: ImagesParams, manifest: Manifest, feeder: ImageLoader, accumulate: int = 1
    ) -> None:
        self._ctx, self._settings, self._manifest, self._feeder = ctx, settings, manifest, feeder
        self._accumulate = accumulate
        plan = plan_epoch(
            len(manifest.train), settings.batch_size * accumulate, ctx.world_size, ctx.rank, settings.seed, 1
        )
        self.steps_per_epoch = len(plan)
        self._images_per_epoch = sum(len(share.index) for share in plan)
        self.epochs_done = self.step = self._images = 0
        self._part = EpochProgress()
        self._meter = Meter(ctx)
        self._rate = 0.0

        torch.manual_seed(settings.seed)
        self._model_config = described_model(settings, manifest.classes)
        model = built_model(self._model_config)
        self._model = _distributed(ctx, settings, model, min(len(plan[0].index), settings.batch_size))
        self._optimizer = make_optimizer(settings, self._model.parameters())
        self._schedule = Schedule(settings, self._optimizer)
        resumed = ctx.resume(model=self._model, optimizer=self._optimizer)
        if resumed is None:
            begin_with_weights(ctx, settings, self._bare, self._model_config)
        else:
            self._resume_from(resumed)
        self._pixels = PixelNormalizer(self._model_config, ctx.device, channels_last=_is_channels_last(self._model))
        self._outputs = torch.tensor(self._model_config["outputs"], device=ctx.device)
        self._needs_two = any(isinstance(module, _BatchNorm) for module in self._model.modules())

    @property
    def _bare(self) -> nn.Module:
        """The model without the DDP wrapper."""
        module: nn.Module = self._model.module if isinstance(self._model, DistributedDataParallel) else self._model
        return module

    def _resume_from(self, resumed: Resumed) -> None:
        self._model_config = _described_again(resumed.data["model_config"], self._manifest, self._settings.image_size)
        self.epochs_done, self.step = int(resumed.epoch or 0), resumed.step
        done = (resumed.epoch or 0) - self.epochs_done
        taken, begun = resumed.data.get("taken", []), resumed.data.get("begun", 0.0)
        self._part = EpochProgress.resumed(taken, begun, done, self._ctx.world_size)
        self._images = round((self.epochs_done + done) * self._images_per_epoch)
        if state := resumed.rank_state:
            self._meter.restore(state["meter"])
            self._images = state["images"]

    def greet(self) -> None:
        """Print on rank 0 what is trained."""
        settings, world_size = self._settings, self._ctx.world_size
        n_parameters = sum(parameter.numel() for parameter in self._bare.parameters())
        going_on = f", continuing after epoch {self.epochs_done}, step {self.step}" if self.step else ""
        self._say(
            f"training {settings.architecture}, {n_parameters:,} parameters, on {len(self._manifest.train):,} images, "
            f"{counted(self.steps_per_epoch, 'step')} an epoch over {counted(world_size, 'rank')}{going_on}"
        )
        if self.epochs_done >= settings.epochs:
            self._say(f"all {settings.epochs} epochs are done: raise params.epochs to continue training")

    def train_epoch(self, epoch: int) -> None:
        """Take the remaining steps of an epoch.

        Raises TooManyBadImages as params.max_bad_fraction says.
        """
        part, settings = self._part, self._settings
        if not part.is_resumed:
            torch.manual_seed(hash((settings.seed, epoch, self._ctx.rank)))  # dropout, independent of before
            self._meter.reset()
        n_steps = self._feeder.steps(epoch, part.taken)
        table = self._training_table(is_last=epoch == settings.epochs)
        began, n_images = time.perf_counter(), 0
        for batch in self._feeder.train(epoch, part.taken, part.steps):
            self._schedule.before_step(epoch - 1 + part.done(n_steps), self.steps_per_epoch)
            loss_sum, logits = self._forward_backward(batch)
            self._ctx.step(self._optimizer)
            self._advance(batch)
            done = epoch - 1 + part.done(n_steps)
            self._observe(batch, done, loss_sum, logits)
            if table is not None and batch.n_counted:
                table.add(batch.images, batch.labels, logits)
            n_images += batch.total
            if part.steps < n_steps:  # the last step is saved at the end of the epoch
                self.save(done, {})
        self._rate = n_images / (time.perf_counter() - began)
        self._part = EpochProgress()
        if table is not None and (rows := table.rows()):
            self._ctx.log_table(TRAINED, TRAINED_COLUMNS, rows, step=self.step)

    def finish_epoch(self, epoch: int) -> dict[str, float]:
        """Validate; log, print and return the metrics of the epoch."""
        loss, accuracy = self._meter.epoch_means()
        self._check_bad()
        with self._ctx.timed("evaluation"):
            validated = self._validate(is_last=epoch == self._settings.epochs)
        metrics = {"train/loss": loss, "train/accuracy": accuracy, **validated}
        if self._ctx.rank == 0:
            samples = epoch * len(self._manifest.train)  # of all ranks
            logged = {"train/accuracy": accuracy, **validated, "samples": samples, "samples_per_s": self._rate}
            self._ctx.log(logged, step=self.step, epoch=epoch)
        shown = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self._say(f"epoch {epoch}/{self._settings.epochs}: {shown}, {self._rate:,.0f} images/s")
        return metrics

    def save(self, epoch: float, metrics: Mapping[str, float], *, last: bool = False) -> None:
        """Save a checkpoint if one is due. `epoch` is the number of epochs done, also a fraction."""
        try:
            saved = self._ctx.checkpoint(
                model=self._model,
                optimizer=self._optimizer,
                step=self.step,
                epoch=epoch,
                metrics=metrics,
                last=last,
                rank_state={"meter": self._meter.state(), "images": self._images},
                model_config=self._model_config,
                **self._part.state(self._ctx.world_size),
            )
        except PreemptedExit:
            self._meter.flush()  # a run that resumes from this checkpoint does not log these steps again
            raise
        if saved:
            self._meter.flush()

    def _forward_backward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute the gradient of a step; return the summed loss, in nats, and the logits of this rank's images.

        Several forward passes have nearly equal numbers of images; DDP averages the gradients in the last one.
        """
        n_parts = min(self._accumulate, -(-len(batch.labels) // self._settings.batch_size)) or 1
        parts = zip(batch.images.tensor_split(n_parts), batch.labels.tensor_split(n_parts), strict=True)
        loss_sums, logits = [], []
        for number, (images, labels) in enumerate(parts, start=1):
            with contextlib.nullcontext() if number == n_parts else self._no_sync():
                loss_sum, scores = self._forward(images, labels)
                self._ctx.backward(loss_sum * self._weight(batch))
            loss_sums.append(loss_sum.detach())
            logits.append(scores.detach())
        return torch.stack(loss_sums).sum(), torch.cat(logits)

    def _no_sync(self) -> contextlib.AbstractContextManager[None]:
        model = self._model
        return model.no_sync() if isinstance(model, DistributedDataParallel) else contextlib.nullcontext()

    def _forward(self, raw: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the summed loss and the logits of some images.

        BatchNorm needs at least two images: a single one is duplicated, which gives the same gradient.
        """
        images = self._pixels(raw)
        if len(images) == 1 and self._needs_two:
            images = torch.cat([images, images])
        logits = self._model(images)[: len(labels)].float()
        loss_sum = functional.cross_entropy(logits, self._targets(labels), reduction="sum")
        return loss_sum, logits

    def _targets(self, labels: Tensor) -> Tensor:
        return self._outputs[labels.to(self._ctx.device, non_blocking=True)]

    def _weight(self, batch: Batch) -> float:
        """The factor that turns summed losses into the mean over all images of a step; DDP averages over the ranks.

        A rank without images takes part with weight 0, because DDP waits for all ranks in each step.
        """
        return self._ctx.world_size / batch.total if batch.n_counted else 0.0

    def _advance(self, batch: Batch) -> None:
        self.step += 1
        self._part.steps += 1
        self._images += batch.n_counted
        self._report()

    def _report(self) -> None:
        """Report the progress; during validation, which makes no progress, it only reports activity."""
        self._ctx.progress(self._images, self._settings.epochs * self._images_per_epoch, unit="images")

    def _observe(self, batch: Batch, epoch: float, loss_sum: Tensor, logits: Tensor) -> None:
        """Log the metrics of a step; at the first step of an epoch rank 0 also logs a picture of examples."""
        hits = (logits.detach().argmax(1) == self._targets(batch.labels)).sum()
        sums = torch.stack([loss_sum.detach(), hits]).double()
        self._meter.add(self.step, epoch, self._schedule.learning_rate, sums, batch.n_counted)
        is_first = (self.step - 1) % self.steps_per_epoch == 0
        if is_first and self._ctx.rank == 0 and batch.n_counted:
            caption = example_words(logits, batch.labels, self._model_config)
            self._ctx.log_image("examples", example_strip(batch.images), step=self.step, caption=caption)

    def _training_table(self, *, is_last: bool) -> TrainingTable | None:
        """Collect images of the last epoch for a table; None in other epochs."""
        return TrainingTable(self._model_config, -(-_EXAMPLES_KEPT // self._ctx.world_size)) if is_last else None

    def _validate(self, *, is_last: bool) -> dict[str, float]:
        """Return the score on the held-out images, if there are any; the predictions of the last epoch are saved."""
        if not self._manifest.val:
            return {}
        share_buffers(self._bare)
        table = PredictionTable(self._manifest.keys, self._model_config) if is_last else None
        keep = table.add if table else None
        batches = self._feeder.validate()
        score = evaluate(self._bare, self._pixels, batches, self._outputs, keep, self._report)
        self._check_bad()
        if table is not None:
            self._ctx.save_file(f"predictions/rank-{self._ctx.rank}.csv", table_file(table.rows()))
        return score.metrics() if score.n else {}

    def _check_bad(self) -> None:
        """Check the number of bad images of all ranks. All ranks must call it. Raises TooManyBadImages."""
        check_bad_on_all_ranks(self._feeder, self._manifest, self._settings.max_bad_fraction, self._ctx.device)

    def _say(self, text: str) -> None:
        """Print a line on rank 0."""
        if self._ctx.rank == 0:
            _tell(text)


def _tell(text: str) -> None:
    print(text, flush=True)


def _distributed(ctx: RankContext, settings: ImagesParams, model: nn.Module, n_images: int) -> nn.Module:
    """Prepare the model, wrap it in DDP, and run one backward pass with gradient 0.

    DDP fixes the order of its reduction after the first backward pass. Without this pass, the first step of a resumed
    run would sum the gradients of the ranks in another order than the same step of an uninterrupted run. On a GPU the
    pass has as many images as a step, so that a lack of memory shows at once. Buffers are not synchronised in each
    step: training does not read them, and a checkpoint contains those of rank 0.
    """
    options: dict[str, Any] = {_SYNC_BUFFERS: False}
    ddp = ctx.prepare(
        model,
        accumulate=1,  # a step is divided here, because its gradient is the mean over all of its images
        gradient_as_bucket_view=True,
        **options,
    )
    buffers = [buffer.clone() for buffer in ddp.buffers()]
    n_shown = max(2, n_images) if ctx.device.type == "cuda" else 2
    size = settings.image_size
    images = torch.zeros(n_shown, 3, size, size, device=ctx.device)
    if _is_channels_last(ddp):
        images = images.to(memory_format=torch.channels_last)
    (0.0 * ddp(images).float().sum()).backward()
    ddp.zero_grad(set_to_none=True)
    for buffer, before in zip(ddp.buffers(), buffers, strict=True):
        buffer.copy_(before)
    return ddp


def _is_channels_last(model: nn.Module) -> bool:
    """Return whether the weights of the convolutions are stored channels last."""
    return any(
        weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
        for weight in model.parameters()
    )


def _described_again(model_config: dict[str, Any], manifest: Manifest, image_size: int) -> dict[str, Any]:
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


class Meter:
    """Logs loss, hits and learning rate of each step, several steps at a time; sums them over this rank's epoch."""

    def __init__(self, ctx: RankContext) -> None:
        self._ctx = ctx
        # Steps that are not logged yet: step, epoch, learning rate, number of images, sums.
        self._waiting: list[tuple[int, float, float, int, Tensor]] = []
        self._most_waiting = _STEPS_PER_READING if ctx.device.type == "cuda" else 1
        self._sums = torch.zeros(2, dtype=torch.float64, device=ctx.device)
        self._n = 0

    def add(self, step: int, epoch: float, learning_rate: float, sums: Tensor, n: int) -> None:
        """Add a step with n images of this rank; sums: [2], their summed loss and number of hits."""
        if n == 0:
            return
        self._sums += sums
        self._n += n
        self._waiting.append((step, epoch, learning_rate, n, sums))
        if len(self._waiting) >= self._most_waiting:
            self.flush()

    def flush(self) -> None:
        """Log the steps that were added since the last flush."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        read = torch.stack([sums for *_, sums in waiting]).tolist()
        for (step, epoch, learning_rate, n, _), (loss_sum, hits) in zip(waiting, read, strict=True):
            values = {"train/loss": loss_sum / n, "train/correct": hits / n, "train/learning_rate": learning_rate}
            self._ctx.log(values, step=step, epoch=epoch)

    def epoch_means(self) -> tuple[float, float]:
        """Return the mean loss and the share of hits in the epoch so far, over all ranks. All ranks must call it."""
        self.flush()
        totals = torch.cat([self._sums, self._sums.new_tensor([self._n])])
        dist.all_reduce(totals)
        loss_sum, hits, n = totals.tolist()
        return loss_sum / max(1, n), hits / max(1, n)

    def reset(self) -> None:
        """Start a new epoch."""
        self._sums.zero_()
        self._n = 0

    def state(self) -> dict[str, Any]:
        """Return the sums of this rank, for a checkpoint within an epoch."""
        return {"sums": self._sums, "n": self._n}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the sums of a checkpoint."""
        self._sums.copy_(state["sums"])
        self._n = int(state["n"])


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


class Schedule:
    """Sets the optimizer's learning rate before each step: a function of the progress, so that it has no state."""

    def __init__(self, settings: ImagesParams, optimizer: Optimizer) -> None:
        self._settings, self._optimizer = settings, optimizer

    @property
    def learning_rate(self) -> float:
        """The rate of the next step."""
        return float(self._optimizer.param_groups[0]["lr"])

    def before_step(self, epochs: float, steps_per_epoch: int) -> None:
        """Set the rate of the step after `epochs` epochs."""
        settings = self._settings
        factor = rate_factor(settings, epochs, steps_per_epoch)
        for group in self._optimizer.param_groups:
            group["lr"] = settings.base_lr * factor
        if settings.scheduler == "one_cycle":
            self._set_momentum(_one_cycle(epochs * steps_per_epoch, settings.epochs * steps_per_epoch)[1])

    def _set_momentum(self, momentum: float) -> None:
        for group in self._optimizer.param_groups:
            if "betas" in group:
                group["betas"] = (momentum, *group["betas"][1:])
            else:
                group["momentum"] = momentum


def rate_factor(settings: ImagesParams, epochs: float, steps_per_epoch: int) -> float:
    """Return the learning rate of the step after `epochs` epochs, relative to the highest (0 to 1)."""
    if settings.scheduler == "one_cycle":
        return _one_cycle(epochs * steps_per_epoch, settings.epochs * steps_per_epoch)[0]
    if settings.scheduler == "cosine":
        return _between(1.0, 0.0, epochs / settings.epochs)
    return 1.0


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
