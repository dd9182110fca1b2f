"""Training on pet names: the tutorial's loop under torchrun, the same settings here, and whole names."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ddptrain.workloads.petnames.names import load_names
from ddptrain.workloads.petnames.params import PetnamesParams
from tests.bench.measure import Experiment, Figures, Goal, Row, Source, Variants
from tests.bench.stage import REPOSITORY, BenchError, Stage

_RANKS = 2
_CONFIG = REPOSITORY / "configs" / "petnames-tutorial.yaml"
_REAL_NAMES = REPOSITORY.parent / "shared" / "data" / "seattle_pet_names.json"
_STEPS = {16384: 1, 1024: 8}  # of an epoch; the first of two epochs is the warm-up
_TIMES_FULL = 4  # epochs of whole names have more steps, to last as long


def source_of_names() -> str:
    """The description of the source of names."""
    return f"{_REAL_NAMES.name}" if _REAL_NAMES.exists() else "the builtin list, repeated"


def take_names(windows: int) -> list[str]:
    """Names with as many windows, or a few less, as asked for; a name has one for each character and one more."""
    clean = load_names(PetnamesParams(names=str(_REAL_NAMES) if _REAL_NAMES.exists() else "builtin"))
    names: list[str] = []
    for name in itertools.cycle(clean.names):
        windows -= len(name) + 1
        if windows < 0:
            return names
        names.append(name)
    raise BenchError("there are no names")


class _Trainings:
    """Runs one training each and gives its rate after the first epoch, in rows (windows or names) a second."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._lists: dict[int, Path] = {}

    def tutorial(self, batch_size: int) -> Figures:
        """The tutorial's loop, under torchrun."""
        out = self._stage.new_folder("torchrun") / "rank"
        records = [out.with_suffix(f".{rank}") for rank in range(_RANKS)]
        params = {"names": str(self._names(batch_size)), "batch_size": batch_size, "epochs": 2, "out": str(out)}
        command = self._stage.torchrun("tutorial", _RANKS, **params)
        self._stage.run(command, complete=lambda: all(record.exists() for record in records))
        ends = [json.loads(record.read_text()) for record in records]
        took_s = max(end["ends_s"][-1] - end["ends_s"][0] for end in ends)
        return {"windows_per_s": sum(end["samples_per_epoch"] for end in ends) / took_s}

    def windows(self, batch_size: int) -> Figures:
        """The shipped configuration with the tutorial's figures; names a second are those with all windows done."""
        names = self._names(batch_size)
        rate = self._train(names, batch_size=batch_size, epochs=2)
        listed = json.loads(names.read_text())
        return {"windows_per_s": rate, "names_per_s": rate * len(listed) / sum(len(name) + 1 for name in listed)}

    def full(self, batch_size: int) -> Figures:
        """The same model on whole names; a step has as many symbols as `batch_size` windows."""
        names = self._names(batch_size, times=_TIMES_FULL)
        per_step = -(-len(json.loads(names.read_text())) // (_RANKS * _TIMES_FULL * self._steps(batch_size)))
        return {"names_per_s": self._train(names, batch_size=per_step, epochs=2, context="full")}

    def _steps(self, batch_size: int) -> int:
        return min(self._stage.sizes.petnames_steps, _STEPS[batch_size])

    def _names(self, batch_size: int, times: int = 1) -> Path:
        """A list for an epoch, or for `times` as many steps as there are in one."""
        windows = batch_size * _RANKS * self._steps(batch_size) * times
        if windows not in self._lists:
            self._lists[windows] = self._stage.new_folder("names") / "names.json"
            self._lists[windows].write_text(json.dumps(take_names(windows)))
        return self._lists[windows]

    def _train(self, names: Path, **params: object) -> float:
        settings = {"names": str(names), "unique": False, "val_fraction": 0, **params}
        run = self._stage.trained(_CONFIG, "ddptrain", settings)
        lines = (run / "metrics.jsonl").read_text().splitlines()
        return _rate_after_first([json.loads(line) for line in lines])


def _rate_after_first(metrics: Sequence[Mapping[str, Any]]) -> float:
    """Rows of all ranks a second, from the end of the first epoch to that of the last, with all that lies between."""
    rows, took_s = 0.0, 0.0
    for rank in range(_RANKS):
        ends = [line for line in metrics if line["rank"] == rank and "samples" in line]
        rows += ends[-1]["samples"] - ends[0]["samples"]
        took_s = max(took_s, ends[-1]["time_s"] - ends[0]["time_s"])
    return rows / took_s


@contextmanager
def _open(stage: Stage) -> Iterator[Variants]:
    trainings = _Trainings(stage)
    yield {
        "tutorial-16384": partial(trainings.tutorial, 16384),
        "windows-16384": partial(trainings.windows, 16384),
        "full-16384": partial(trainings.full, 16384),
        "tutorial-1024": partial(trainings.tutorial, 1024),
        "windows-1024": partial(trainings.windows, 1024),
    }


def _against_tutorial(batch_size: int) -> Row:
    return Row(
        name=f"petnames-{batch_size}",
        unit="windows/s",
        ours=Source(f"windows-{batch_size}", "windows_per_s"),
        peer=Source(f"tutorial-{batch_size}", "windows_per_s"),
        peer_name="the tutorial's loop (per-sample Dataset, DataLoader) under torchrun",
        goal=Goal("ratio", ">=", 1),
        what=f"configs/petnames-tutorial.yaml, batches of {batch_size}, 2 ranks, second epoch with its checkpoint",
    )


_FULL = Row(
    name="full",
    unit="names/s",
    ours=Source("full-16384", "names_per_s"),
    peer=Source("windows-16384", "names_per_s"),
    peer_name="ddptrain, context: window",
    goal=Goal("ratio", ">=", 5),
    what="names trained with context: full against the same model on windows, as many symbols in a step",
)

EXPERIMENT = Experiment(rows=(_against_tutorial(16384), _against_tutorial(1024), _FULL), open=_open)
