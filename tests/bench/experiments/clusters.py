"""Clusters: start of a cluster, start of a worker group, and whether slots are ever lost or assigned twice."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise

from tests.bench.measure import Experiment, Figures, Goal, Row, Source, Variants
from tests.bench.stage import BenchError, Stage

_SLOTS = 8
_GANGS = (2, 8, 64)
_CLIENTS = 10
_RESERVATIONS = 100  # by each client


def _up(stage: Stage) -> Figures:
    """Seconds of `cluster up`, which returns when all workers are warm."""
    command = [stage.command, "cluster", "up", "--name", "bench", "--ranks", str(_SLOTS), "--gpus", "0"]
    try:
        return {"up_s": stage.run(command).wall_s}
    finally:
        stage.run([stage.command, "cluster", "down", "bench"])


def _dask(stage: Stage) -> Figures:
    """Seconds of Dask's own commands and an import of torch, one after another."""
    folder = stage.new_folder("dask")
    file = folder / "scheduler.json"
    began = time.monotonic()
    with ExitStack() as stack:
        scheduler = [stage.python, "-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0"]
        stack.enter_context(stage.started([*scheduler, "--no-dashboard", "--scheduler-file", str(file)]))
        _wait_for(lambda: file.exists() and file.read_text().strip() != "", "scheduler")
        worker = [stage.python, "-m", "distributed.cli.dask_worker", "--scheduler-file", str(file)]
        worker += ["--nthreads", str(_SLOTS), "--no-dashboard", "--local-directory", str(folder)]
        log = folder / "worker.log"
        with log.open("wb") as said:
            stack.enter_context(stage.started(worker, stdout=said.fileno(), stderr=said.fileno()))
        _wait_for(lambda: "Starting established connection" in log.read_text(), "worker")
        stage.run([stage.python, "-c", "import torch"])
        return {"up_s": time.monotonic() - began}


def _wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            raise BenchError(f"the Dask {what} did not start within 60 s")
        time.sleep(0.01)


def _gang(stage: Stage, ranks: int) -> Figures:
    """Seconds from the command to the moment when the last rank has joined."""
    marks = stage.new_folder("gang")
    done = stage.run(stage.ddptrain("join", ranks, "--cluster", "bench", folder=str(marks)))
    files = list(marks.iterdir())
    if len(files) != ranks:
        raise BenchError(f"{len(files)} of {ranks} ranks joined: {done.stderr[-500:]}")
    return {"joined_s": (max(int(file.read_text()) for file in files) - done.began_ns) / 1e9}


def _growth(stage: Stage) -> Figures:
    few, many = (_gang(stage, ranks)["joined_s"] for ranks in (_GANGS[0], _GANGS[-1]))
    return {"per_rank_ms": 1000 * (many - few) / (_GANGS[-1] - _GANGS[0])}


def _reservations(stage: Stage, address: str) -> Figures:
    """The slots that concurrent clients got: missing answers are lost slots, overlaps in time are errors."""
    program = str(stage.programs / "reserve.py")
    began = time.monotonic()
    with ExitStack() as stack:
        outputs = [stage.new_folder("reserve") / "held" for _ in range(_CLIENTS)]
        clients = []
        for number, output in enumerate(outputs):
            command = [stage.python, program, address, f"client-{number}", str(_RESERVATIONS)]
            with output.open("wb") as said:
                clients.append(stack.enter_context(stage.started(command, stdout=said.fileno())))
        for client in clients:
            client.wait(120)
    taken = [json.loads(line) for output in outputs for line in output.read_text().splitlines()]
    took_s = time.monotonic() - began
    return {"wrong": _CLIENTS * _RESERVATIONS - len(taken) + _doubles(taken), "took_s": took_s}


def _doubles(taken: list[tuple[list[tuple[str, int]], float, float]]) -> int:
    """How often a slot was assigned while another client held it."""
    by_slot: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for held, got_s, left_s in taken:
        for worker, index in held:
            by_slot.setdefault((worker, index), []).append((got_s, left_s))
    return sum(later[0] < former[1] for spans in by_slot.values() for former, later in pairwise(sorted(spans)))


@contextmanager
def _open(stage: Stage) -> Iterator[Variants]:
    _up(stage)  # everything is in the page cache, and byte code is written
    yield {"up": partial(_up, stage), "dask": partial(_dask, stage)}


@contextmanager
def _open_gangs(stage: Stage) -> Iterator[Variants]:
    stage.run([stage.command, "cluster", "up", "--name", "bench", "--ranks", str(_GANGS[-1]), "--gpus", "0"])
    try:
        status = json.loads(stage.run([stage.command, "cluster", "status", "bench", "--json"]).stdout)
        variants: dict[str, Callable[[], Figures]] = {f"gang-{ranks}": partial(_gang, stage, ranks) for ranks in _GANGS}
        variants["growth"] = partial(_growth, stage)
        variants["reservations"] = partial(_reservations, stage, str(status["address"]))
        yield variants
    finally:
        stage.run([stage.command, "cluster", "down", "bench", "--now"])


def _gang_row(ranks: int) -> Row:
    return Row(
        name=f"gang-{ranks}",
        unit="s",
        ours=Source(f"gang-{ranks}", "joined_s"),
        peer=None,
        peer_name="",
        goal=None,
        what=f"command to the moment when {ranks} ranks have joined, on a cluster that is up",
    )


UP = Experiment(
    rows=(
        Row(
            name="cluster-up-8",
            unit="s",
            ours=Source("up", "up_s"),
            peer=Source("dask", "up_s"),
            peer_name="dask",
            goal=Goal("ratio", "<=", 1.0),
            what="`cluster up` with 8 CPU slots until warm; `dask scheduler`, `dask worker`, `import torch` in turn",
        ),
    ),
    open=_open,
)
GANGS = Experiment(
    rows=(
        *(_gang_row(ranks) for ranks in _GANGS),
        Row(
            name="gang-growth",
            unit="ms",
            ours=Source("growth", "per_rank_ms"),
            peer=None,
            peer_name="",
            goal=Goal("ours", "<=", 30.0),
            what="what each rank more adds to that, from 2 to 64 ranks",
        ),
        Row(
            name="reservations",
            unit="wrong",
            ours=Source("reservations", "wrong"),
            peer=None,
            peer_name="",
            goal=Goal("ours", "<=", 0.0),
            what="slots lost or given twice in 1,000 reservations by 10 clients at once",
        ),
    ),
    open=_open_gangs,
)
