"""Generates new pet names from a trained run: many at a time, none of which is in the training data."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ddptrain.errors import UsageError
from ddptrain.file_ops import read_regular
from ddptrain.workloads.checkpoint import check_workload, checkpoint_folder, load_checkpoint
from ddptrain.workloads.petnames.model import CharacterModel
from ddptrain.workloads.petnames.names import (
    BLANK,
    BLANK_ID,
    NAMES_FILE,
    STOP,
    STOP_ID,
    decode,
    display,
    encode,
    foreign_characters,
    normalise,
)

MAX_LENGTH = 64  # a longer name counts as not ended
_MAX_BATCH = 8192
_ATTEMPTS_PER_NAME = 20  # bounds the run time of a model that repeats itself
_EXTRA_ATTEMPTS = 1000
_LARGEST_SEED = 2**63 - 1  # of torch.Generator


@dataclass(frozen=True, slots=True)
class Generated:
    """The new names, in title case, and statistics.

    attempts: number of sampled names. Dropped names were known, repeated, or did not end within the maximal length.
    limit_reached: there are fewer names than requested because the limit of attempts was reached.
    """

    names: tuple[str, ...]
    checkpoint: str
    seed: int
    attempts: int
    dropped_known: int
    dropped_repeated: int
    dropped_unfinished: int
    limit_reached: bool


def generate_names(
    run_dir: Path,
    count: int = 50,
    prefix: str = "",
    temperature: float = 0.8,
    seed: int | None = None,
    keep_known: bool = False,
) -> Generated:
    """Sample `count` distinct names from the best checkpoint of a run. With a seed the result is reproducible.

    Names of the run's training list (compared without case) are dropped and replaced, unless `keep_known` is set.

    Raises UsageError if an argument is invalid, or the run has no usable checkpoint of the petnames workload.
    """
    start = _checked_start(count, prefix, temperature, seed)
    model, checkpoint = load_model(run_dir)
    known = set() if keep_known else known_names(run_dir)
    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    draw = torch.Generator().manual_seed(seed)
    limit = _ATTEMPTS_PER_NAME * count + _EXTRA_ATTEMPTS
    kept: dict[str, None] = {}
    dropped: Counter[str] = Counter()
    attempts = 0
    while len(kept) < count and attempts < limit:
        share = (len(kept) + 1) / (attempts + 1) if attempts else 0.8  # of the names that are kept
        tries = max(64, int(1.1 * (count - len(kept)) / share))
        for sampled in sample_names(model, min(tries, _MAX_BATCH, limit - attempts), start, temperature, draw):
            attempts += 1
            name = normalise(sampled or "")
            why = "unfinished" if not name else "known" if name in known else "repeated" if name in kept else ""
            if why:
                dropped[why] += 1
            else:
                kept[name] = None
            if len(kept) == count:
                break
    return Generated(
        names=tuple(display(name) for name in kept),
        checkpoint=checkpoint,
        seed=seed,
        attempts=attempts,
        dropped_known=dropped["known"],
        dropped_repeated=dropped["repeated"],
        dropped_unfinished=dropped["unfinished"],
        limit_reached=len(kept) < count,
    )


def load_model(run_dir: Path) -> tuple[CharacterModel, str]:
    """The model of the best (or else the latest) checkpoint, in evaluation mode on the CPU, and the checkpoint's name.

    Raises UsageError if the run is of another workload, or has no readable checkpoint.
    """
    check_workload(run_dir, "petnames", "generate")
    folder = checkpoint_folder(run_dir)
    return load_checkpoint(folder, "petnames", CharacterModel.restored), folder.name


def known_names(run_dir: Path) -> set[str]:
    """All names of the run's list, both training and held-out names, normalised. Raises UsageError if it has none."""
    path = run_dir / "artifacts" / NAMES_FILE
    try:
        saved = json.loads(read_regular(path))
        return {normalise(name) for names in (saved["train"], saved["held_out"]) for name in names}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UsageError(
            f"can't read the names that the run was trained on: {path}: {type(error).__name__}: {error}; "
            "--keep-known works without them"
        ) from error


@torch.inference_mode()
def sample_names(
    model: CharacterModel,
    count: int,
    start: str,
    temperature: float,
    draw: torch.Generator,
    longest: int = MAX_LENGTH,
) -> list[str | None]:
    """Sample `count` names that begin with `start`, as the model writes them.

    None stands for a name that did not end within `longest` characters.
    """
    windowed = model.config.context == "window"
    window = model.config.window if windowed else 1
    begun = torch.tensor([BLANK_ID] * window + encode(start))
    end = max(len(begun) + 1, window + longest)
    texts = torch.full((count, end), BLANK_ID)
    texts[:, : len(begun)] = begun
    unfinished = torch.arange(count)
    read, state = texts[:, len(begun) - window if windowed else 0 : len(begun)], None
    for position in range(len(begun), end):
        scores, state = model.step(read, state)
        symbols = _draw(scores, temperature, draw, may_stop=position > window)
        texts[unfinished, position] = symbols
        going = symbols != STOP_ID
        unfinished = unfinished[going]
        if len(unfinished) == 0:
            break
        if windowed:  # each window is read as a whole
            read, state = texts[unfinished, position + 1 - window : position + 1], None
        else:
            read, state = symbols[going, None], (state[0][:, going], state[1][:, going])
    rows = [row[window:] for row in texts.tolist()]
    return [decode(row[: row.index(STOP_ID)]) if STOP_ID in row else None for row in rows]


def _draw(scores: Tensor, temperature: float, draw: torch.Generator, *, may_stop: bool) -> Tensor:
    """Draw the next symbol of each name, [n]: never a blank, and no stop in an empty name."""
    scores = scores.double()
    scores[:, BLANK_ID] = -torch.inf
    if not may_stop:
        scores[:, STOP_ID] = -torch.inf
    # Relative to the largest score: a very small temperature then selects the best symbol and does not overflow.
    chances = ((scores - scores.amax(1, keepdim=True)) / temperature).softmax(1)
    return chances.multinomial(1, generator=draw).squeeze(1)


def _checked_start(count: int, prefix: str, temperature: float, seed: int | None) -> str:
    """Return the normalised prefix, with single spaces. Raises UsageError for an invalid argument."""
    if count < 1:
        raise UsageError(f"--count must be at least 1, not {count}")
    if not 0 < temperature < float("inf"):
        raise UsageError(f"--temperature must be above 0, not {temperature}; 1 samples as trained, less is safer")
    if seed is not None and not 0 <= seed <= _LARGEST_SEED:
        raise UsageError(f"--seed must be between 0 and {_LARGEST_SEED}, not {seed}")
    start = normalise(prefix) + (" " if prefix[-1:].isspace() and prefix.strip() else "")
    foreign = foreign_characters(start)
    if foreign:
        raise UsageError(
            f"--prefix {prefix!r} has {foreign!r}, which no name may contain ({BLANK} and {STOP} included): "
            "use letters a to z, '-', '.' and spaces"
        )
    return start
