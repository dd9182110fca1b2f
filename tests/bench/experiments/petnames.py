"""Training on pet names: the tutorial's loop under torchrun, the same settings here, and whole names."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ddptrain.workloads.petnames.names import load_names
from tests.bench.measure import Experiment, Figures, Goal, Row, Source, Variants
from tests.bench.stage import DDPTRAIN, REPOSITORY, BenchError, Stage

_RANKS = 2
_CONFIG = REPOSITORY / "configs" / "petnames-tutorial.yaml"
_REAL_NAMES = REPOSITORY.parent / "shared" / "data" / "seattle_pet_names.json"
_STEPS = {16384: 1, 1024: 8}  # of an epoch; the first of two epochs is the warm-up


def source_of_names() -> str:
    """Where names come from, in words."""
    return f"{_REAL_NAMES.name}" if _REAL_NAMES.exists() else "the builtin list, repeated"


def take_names(windows: int) -> list[str]:
    """Names with as many windows, or a few less, as asked for; a name has one for each character and one more."""
    clean = load_names(str(_REAL_NAMES) if _REAL_NAMES.exists() else "builtin")
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

    def windows(self, batch_size: int, *, skip_blanks: bool) -> Figures:
        """The shipped configuration with the tutorial's figures; names a second are those with all windows done."""
        names = self._names(batch_size)
        rate = self._train(names, batch_size=batch_size, epochs=2, skip_blanks=skip_blanks)
        listed = json.loads(names.read_text())
        return {"windows_per_s": rate, "names_per_s": rate * len(listed) / sum(len(name) + 1 for name in listed)}

    def full(self, batch_size: int) -> Figures:
        """The same model on whole names; a step takes as many symbols as `batch_size` windows."""
        names = self._names(batch_size)
        per_step = -(-len(json.loads(names.read_text())) // (_RANKS * self._steps(batch_size)))
        return {"names_per_s": self._train(names, batch_size=per_step, epochs=6, context="full")}

    def _steps(self, batch_size: int) -> int:
        return min(self._stage.sizes.petnames_steps, _STEPS[batch_size])

    def _names(self, batch_size: int) -> Path:
        windows = batch_size * _RANKS * self._steps(batch_size)
        if windows not in self._lists:
            self._lists[windows] = self._stage.new_folder("names") / "names.json"
            self._lists[windows].write_text(json.dumps(take_names(windows)))
        return self._lists[windows]

    def _train(self, names: Path, **params: object) -> float:
        runs = self._stage.new_folder("ddptrain")
        settings = {"names": str(names), "unique": False, "val_fraction": 0, **params}
        options = [f"params.{name}={json.dumps(value)}" for name, value in settings.items()]
        command: list[str | Path] = [
            DDPTRAIN,
            "train",
            _CONFIG,
            "--output",
            "plain",
            "--runs-dir",
            runs,
            "--run-id",
            "run",
        ]
        self._stage.run([*command, *itertools.chain.from_iterable(("--set", option) for option in options)])
        lines = (runs / "run" / "metrics.jsonl").read_text().splitlines()
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
    variants: dict[str, Callable[[], Figures]] = {}
    for batch_size in _STEPS:
        variants[f"tutorial-{batch_size}"] = partial(trainings.tutorial, batch_size)
        variants[f"windows-{batch_size}"] = partial(trainings.windows, batch_size, skip_blanks=True)
        variants[f"full-{batch_size}"] = partial(trainings.full, batch_size)
    variants["all-blanks-1024"] = partial(trainings.windows, 1024, skip_blanks=False)
    yield variants


def _against_tutorial(batch_size: int) -> Row:
    return Row(
        name=f"petnames-{batch_size}",
        unit="windows/s",
        ours=Source(f"windows-{batch_size}", "windows_per_s"),
        peer=Source(f"tutorial-{batch_size}", "windows_per_s"),
        peer_name="tutorial's loop, torchrun",
        goal=Goal("ratio", ">=", 2),
        what=f"configs/petnames-tutorial.yaml, batches of {batch_size}, 2 ranks, second epoch",
    )


def _full(batch_size: int) -> Row:
    return Row(
        name=f"full-{batch_size}",
        unit="names/s",
        ours=Source(f"full-{batch_size}", "names_per_s"),
        peer=Source(f"windows-{batch_size}", "names_per_s"),
        peer_name="ddptrain on windows",
        goal=Goal("ratio", ">=", 5),
        what=f"context: full, the same model; a step of either has the symbols of {batch_size} windows a rank",
    )


_ALL_BLANKS = Row(
    name="petnames-1024-blanks",
    unit="windows/s",
    ours=Source("all-blanks-1024", "windows_per_s"),
    peer=Source("tutorial-1024", "windows_per_s"),
    peer_name="tutorial's loop, torchrun",
    goal=None,
    what="as petnames-1024, with skip_blanks: false, every window read from its first blank on as the tutorial does",
)

EXPERIMENT = Experiment(
    rows=(*map(_against_tutorial, _STEPS), _ALL_BLANKS, *map(_full, _STEPS)),
    open=_open,
)
