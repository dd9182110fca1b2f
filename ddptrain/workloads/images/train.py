"""Trains an image classifier: the training loop of each rank. A smaller start for your own: `ddptrain init`."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, Optimizer

from ddptrain.config.wording import counted, listed
from ddptrain.errors import UsageError
from ddptrain.rank.context import RankContext
from ddptrain.workloads.images.batches import BadImages, Batch, train_loader, val_loader
from ddptrain.workloads.images.classifier import PixelNormalizer
from ddptrain.workloads.images.evaluate import (
    TRAINED,
    TRAINED_COLUMNS,
    PredictionTable,
    TrainingTable,
    evaluate_model,
    example_strip,
    example_words,
)
from ddptrain.workloads.images.manifest import Manifest
from ddptrain.workloads.images.params import ImagesParams
from ddptrain.workloads.images.weights import begin_with_weights, built_model, described_model
from ddptrain.workloads.schedules import make_schedule

_EXAMPLES_KEPT = 1000  # of all ranks, in the table train_predictions
_STEPS_PER_READING = 10  # on a GPU, which has to wait for each value that is logged
_MOMENTUM, _EPSILON = 0.9, 1e-6
# Newer versions of torch warn about the old name.
_SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


# --8<-- [start:train]
def train(ctx: RankContext, **params: Any) -> None:
    """Train an image classifier on all ranks; `params` are those of ImagesParams."""
    settings = ImagesParams.model_validate(params)
    if ctx.inputs is None:
        raise UsageError("there is no list of images: start `workload: images` with `ddptrain train`, which makes it")
    images = Manifest.read(ctx.inputs)

    torch.manual_seed(settings.seed + ctx.rank)  # all ranks get rank 0's weights; each rank has a dropout of its own
    config = described_model(settings, images.classes)
    model = built_model(config)
    if ctx.resume_folder is None:
        begin_with_weights(ctx, settings, model, config)
    ddp = distributed(ctx, settings, model)
    optimizer = make_optimizer(settings, model.parameters())
    batches = train_loader(ctx, images, settings)
    held_out = val_loader(ctx, images, settings) if len(images.val) else None

    resumed = ctx.resume(model=ddp, optimizer=optimizer)
    step, saved = 0, None
    if resumed:
        step, saved = resumed.step, resumed.data.get("schedule")
        config = described_again(resumed.data["model_config"], images, settings.image_size)
    share = lambda: batches.position / settings.epochs  # noqa: E731
    schedule = make_schedule(settings.scheduler, optimizer, settings.base_lr, share, saved)
    state: dict[str, Any] = {"model": ddp, "optimizer": optimizer, "schedule": schedule, "model_config": config}

    pixels = PixelNormalizer(config, ctx.device, channels_last=is_channels_last(ddp))
    outputs = torch.tensor(config["outputs"], device=ctx.device)  # of the model, for each class
    bad = BadImages(images, settings.max_bad_fraction)
    rows, steps_per_epoch = math.ceil(len(images.train) / ctx.world_size), math.ceil(len(batches) / ctx.accumulate)
    log_every = _STEPS_PER_READING if ctx.device.type == "cuda" else 1
    ctx.say(
        f"training {settings.architecture}, {sum(each.numel() for each in model.parameters()):,} parameters, "
        f"on {len(images.train):,} images, {counted(steps_per_epoch, 'step')} an epoch over "
        f"{counted(ctx.world_size, 'rank')}{continuing(step, batches.epoch, settings.epochs) if resumed else ''}"
    )

    def report() -> None:
        ctx.progress(round(batches.position * rows), settings.epochs * rows, unit="images")

    predictions = None
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
                log_examples(ctx, batch, logits, config, step, every=steps_per_epoch)
            table.add(batch.images, batch.labels, logits)
            report()
            if batches.remaining:  # the checkpoint of a whole epoch has the validation
                ctx.checkpoint(step=step, epoch=batches.position, **state)
        speed = (epoch - first) * len(images.train) / (time.perf_counter() - began)
        if is_last:
            ctx.log_table(TRAINED, TRAINED_COLUMNS, table.rows(), step=step)

        loss_sum, n_right, count = sums.tolist()
        metrics = {"train/loss": ctx.mean(loss_sum / count, count), "train/accuracy": ctx.mean(n_right / count, count)}
        if held_out is not None:
            predictions = PredictionTable(images.keys, config)
            with ctx.timed("evaluation"):
                share_buffers(model)
                metrics |= evaluate_model(model, pixels, held_out, outputs, bad, predictions, report)
        bad.check(ctx.device)
        if settings.scheduler == "plateau":
            schedule.step(metrics.get("val/loss", metrics["train/loss"]))
        if ctx.rank == 0:
            logged = {name: value for name, value in metrics.items() if name != "train/loss"}  # each step has that
            whole = {"samples": epoch * len(images.train), "samples_per_s": speed}  # of all ranks
            ctx.log({**logged, **whole}, step=step, epoch=epoch)
        text = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        ctx.say(f"epoch {epoch}/{settings.epochs}: {text}, {speed:,.0f} images/s")
        ctx.checkpoint(step=step, epoch=epoch, metrics=metrics, last=is_last, **state)
    if predictions is not None:  # of the last epoch
        ctx.save_file(f"predictions/rank-{ctx.rank}.csv", predictions.csv())


# --8<-- [end:train]


def log_examples(ctx: RankContext, batch: Batch, logits: Tensor, config: dict[str, Any], step: int, every: int) -> None:
    """Log a picture of some images of rank 0 with their classes and what the model says, at each `every`-th step."""
    if ctx.rank == 0 and (step - 1) % every == 0:
        caption = example_words(logits, batch.labels, config)
        ctx.log_image("examples", example_strip(batch.images), step=step, caption=caption)


def continuing(step: int, epoch: int, epochs: int) -> str:
    """Return how the line about the start of a resumed run ends."""
    if epoch > epochs:
        return f": all {epochs} epochs are done, raise params.epochs to continue training"
    return f", continuing after step {step} in epoch {epoch}"


def forward(model: nn.Module, images: Tensor) -> Tensor:
    """Return the logits of some images. BatchNorm needs two: a single one is duplicated, with the same gradient."""
    logits: Tensor = model(images if len(images) > 1 else torch.cat([images, images]))
    return logits[: len(images)]


def make_optimizer(settings: ImagesParams, parameters: Iterable[Tensor]) -> Optimizer:
    """Return the optimizer that params.optimizer selects."""
    shared: dict[str, Any] = {"lr": settings.base_lr, "weight_decay": settings.weight_decay, "fused": True}
    if settings.optimizer == "sgd":
        return SGD(parameters, momentum=_MOMENTUM, **shared)
    kind = AdamW if settings.optimizer == "adamw" else Adam
    return kind(parameters, betas=(_MOMENTUM, 0.999), eps=_EPSILON, **shared)


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


def share_buffers(model: nn.Module) -> None:
    """Copy the buffers of rank 0 (BatchNorm statistics), which a checkpoint contains, to all ranks."""
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)


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
