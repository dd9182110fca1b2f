"""The pet-name workload: what `workload: petnames` runs in every rank."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from ddptrain.config.wording import counted
from ddptrain.workloads.petnames.data import Rows, Share, make_rows, plan_epoch
from ddptrain.workloads.petnames.evaluate import mean_nll
from ddptrain.workloads.petnames.model import CharacterModel, ModelConfig, summed_nll
from ddptrain.workloads.petnames.names import Split, chosen_names, split_names
from ddptrain.workloads.petnames.params import PetnamesParams
from ddptrain.workloads.petnames.schedule import learning_rate_factor
from ddptrain.workloads.sharding import Part

if TYPE_CHECKING:
    from ddptrain.rank.context import RankContext, Resumed

_CPU_MICROBATCH = 512  # rows whose activations stay in a core's caches


def train(ctx: RankContext, **params: Any) -> None:
    """Trains the character model on names, all ranks together; `params` are those of PetnamesParams."""
    settings = PetnamesParams.model_validate(params)
    split = _load_split(ctx, settings)
    rows = _rows(ctx, settings, split.train)
    held_out = _rows(ctx, settings, split.held_out) if split.held_out else None

    torch.manual_seed(settings.seed)
    config = ModelConfig.of(settings)
    model = CharacterModel(config).to(ctx.device)
    optimizer = AdamW(model.parameters(), settings.learning_rate, weight_decay=settings.weight_decay, fused=True)
    ddp = _distributed(ctx, model, rows)
    resumed = ctx.resume(model=model, optimizer=optimizer)
    trainer = _Trainer(ctx, settings, rows, ddp, optimizer, resumed)
    _greet(ctx, model, rows, trainer)

    for epoch in range(trainer.epochs_done + 1, settings.epochs + 1):
        began, before = time.perf_counter(), trainer.samples
        loss = trainer.train_epoch(epoch)
        rate = (trainer.samples - before) / (time.perf_counter() - began)
        logged = {"train/loss": loss, "samples": trainer.samples, "samples_per_s": rate}
        ctx.log(logged, step=trainer.step, epoch=epoch)
        metrics = {"train/loss": ctx.mean(loss, trainer.n_targets)}
        if held_out is not None:
            metrics["val/loss"] = mean_nll(model, held_out, ctx.rank, ctx.world_size, trainer.report)
        if held_out is not None and ctx.rank == 0:
            ctx.log({"val/loss": metrics["val/loss"]}, step=trainer.step, epoch=epoch)
        said = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        print(f"epoch {epoch}/{settings.epochs}: {said}, {rate:,.0f} {trainer.unit}/s", flush=True)
        trainer.save(epoch, metrics, last=epoch == settings.epochs)


class _Trainer:
    """One rank's training: the DDP model, and how far it is.

    A checkpoint in mid epoch holds, besides, `taken`: how many ranks took how many steps of the epoch, as plan_epoch
    wants it; and of each rank the losses that it has summed up, so that train/loss is that of the whole epoch.
    """

    def __init__(
        self,
        ctx: RankContext,
        settings: PetnamesParams,
        rows: Rows,
        model: DistributedDataParallel,
        optimizer: AdamW,
        resumed: Resumed | None,
    ) -> None:
        self._ctx = ctx
        self._settings = settings
        self._rows = rows
        self._model = model
        self._optimizer = optimizer
        self._microbatch = _microbatch_rows(settings, ctx.device)
        self._model_config = model.module.config.plain()
        self.epochs_done, self.step = (int(resumed.epoch or 0), resumed.step) if resumed else (0, 0)
        plan = self._plan(self.epochs_done + 1)
        self.steps_per_epoch = len(plan)
        self.rows_per_epoch = sum(len(share.index) for share in plan)
        self.samples = self.epochs_done * self.rows_per_epoch
        self._part = Part()
        self._loss_sum = torch.zeros((), device=ctx.device)
        self.n_targets = 0
        if resumed:
            self._go_on(resumed)
        self.unit = "names" if settings.context == "full" else "windows"

    def _go_on(self, resumed: Resumed) -> None:
        done = (resumed.epoch or 0) - self.epochs_done
        taken, begun = resumed.data.get("taken", []), resumed.data.get("begun", 0.0)
        self._part = Part.after(taken, begun, done, self._ctx.world_size)
        self.samples += round(done * self.rows_per_epoch)
        if state := resumed.rank_state:
            self._loss_sum, self.n_targets = state["loss_sum"].to(self._ctx.device), state["n_targets"]
            self.samples = state["samples"]

    def train_epoch(self, epoch: int) -> float:
        """Takes the steps of an epoch that are left; returns the mean loss, in nats, over this rank's own targets.

        Raises:
            FloatingPointError: the loss is no longer a number.
        """
        if not self._part.is_resumed:
            torch.manual_seed(hash((self._settings.seed, epoch, self._ctx.rank)))  # dropout, whatever was before
            self._loss_sum.zero_()
            self.n_targets = 0
        plan = self._plan(epoch, self._part.taken)
        while self._part.steps < len(plan):
            share = plan[self._part.steps]
            self._set_learning_rate(epoch - 1 + self._part.done(len(plan)))
            self._optimizer.zero_grad()
            self._loss_sum += self._forward_backward(share)
            self._clip_gradient()
            self._optimizer.step()
            self._advance(share)
            if self._part.steps < len(plan):  # else the epoch is over, and its end saves
                self.save(epoch - 1 + self._part.done(len(plan)), {})
        self._part = Part()
        loss = float(self._loss_sum) / max(1, self.n_targets)
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"train/loss is {loss} in epoch {epoch}: lower params.learning_rate, or set params.grad_clip"
            )
        return loss

    def save(self, epoch: float, metrics: Mapping[str, float], *, last: bool = False) -> None:
        """Saves a checkpoint, if one is due after `epoch` epochs."""
        self._ctx.checkpoint(
            model=self._model,
            optimizer=self._optimizer,
            step=self.step,
            epoch=epoch,
            metrics=metrics,
            last=last,
            rank_state={"loss_sum": self._loss_sum, "n_targets": self.n_targets, "samples": self.samples},
            model_config=self._model_config,
            **self._part.state(self._ctx.world_size),
        )

    def _forward_backward(self, share: Share) -> Tensor:
        """Leaves the gradient of the mean over all ranks' targets of the step; returns this rank's summed loss.

        DDP averages the gradients of the ranks, hence the factor world_size.
        """
        loss_sum = torch.zeros((), device=self._ctx.device)
        for index, weight, is_last in self._parts(share):
            inputs, targets = self._rows.batch(index)
            with contextlib.nullcontext() if is_last else self._model.no_sync():
                loss = weight * summed_nll(self._model(inputs), targets)
                (loss * (self._ctx.world_size / share.total_targets)).backward()
            loss_sum += loss.detach()
        return loss_sum

    def _parts(self, share: Share) -> Iterator[tuple[Tensor, float, bool]]:
        """Micro-batches of a share: rows, weight, and whether it is the last, after which DDP reduces.

        A rank whose share is empty runs one row with weight 0: DDP waits for every rank in every step.
        """
        if len(share.index) == 0:
            yield torch.zeros(1, dtype=torch.int64), 0.0, True
            return
        parts = self._rows.parts(share.index, self._microbatch) if self._microbatch else [share.index]
        for number, index in enumerate(parts, start=1):
            yield index, 1.0, number == len(parts)

    def _plan(self, epoch: int, taken: Sequence[Sequence[int]] = ()) -> list[Share]:
        settings, ctx = self._settings, self._ctx
        return plan_epoch(self._rows, settings.batch_size, ctx.world_size, ctx.rank, settings.seed, epoch, taken)

    def _set_learning_rate(self, epochs: float) -> None:
        """For the step that follows after so many epochs."""
        settings = self._settings
        factor = learning_rate_factor(settings.lr_schedule, epochs, settings.epochs)
        for group in self._optimizer.param_groups:
            group["lr"] = settings.learning_rate * factor

    def _clip_gradient(self) -> None:
        if self._settings.grad_clip > 0:
            nn.utils.clip_grad_norm_(self._model.parameters(), self._settings.grad_clip)

    def _advance(self, share: Share) -> None:
        self.step += 1
        self._part.steps += 1
        self.n_targets += int(self._rows.n_targets[share.index].sum())
        self.samples += len(share.index)
        self.report()

    def report(self) -> None:
        """Say how far training is; in validation, which does not change that, it is a sign of life."""
        self._ctx.progress(self.samples, self._settings.epochs * self.rows_per_epoch, unit=self.unit)


def _load_split(ctx: RankContext, settings: PetnamesParams) -> Split:
    """Reads and splits the names, the same on every rank; rank 0 says what it found and saves them for generate."""
    clean = chosen_names(settings)
    split = split_names(clean.names, settings.val_fraction, settings.seed)
    if ctx.rank == 0:
        print(clean.report(settings.names), flush=True)
        known = {"train": sorted(set(split.train)), "held_out": split.held_out}
        ctx.save_file("names.json", json.dumps(known, indent=0))
    return split


def _distributed(ctx: RankContext, model: CharacterModel, rows: Rows) -> DistributedDataParallel:
    """The model, wrapped, its gradients' places in the reduction settled.

    DDP settles them after the first backward. Were that a step, a resumed run's first would add the ranks' gradients
    up in another order than an uninterrupted run does.
    """
    ddp = DistributedDataParallel(model, device_ids=[ctx.device] if ctx.device.type == "cuda" else None)
    inputs, targets = rows.batch(torch.zeros(1, dtype=torch.int64))
    (0.0 * summed_nll(ddp(inputs), targets)).backward()
    ddp.zero_grad(set_to_none=True)
    return ddp


def _rows(ctx: RankContext, settings: PetnamesParams, names: Sequence[str]) -> Rows:
    return make_rows(names, settings.context, settings.window, ctx.device, skip_blanks=settings.skip_blanks)


def _greet(ctx: RankContext, model: CharacterModel, rows: Rows, trainer: _Trainer) -> None:
    if ctx.rank == 0:
        size = sum(parameter.numel() for parameter in model.parameters())
        print(
            f"training {size:,} parameters on {len(rows):,} {trainer.unit}, "
            f"{counted(trainer.steps_per_epoch, 'step')} an epoch over {counted(ctx.world_size, 'rank')}"
            + (f", going on after epoch {trainer.epochs_done}, step {trainer.step}" if trainer.step else ""),
            flush=True,
        )


def _microbatch_rows(settings: PetnamesParams, device: torch.device) -> int:
    """Rows of one forward and backward; 0 is the whole batch."""
    if settings.loss_microbatch == "auto":
        return _CPU_MICROBATCH if device.type == "cpu" else 0
    return settings.loss_microbatch
