"""From the command to the first optimizer step: an embedded cluster, a cluster that is up, and torchrun."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from tests.bench.measure import Experiment, Figures, Goal, Row, Source, Variants
from tests.bench.stage import BenchError, Stage

_RANKS = (2, 8)
_MANY = {32: 2.5, 64: 5.0}  # ranks, goal in seconds
_WARM_RANKS = (*_RANKS, *_MANY)
# A file that a cluster makes when its warm driver is ready, and the variable that switches such drivers off.
_SOCKET, _SWITCH = "driver.sock", "DDPTRAIN_WARM_DRIVER"  # "off"
_GOALS = {(2, "embedded"): 0.8, (8, "embedded"): 0.4, (2, "warm"): 0.15, (8, "warm"): 0.12}
_WHERE = {"embedded": "an embedded cluster, which the command starts", "warm": "a cluster that is up, with warm ranks"}


@contextmanager
def named_cluster(stage: Stage, slots: int) -> Iterator[list[str]]:
    """A local cluster as users start it, with `ddptrain cluster up`; gives the options that lead there."""
    name = stage.new_folder("named-cluster").name
    stage.run([stage.command, "cluster", "up", "--name", name, "--ranks", str(slots), "--gpus", "0"])
    try:
        socket = Path(stage.env["XDG_STATE_HOME"], "ddptrain", "clusters", name, _SOCKET)
        deadline = time.monotonic() + 60
        while not socket.exists():
            if time.monotonic() > deadline:
                raise BenchError("the cluster's warm driver did not start within 60 s")
            time.sleep(0.05)
        yield ["--cluster", name]
    finally:
        stage.run([stage.command, "cluster", "down", name, "--now"])


def _first_step(
    stage: Stage, command: Sequence[str], marks: Path, ranks: int, env: Mapping[str, str] | None = None
) -> Figures:
    """Run the command. Returns the seconds from its start to the last rank's first step."""
    files = [marks / f"step-{rank}" for rank in range(ranks)]

    def complete() -> bool:
        return all(file.exists() for file in files)

    done = stage.run(command, env=env, complete=complete)
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
        command = stage.ddptrain("first_step", ranks, *options, folder=str(marks))
        return _first_step(stage, command, marks, ranks, {} if options else {_SWITCH: "off"})

    with ExitStack() as stack:
        torchrun(2)  # everything is in the page cache, and byte code is written
        ddptrain(2)
        cluster = stack.enter_context(named_cluster(stage, max(_WARM_RANKS)))
        ddptrain(max(_RANKS), *cluster)  # returns when the rank server is warm
        variants: dict[str, Callable[[], Figures]] = {}
        for ranks in _RANKS:
            variants[f"torchrun-{ranks}"] = partial(torchrun, ranks)
            variants[f"embedded-{ranks}"] = partial(ddptrain, ranks)
        variants |= {f"warm-{ranks}": partial(ddptrain, ranks, *cluster) for ranks in _WARM_RANKS}
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


def _many_row(ranks: int) -> Row:
    return Row(
        name=f"first-step-warm-{ranks}",
        unit="s",
        ours=Source(f"warm-{ranks}", "first_step_s"),
        peer=None,
        peer_name="",
        goal=Goal("ours", "<=", _MANY[ranks]),
        what=f"command to the last rank's first optimizer step, {ranks} ranks, on {_WHERE['warm']}",
    )


EXPERIMENT = Experiment(
    rows=(
        *(_row(ranks, where) for where in _WHERE for ranks in _RANKS),
        *(_many_row(ranks) for ranks in _MANY),
    ),
    open=_open,
)
