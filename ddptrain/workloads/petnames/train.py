"""The training loop of the petnames workload, executed by each rank."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from ddptrain.config.wording import counted
from ddptrain.errors import UsageError
from ddptrain.protocol.rank_spec import weights_in
from ddptrain.workloads.data_shards import EpochProgress, RankShare
from ddptrain.workloads.petnames.alphabet import display
from ddptrain.workloads.petnames.data import Rows, make_rows, plan_epoch
from ddptrain.workloads.petnames.model import CharacterModel, ModelConfig, summed_nll
from ddptrain.workloads.petnames.names import Split, load_names, split_names
from ddptrain.workloads.petnames.params import PetnamesParams
from ddptrain.workloads.petnames.sampling import sample_names

if TYPE_CHECKING:
    from ddptrain.rank.context import RankContext, Resumed

_VALIDATION_ROWS = 1024  # of one forward pass
_RISE = 0.3  # one_cycle: share of the run in which the rate rises (Smith and Topin, 2017: super-convergence)
_START = 0.04  # one_cycle: rate of the first step relative to the highest
_LONGEST_EXAMPLE = 20  # characters: a model that has learned little ends few names, and reading them takes long
_GENERATED = 16  # names that the model writes at the end
_TEMPERATURE = 0.8  # of the examples, as `ddptrain generate` has it


def train(ctx: RankContext, **params: Any) -> None:
    """Train the character model on all ranks; `params` are those of PetnamesParams."""
    settings = PetnamesParams.model_validate(params)
    split = _load_split(ctx, settings)
    rows = make_rows(split.train, settings.context, settings.window, ctx.device)
    held_out = make_rows(split.held_out, settings.context, settings.window, ctx.device) if split.held_out else None

    torch.manual_seed(settings.seed)
    config = ModelConfig.of(settings)
    model = CharacterModel(config).to(ctx.device)
    if settings.weights is not None:
        _begin_with_weights(ctx, model, settings.weights)
    optimizer = AdamW(model.parameters(), settings.learning_rate, weight_decay=settings.weight_decay, fused=True)
    accumulate = ctx.accumulate  # `prepare` sets it to 1
    ddp = _distributed(ctx, model, rows)
    resumed = ctx.resume(model=model, optimizer=optimizer)
    trainer = NamesTrainer(ctx, settings, rows, ddp, optimizer, resumed, accumulate)
    _greet(ctx, model, rows, trainer)

    for epoch in ctx.epochs(settings.epochs):
        began, before = time.perf_counter(), trainer.samples
        own_loss = trainer.train_epoch(epoch)
        rate = (trainer.samples - before) / (time.perf_counter() - began)
        loss = ctx.mean(own_loss, trainer.n_targets)
        logged = {"train/loss": loss, "samples": trainer.samples, "samples_per_s": rate}
        ctx.log(logged, step=trainer.step, epoch=epoch)
        metrics = {"train/loss": loss}
        if held_out is not None:
            with ctx.timed("evaluation"):
                metrics["val/loss"] = mean_nll(model, held_out, ctx.rank, ctx.world_size, trainer.report)
            if ctx.rank == 0:
                ctx.log({"val/loss": metrics["val/loss"]}, step=trainer.step, epoch=epoch)
        shown = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        if ctx.rank == 0:
            print(f"epoch {epoch}/{settings.epochs}: {shown}, {rate:,.0f} {trainer.unit}/s", flush=True)
        trainer.save(epoch, metrics, last=epoch == settings.epochs)
    if ctx.rank == 0:
        known = {*split.train, *split.held_out}
        log_generated_names(ctx, model, known, _GENERATED, settings.seed, trainer.step)


class NamesTrainer:
    """The training of one rank: the DDP model, and its progress.

    With `accumulate` a step has that many times params.batch_size rows; a forward pass has at most params.batch_size.

    A checkpoint within an epoch also contains `taken` (how many ranks took how many steps of the epoch, for
    plan_epoch) and, per rank, the sum of its losses, so that train/loss covers the whole epoch after a resume.
    """

    def __init__(
        self,
        ctx: RankContext,
        settings: PetnamesParams,
        rows: Rows,
        model: DistributedDataParallel,
        optimizer: AdamW,
        resumed: Resumed | None,
        accumulate: int = 1,
    ) -> None:
        self._ctx, self._settings, self._rows, self._model, self._optimizer = ctx, settings, rows, model, optimizer
        self._step_rows = settings.batch_size * accumulate
        self._model_config = model.module.config.plain()
        self.epochs_done, self.step = (int(resumed.epoch or 0), resumed.step) if resumed else (0, 0)
        plan = self._plan(self.epochs_done + 1)
        self.steps_per_epoch = len(plan)
        self.rows_per_epoch = sum(len(share.index) for share in plan)
        self.samples = self.epochs_done * self.rows_per_epoch
        self._part = EpochProgress()
        self._loss_sum = torch.zeros((), device=ctx.device)
        self.n_targets = 0
        if resumed:
            self._resume_from(resumed)
        self.unit = "names" if settings.context == "full" else "windows"

    def _resume_from(self, resumed: Resumed) -> None:
        done = (resumed.epoch or 0) - self.epochs_done
        taken, begun = resumed.data.get("taken", []), resumed.data.get("begun", 0.0)
        self._part = EpochProgress.resumed(taken, begun, done, self._ctx.world_size)
        self.samples += round(done * self.rows_per_epoch)
        if state := resumed.rank_state:
            self._loss_sum, self.n_targets = state["loss_sum"].to(self._ctx.device), state["n_targets"]
            self.samples = state["samples"]

    def train_epoch(self, epoch: int) -> float:
        """Take the remaining steps of an epoch; return the mean loss, in nats, over this rank's own targets."""
        if not self._part.is_resumed:
            torch.manual_seed(hash((self._settings.seed, epoch, self._ctx.rank)))  # dropout, independent of before
            self._loss_sum.zero_()
            self.n_targets = 0
        plan = self._plan(epoch, self._part.taken)
        while self._part.steps < len(plan):
            share = plan[self._part.steps]
            self._set_learning_rate(epoch - 1 + self._part.done(len(plan)))
            self._loss_sum += self._forward_backward(share)
            self._ctx.step(self._optimizer, clip=self._settings.grad_clip or None)
            self._advance(share)
            if self._part.steps < len(plan):  # the last step is saved at the end of the epoch
                self.save(epoch - 1 + self._part.done(len(plan)), {})
        self._part = EpochProgress()
        return float(self._loss_sum) / max(1, self.n_targets)

    def save(self, epoch: float, metrics: Mapping[str, float], *, last: bool = False) -> None:
        """Save a checkpoint if one is due. `epoch` is the number of epochs done, also a fraction."""
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

    def _forward_backward(self, share: RankShare) -> Tensor:
        """Compute the gradient of the mean over all ranks' targets of the step; return this rank's summed loss.

        The factor world_size cancels that DDP averages the gradients over the ranks.
        """
        loss_sum = torch.zeros((), device=self._ctx.device)
        for index, weight, is_last in self._parts(share):
            inputs, targets = self._rows.batch(index)
            with contextlib.nullcontext() if is_last else self._model.no_sync():
                loss = weight * summed_nll(self._model(inputs), targets)
                self._ctx.backward(loss * (self._ctx.world_size / share.total))
            loss_sum += loss.detach()
        return loss_sum

    def _parts(self, share: RankShare) -> Iterator[tuple[Tensor, float, bool]]:
        """Yield the batches of a share: rows, weight, and whether it is the last one, after which DDP reduces.

        A rank with an empty share computes one row with weight 0, because DDP waits for all ranks in each step.
        """
        if len(share.index) == 0:
            yield torch.zeros(1, dtype=torch.int64), 0.0, True
            return
        parts = share.index.split(self._settings.batch_size)
        for number, index in enumerate(parts, start=1):
            yield index, 1.0, number == len(parts)

    def _plan(self, epoch: int, taken: Sequence[Sequence[int]] = ()) -> list[RankShare]:
        settings, ctx = self._settings, self._ctx
        return plan_epoch(self._rows, self._step_rows, ctx.world_size, ctx.rank, settings.seed, epoch, taken)

    def _set_learning_rate(self, epochs: float) -> None:
        """Set the learning rate of the step after `epochs` epochs."""
        settings = self._settings
        factor = learning_rate_factor(settings.lr_schedule, epochs, settings.epochs)
        for group in self._optimizer.param_groups:
            group["lr"] = settings.learning_rate * factor

    def _advance(self, share: RankShare) -> None:
        self.step += 1
        self._part.steps += 1
        self.n_targets += int(self._rows.n_targets[share.index].sum())
        self.samples += len(share.index)
        self.report()

    def report(self) -> None:
        """Report the progress; during validation, which makes no progress, it only reports activity."""
        self._ctx.progress(self.samples, self._settings.epochs * self.rows_per_epoch, unit=self.unit)


def _load_split(ctx: RankContext, settings: PetnamesParams) -> Split:
    """Read and split the names, equally on all ranks; rank 0 prints a summary and saves the names for `generate`."""
    clean = load_names(settings)
    split = split_names(clean.names, settings.val_fraction, settings.seed)
    if ctx.rank == 0:
        print(clean.report(settings.names), flush=True)
        known = {"train": sorted(set(split.train)), "held_out": split.held_out}
        ctx.save_file("names.json", json.dumps(known, indent=0))
    return split


def _distributed(ctx: RankContext, model: CharacterModel, rows: Rows) -> DistributedDataParallel:
    """Prepare the model, wrap it in DDP, and run one backward pass with gradient 0.

    DDP fixes the order of its reduction after the first backward pass. Without this pass, the first step of a resumed
    run would sum the gradients of the ranks in another order than the same step of an uninterrupted run.
    """
    # A step is divided into forward passes here, because its gradient is the mean over all of its rows.
    ddp = ctx.prepare(model, accumulate=1)
    assert isinstance(ddp, DistributedDataParallel)
    inputs, targets = rows.batch(torch.zeros(1, dtype=torch.int64))
    (0.0 * summed_nll(ddp(inputs), targets)).backward()
    ddp.zero_grad(set_to_none=True)
    return ddp


def _begin_with_weights(ctx: RankContext, model: CharacterModel, weights: str) -> None:
    """Load the weights of a model of the registry. Raises UsageError if they are of another architecture."""
    path = weights_in(ctx.inputs)
    state = load_file(path, device=str(ctx.device))
    own = model.state_dict()
    wrong = [name for name in own.keys() | state.keys() if name not in own or name not in state]
    wrong += [name for name in own.keys() & state.keys() if own[name].shape != state[name].shape]
    if wrong:
        raise UsageError(
            f"params.weights: {weights} is of another architecture ({', '.join(sorted(wrong)[:3])} differ): set input, "
            "embedding_size, hidden_size and layers as they were in its training, or weights: null"
        )
    model.load_state_dict(state)
    if ctx.rank == 0:
        print(f"weights: {weights}", flush=True)


def _greet(ctx: RankContext, model: CharacterModel, rows: Rows, trainer: NamesTrainer) -> None:
    if ctx.rank == 0:
        size = sum(parameter.numel() for parameter in model.parameters())
        print(
            f"training {size:,} parameters on {len(rows):,} {trainer.unit}, "
            f"{counted(trainer.steps_per_epoch, 'step')} an epoch over {counted(ctx.world_size, 'rank')}"
            + (f", continuing after epoch {trainer.epochs_done}, step {trainer.step}" if trainer.step else ""),
            flush=True,
        )


def log_generated_names(
    ctx: RankContext, model: CharacterModel, known: Iterable[str], count: int, seed: int, step: int
) -> None:
    """Log the table generated_names: the distinct names among `count` tries, and whether they are in `known`.

    The random state of the training is not used, and the model stays as it is. Raises OSError as ctx.log_table does.
    """
    reader = copy.deepcopy(model).cpu().eval()
    draw = torch.Generator().manual_seed(seed)
    written = sample_names(reader, count, "", _TEMPERATURE, draw, _LONGEST_EXAMPLE)
    data = set(known)
    rows = [(display(name), name in data) for name in dict.fromkeys(written) if name and name.strip()]
    ctx.log_table("generated_names", ("name", "is_known"), rows, step=step)


@torch.inference_mode()
def mean_nll(
    model: CharacterModel, rows: Rows, rank: int, world_size: int, seen: Callable[[], None] = lambda: None
) -> float:
    """Return the mean negative log likelihood, in nats, of all characters and stops of `rows`.

    All ranks must call it, with the same rows. Each evaluates its own part; all get the mean over all rows.
    seen: is called after each batch, to report activity to the watchdog.
    """
    was_training = model.training
    model.eval()
    own = rows.lengths.argsort(stable=True)[rank::world_size]  # sorted by length: little padding
    total = torch.zeros(1, dtype=torch.float64)
    for index in own.split(_VALIDATION_ROWS) if len(own) else ():  # a rank may have no names
        inputs, targets = rows.batch(index)
        total += summed_nll(model(inputs), targets).double().cpu()
        seen()
    total = total.to(rows.symbols.device)
    dist.all_reduce(total)
    model.train(was_training)
    return float(total) / int(rows.n_targets.sum())


def learning_rate_factor(schedule: str, done: float, total: float) -> float:
    """Return the learning rate relative to the highest (0 to 1) after `done` of `total` steps or epochs."""
    done = min(1.0, done / total)
    if schedule == "cosine":
        return _falling(done)
    if schedule == "one_cycle":
        return (
            _START + (1 - _START) * _falling(1 - done / _RISE)
            if done < _RISE
            else _falling((done - _RISE) / (1 - _RISE))
        )
    return 1.0


def _falling(done: float) -> float:
    """Return half a cosine: 1 at 0, 0 at 1."""
    return (1 + math.cos(math.pi * done)) / 2
