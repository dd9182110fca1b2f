"""Trains a character LSTM on pet names: the training loop of each rank, and the evaluation of its checkpoints."""

from __future__ import annotations

import copy
import itertools
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pack_padded_sequence
from torch.optim import AdamW
from torch.utils.data import Dataset

from ddptrain.config.wording import counted
from ddptrain.errors import UsageError
from ddptrain.protocol.rank_spec import weights_in
from ddptrain.workloads.checkpoint import load_checkpoint
from ddptrain.workloads.petnames.generate import sample_names
from ddptrain.workloads.petnames.model import CharacterModel, ModelConfig
from ddptrain.workloads.petnames.names import (
    BLANK,
    NAMES_FILE,
    STOP,
    Split,
    display,
    encode,
    load_names,
    read_names,
    split_names,
)
from ddptrain.workloads.petnames.params import PetnamesParams
from ddptrain.workloads.schedules import make_schedule

if TYPE_CHECKING:
    from ddptrain.rank.context import RankContext
    from ddptrain.rank.evaluation import SavedCheckpoint

_VALIDATION_ROWS = 1024  # of one forward pass


# --8<-- [start:train]
def train(ctx: RankContext, **params: Any) -> None:
    """Train the character model on all ranks; `params` are those of PetnamesParams."""
    settings = PetnamesParams.model_validate(params)
    split = load_split(ctx, settings)
    names = NameDataset(split.train, settings.context, settings.window)
    held_out = NameDataset(split.held_out, settings.context, settings.window) if split.held_out else None

    torch.manual_seed(settings.seed + ctx.rank)  # all ranks get rank 0's weights; each rank has a dropout of its own
    model = CharacterModel(ModelConfig.of(settings))
    if settings.weights is not None:
        load_initial_weights(ctx, model, settings.weights)
    ddp = ctx.prepare(model)
    optimizer = AdamW(model.parameters(), settings.learning_rate, weight_decay=settings.weight_decay, fused=True)
    batches = ctx.loader(names, batch_size=settings.batch_size, seed=settings.seed, collate_fn=lambda batch: batch)
    # DDP fixes the order of its sums after the first backward pass. With this one, which changes nothing, a run that
    # is resumed adds in the same order as a run that is not interrupted.
    symbols, lengths, targets = names.batch(torch.tensor([0]))
    (0.0 * cross_entropy(ddp(symbols.to(ctx.device), lengths), targets.to(ctx.device))).backward()
    optimizer.zero_grad()

    resumed = ctx.resume(model=model, optimizer=optimizer)
    step = resumed.step if resumed else 0
    share = lambda: batches.position / settings.epochs  # noqa: E731
    schedule = make_schedule(settings.lr_schedule, optimizer, settings.learning_rate, share)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "model_config": model.config.plain()}
    unit, rows = ("names" if settings.context == "full" else "windows"), math.ceil(len(names) / ctx.world_size)
    ctx.say(
        f"training {sum(each.numel() for each in model.parameters()):,} parameters on {len(names):,} {unit}, "
        f"{counted(len(batches), 'step')} an epoch over {counted(ctx.world_size, 'rank')}"
        + (f", continuing after step {step} in epoch {batches.epoch}" if resumed else "")
    )

    def report() -> None:
        ctx.progress(round(batches.position * rows), settings.epochs * rows, unit=unit)

    for epoch in ctx.epochs(settings.epochs):
        began, first, losses = time.perf_counter(), batches.position, []
        for symbols, lengths, targets in batches:
            scores = ddp(symbols.to(ctx.device, non_blocking=True), lengths)
            loss = cross_entropy(scores.float(), targets.to(ctx.device, non_blocking=True))
            ctx.backward(loss)
            if ctx.step(optimizer, clip=settings.grad_clip or None):
                step += 1
                schedule.step()
            losses.append(loss.detach())
            report()
            if batches.remaining:  # the checkpoint of a whole epoch has the validation loss
                ctx.checkpoint(step=step, epoch=batches.position, **state)
        rate = (epoch - first) * len(names) / (time.perf_counter() - began)
        metrics = {"train/loss": ctx.mean(torch.stack(losses))}
        if held_out is not None:
            with ctx.timed("evaluation"):
                metrics["val/loss"] = mean_loss(ctx, model, held_out, report)
        ctx.log({**metrics, "samples": epoch * len(names), "samples_per_s": rate}, step=step, epoch=epoch)
        shown = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        ctx.say(f"epoch {epoch}/{settings.epochs}: {shown}, {rate:,.0f} {unit}/s")
        ctx.checkpoint(step=step, epoch=epoch, metrics=metrics, last=epoch == settings.epochs, **state)
    if ctx.rank == 0:
        log_examples(ctx, model, split, settings.seed, step)


# --8<-- [end:train]


class NameDataset(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """The rows of a list of names.

    With context "full" a row is a name, and the targets are its characters and the stop. With "window" a row is the
    `window` symbols before a character or stop of a name, which is its only target.
    """

    def __init__(self, names: Sequence[str], context: str, window: int) -> None:
        self._is_full = context == "full"
        if self._is_full:
            texts = [BLANK + name + STOP for name in names]
        else:
            padded = [BLANK * window + name + STOP for name in names]
            texts = [text[end - window : end + 1] for text in padded for end in range(window, len(text))]
        width = max(map(len, texts))
        self.symbols = torch.tensor([encode(text.ljust(width, BLANK)) for text in texts], dtype=torch.uint8)
        self.lengths = torch.tensor([len(text) - 1 for text in texts])  # of the inputs of each row

    def __len__(self) -> int:
        return len(self.symbols)

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return symbols [n, t] and lengths [n] of n rows, the longest first, and all their targets [m].

        The targets are in the order of the model's scores.
        """
        index = index[self.lengths[index].argsort(descending=True, stable=True)]
        rows, lengths = self.symbols[index], self.lengths[index]
        longest = int(lengths[0])
        if not self._is_full:
            return rows[:, :-1], lengths, rows[:, -1].long()
        targets = pack_padded_sequence(rows[:, 1 : longest + 1].long(), lengths, batch_first=True).data
        return rows[:, :longest], lengths, targets

    def __getitems__(self, index: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return a whole batch at once, as a DataLoader asks for it."""
        return self.batch(torch.tensor(index))


def load_split(ctx: RankContext, settings: PetnamesParams) -> Split:
    """Read and split the names, equally on all ranks; rank 0 prints a summary and saves the names for `generate`."""
    clean = load_names(settings)
    split = split_names(clean.names, settings.val_fraction, settings.seed)
    ctx.say(clean.report(settings.names))
    if ctx.rank == 0:
        known = {"train": sorted(set(split.train)), "held_out": split.held_out}
        ctx.save_file(NAMES_FILE, json.dumps(known, indent=0))
    return split


def load_initial_weights(ctx: RankContext, model: CharacterModel, weights: str) -> None:
    """Load the weights of a model of the registry. Raises UsageError if they are of another architecture."""
    try:
        model.load_state_dict(load_file(weights_in(ctx.inputs)))
    except RuntimeError as error:
        why = str(error).strip().splitlines()[-1].strip()
        raise UsageError(
            f"params.weights: {weights} is of another architecture ({why}): set input, embedding_size, hidden_size and "
            "layers as they were in its training, or weights: null"
        ) from None
    ctx.say(f"weights: {weights}")


@torch.inference_mode()
def mean_loss(ctx: RankContext, model: CharacterModel, names: NameDataset, report: Callable[[], None]) -> float:
    """Return the mean negative log likelihood, in nats, of all characters and stops of `names`.

    All ranks must call it, with the same names. Each evaluates its own part; all get the mean over all.
    report: is called after each batch, to report activity.
    """
    model.eval()
    own = names.lengths.argsort(stable=True)[ctx.rank :: ctx.world_size]  # similar lengths: little padding
    total, count = 0.0, 0
    for index in own.split(_VALIDATION_ROWS) if len(own) else ():  # a rank may have no names
        symbols, lengths, targets = names.batch(index)
        scores = model(symbols.to(ctx.device), lengths)
        total += float(cross_entropy(scores.float(), targets.to(ctx.device), reduction="sum"))
        count += len(targets)
        report()
    model.train()
    return ctx.mean(total / max(1, count), count)


def log_examples(ctx: RankContext, model: CharacterModel, split: Split, seed: int, step: int) -> None:
    """Log the table generated_names: distinct names that the model writes, and whether the list has them."""
    reader = copy.deepcopy(model).cpu().eval()
    # A model that has learned little ends few names, and reading them takes long: at most 20 characters.
    draw = torch.Generator().manual_seed(seed)
    written = sample_names(reader, 16, "", temperature=0.8, draw=draw, longest=20)
    known = {*split.train, *split.held_out}
    rows = [(display(name), name in known) for name in dict.fromkeys(written) if name and name.strip()]
    ctx.log_table("generated_names", ("name", "is_known"), rows, step=step)


def evaluate(ctx: RankContext, checkpoint: SavedCheckpoint) -> dict[str, float]:
    """Return val/loss: nats for each character and stop of the names, for any architecture of the workload."""
    if ctx.inputs is None:
        raise UsageError("there are no names to evaluate on: start an evaluation with `ddptrain evaluate`")
    model = load_checkpoint(checkpoint.path, "petnames", CharacterModel.restored).to(ctx.device)
    names = NameDataset(read_names(ctx.inputs), model.config.context, model.config.window)
    numbers = itertools.count(1)
    return {"val/loss": mean_loss(ctx, model, names, lambda: ctx.progress(next(numbers), unit="batches"))}
