"""New pet names from a trained run: many at once, none that the training data holds."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch

from ddptrain.errors import UsageError
from ddptrain.workloads.petnames.alphabet import BLANK, STOP, display, foreign_characters, normalise
from ddptrain.workloads.petnames.sampling import sample_names
from ddptrain.workloads.petnames.saved import known_names, load_model

MAX_BATCH = 8192
_ATTEMPTS_A_NAME = 20  # a model that repeats itself must not run for ever
_ATTEMPTS_MORE = 1000


@dataclass(frozen=True, slots=True)
class Generated:
    """The new names, as people write them, and what it took to make them.

    attempts: names that were sampled; the dropped ones among them were known, made before, or not ended in time.
    limit_reached: whether there are fewer than asked for because `attempts` is at its limit.
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
    """`count` distinct names from the best checkpoint of a run; the same ones for the same arguments with a seed.

    Names of the run's list (case does not matter) are dropped and replaced, unless `keep_known`.

    Raises:
        UsageError: an argument is impossible, or the run has no usable checkpoint of the pet-name workload.
    """
    start = _checked_start(count, prefix, temperature)
    model, checkpoint = load_model(run_dir)
    sieve = _Sieve(set() if keep_known else known_names(run_dir), count)
    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    draw = torch.Generator().manual_seed(seed)
    limit = _ATTEMPTS_A_NAME * count + _ATTEMPTS_MORE
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


class _Sieve:
    """Keeps the names that are neither known nor made before, in order, and counts the others."""

    def __init__(self, known: set[str], count: int) -> None:
        self.kept: dict[str, None] = {}
        self.n_known = 0
        self.n_repeated = 0
        self.n_unfinished = 0
        self._known = known
        self._count = count

    def add(self, name: str | None) -> None:
        """Takes a sampled name; None stands for one that did not end."""
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
        """About as many as are likely to bring what is missing, going by the attempts so far."""
        missing = self._count - len(self.kept)
        kept_share = (len(self.kept) + 1) / (attempts + 1) if attempts else 0.8
        return max(64, int(1.1 * missing / kept_share))


def _checked_start(count: int, prefix: str, temperature: float) -> str:
    """The prefix as the model reads it: lower case, no spaces before it, single ones in it."""
    if count < 1:
        raise UsageError(f"--count must be at least 1, not {count}")
    if not 0 < temperature < float("inf"):
        raise UsageError(f"--temperature must be above 0, not {temperature}; 1 samples as trained, less plays safe")
    start = normalise(prefix) + (" " if prefix[-1:].isspace() and prefix.strip() else "")
    foreign = foreign_characters(start)
    if foreign:
        raise UsageError(
            f"--prefix {prefix!r} has {foreign!r}, which no name holds ({BLANK} and {STOP} included): "
            "use letters a to z, '-', '.' and spaces"
        )
    return start
