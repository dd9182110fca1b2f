"""From the command to the first optimizer step: an embedded cluster, a cluster that is up, and torchrun."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from tests.bench.measure import Experiment, Figures, Goal, Row, Source, Variants
from tests.bench.stage import BenchError, Stage

_RANKS = (2, 8)
_GOALS = {(2, "embedded"): 0.8, (8, "embedded"): 0.4, (2, "warm"): 0.25, (8, "warm"): 0.12}
_WHERE = {"embedded": "an embedded cluster, which the command starts", "warm": "a cluster that is up, with warm ranks"}


@contextmanager
def warm_cluster(stage: Stage, slots: int, *, with_worker: bool = True) -> Iterator[str]:
    """A Dask scheduler and one of our workers, if wanted, as processes of their own; gives the scheduler's address."""
    folder = stage.new_folder("cluster")
    file = folder / "scheduler.json"
    scheduler = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0"]
    scheduler += ["--no-dashboard", "--scheduler-file", str(file)]
    with ExitStack() as stack:
        stack.enter_context(stage.started(scheduler))
        deadline = time.monotonic() + 60
        while not (file.exists() and file.read_text().strip()):
            if time.monotonic() > deadline:
                raise BenchError("the Dask scheduler did not start within 60 s")
            time.sleep(0.05)
        address = str(json.loads(file.read_text())["address"])
        worker = [sys.executable, "-m", "ddptrain.worker", "--scheduler", address, "--slots", str(slots)]
        if with_worker:
            stack.enter_context(stage.started([*worker, "--scratch", str(folder / "scratch")]))
        yield address


def _first_step(stage: Stage, command: Sequence[str], marks: Path, ranks: int) -> Figures:
    """Run the command; seconds from just before it was started to the last rank's mark."""
    files = [marks / f"step-{rank}" for rank in range(ranks)]

    def complete() -> bool:
        return all(file.exists() for file in files)

    done = stage.run(command, complete=complete)
    if not complete():
        raise BenchError(f"not all of {ranks} ranks took a step: {done.stdout[-500:]} {done.stderr[-500:]}")
    last_ns = max(int(file.read_text()) for file in files)
    return {"first_step_s": (last_ns - done.began_ns) / 1e9, "whole_s": done.wall_s}


@contextmanager
def _open(stage: Stage) -> Iterator[Variants]:
    def torchrun(ranks: int) -> Figures:
        marks = stage.new_folder("torchrun")
        return _first_step(stage, stage.torchrun("first_step", ranks, folder=str(marks)), marks, ranks)

    def ddptrain(ranks: int, *options: str) -> Figures:
        marks = stage.new_folder("ddptrain")
        return _first_step(stage, stage.ddptrain("first_step", ranks, *options, folder=str(marks)), marks, ranks)

    with warm_cluster(stage, max(_RANKS)) as address:
        torchrun(2)  # everything is in the page cache, and byte code is written
        ddptrain(2)
        ddptrain(max(_RANKS), "--cluster", address)  # returns when the rank server is warm
        variants: dict[str, Callable[[], Figures]] = {}
        for ranks in _RANKS:
            variants[f"torchrun-{ranks}"] = partial(torchrun, ranks)
            variants[f"embedded-{ranks}"] = partial(ddptrain, ranks)
            variants[f"warm-{ranks}"] = partial(ddptrain, ranks, "--cluster", address)
        yield variants


def _row(ranks: int, where: str) -> Row:
    return Row(
        name=f"first-step-{where}-{ranks}",
        unit="s",
        ours=Source(f"{where}-{ranks}", "first_step_s"),
        peer=Source(f"torchrun-{ranks}", "first_step_s"),
        peer_name="torchrun",
        goal=Goal("ratio", "<=", _GOALS[ranks, where]),
        what=f"command to the last rank's first optimizer step, {ranks} ranks, on {_WHERE[where]}",
    )


EXPERIMENT = Experiment(rows=tuple(_row(ranks, where) for where in _WHERE for ranks in _RANKS), open=_open)
