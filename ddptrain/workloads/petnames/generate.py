"""Generates new pet names from a trained run: many at a time, none of which is in the training data."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import torch

from ddptrain.errors import UsageError
from ddptrain.file_ops import read_regular
from ddptrain.rank.checkpoint.weights import check_workload, checkpoint_folder, load_checkpoint
from ddptrain.workloads.petnames.alphabet import BLANK, STOP, display, foreign_characters, normalise
from ddptrain.workloads.petnames.model import CharacterModel
from ddptrain.workloads.petnames.sampling import sample_names

MAX_BATCH = 8192
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
    sieve = _NameFilter(set() if keep_known else known_names(run_dir), count)
    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    draw = torch.Generator().manual_seed(seed)
    limit = _ATTEMPTS_PER_NAME * count + _EXTRA_ATTEMPTS
    attempts = 0
    while len(sieve.kept) < count and attempts < limit:
        n_names = min(sieve.names_to_try(attempts), MAX_BATCH, limit - attempts)
        for name in sample_names(model, n_names, start, temperature, draw):
            attempts += 1
            sieve.add(name)
            if len(sieve.kept) == count:
                break
    return Generated(
        names=tuple(display(name) for name in sieve.kept),
        checkpoint=checkpoint,
        seed=seed,
        attempts=attempts,
        dropped_known=sieve.n_known,
        dropped_repeated=sieve.n_repeated,
        dropped_unfinished=sieve.n_unfinished,
        limit_reached=len(sieve.kept) < count,
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
    path = run_dir / "artifacts" / "names.json"
    try:
        saved = json.loads(read_regular(path))
        return {normalise(name) for names in (saved["train"], saved["held_out"]) for name in names}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UsageError(
            f"can't read the names that the run was trained on: {path}: {type(error).__name__}: {error}; "
            "--keep-known works without them"
        ) from error


class _NameFilter:
    """Keeps names that are neither known nor repeated, in order; counts the dropped ones."""

    def __init__(self, known: set[str], count: int) -> None:
        self.kept: dict[str, None] = {}
        self.n_known = 0
        self.n_repeated = 0
        self.n_unfinished = 0
        self._known = known
        self._count = count

    def add(self, name: str | None) -> None:
        """Add a sampled name; None is a name that did not end."""
        name = None if name is None else normalise(name)
        if not name:
            self.n_unfinished += 1
        elif name in self._known:
            self.n_known += 1
        elif name in self.kept:
            self.n_repeated += 1
        else:
            self.kept[name] = None

    def names_to_try(self, attempts: int) -> int:
        """Return an estimate of how many samples are needed to get the missing names, from the success rate so far."""
        missing = self._count - len(self.kept)
        kept_share = (len(self.kept) + 1) / (attempts + 1) if attempts else 0.8
        return max(64, int(1.1 * missing / kept_share))


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
