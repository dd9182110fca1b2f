"""From the command to the first optimizer step: an embedded cluster, running clusters, and torchrun.

A cluster on one machine listens on unix sockets. The rows first-step-open and first-step-tls compare these with a TCP
port that anybody can use, and with TLS: what the protection costs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from ddptrain.cli.warm.client import SOCKET, SWITCH
from ddptrain.clusters.security import CERT_FILE, KEY_FILE, make_tls
from tests.bench.measure import Experiment, Figures, Goal, Row, Source, Variants
from tests.bench.stage import BenchError, Stage

_RANKS = (2, 8)
_MANY = {32: 2.5, 64: 5.0}  # ranks, goal in seconds
_WARM_RANKS = (*_RANKS, *_MANY)
_GOALS = {(2, "embedded"): 0.8, (8, "embedded"): 0.4, (2, "warm"): 0.15, (8, "warm"): 0.12}
_WHERE = {"embedded": "an embedded cluster, which the command starts", "warm": "a cluster that is up, with warm ranks"}

_PEERS = {"open": "tcp", "tls": "tls"}  # other transports than unix sockets


@contextmanager
def warm_cluster(stage: Stage, slots: int, *, with_worker: bool = True, transport: str = "unix") -> Iterator[list[str]]:
    """A scheduler and one worker of ours, if wanted, as processes of their own; gives the options that lead there.

    `transport` is unix, tcp (without any protection) or tls.
    """
    folder = stage.new_folder("cluster")
    file = folder / "scheduler.json"
    if transport == "tls":
        make_tls(folder)
    scheduler = [stage.python, "-m", "ddptrain.clusters.scheduler.scheduler_process", "--folder", str(folder)]
    scheduler += [] if transport == "unix" else ["--host", "127.0.0.1"]
    with ExitStack() as stack:
        stack.enter_context(stage.started(scheduler))
        deadline = time.monotonic() + 60
        while not file.exists():
            if time.monotonic() > deadline:
                raise BenchError("the Dask scheduler did not start within 60 s")
            time.sleep(0.05)
        options = ["--cluster", str(json.loads(file.read_text())["address"])]
        worker = [stage.python, "-m", "ddptrain.worker", "--scheduler-file", str(file), "--slots", str(slots)]
        if transport == "tls":
            worker += ["--tls-dir", str(folder)]
            pem = {"ca": CERT_FILE, "cert": CERT_FILE, "key": KEY_FILE}
            options += [word for name in pem for word in ("--set", f"cluster.tls.{name}_file={folder / pem[name]}")]
        if with_worker:
            stack.enter_context(stage.started([*worker, "--scratch", str(folder / "scratch")]))
        yield options


@contextmanager
def named_cluster(stage: Stage, slots: int) -> Iterator[list[str]]:
    """A local cluster as users start it, with `ddptrain cluster up`; gives the options that lead there."""
    name = stage.new_folder("named-cluster").name
    stage.run([stage.command, "cluster", "up", "--name", name, "--ranks", str(slots), "--gpus", "0"])
    try:
        socket = Path(stage.env["XDG_STATE_HOME"], "ddptrain", "clusters", name, SOCKET)
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
        return _first_step(stage, command, marks, ranks, {} if options else {SWITCH: "off"})

    with ExitStack() as stack:
        torchrun(2)  # everything is in the page cache, and byte code is written
        ddptrain(2)
        clusters = {"warm": stack.enter_context(named_cluster(stage, max(_WARM_RANKS)))}
        for name, transport in _PEERS.items():
            clusters[name] = stack.enter_context(warm_cluster(stage, max(_RANKS), transport=transport))
        for name in clusters:
            ddptrain(max(_RANKS), *clusters[name])  # returns when the rank server is warm
        variants: dict[str, Callable[[], Figures]] = {}
        for ranks in _RANKS:
            variants[f"torchrun-{ranks}"] = partial(torchrun, ranks)
            variants[f"embedded-{ranks}"] = partial(ddptrain, ranks)
            variants |= {f"{name}-{ranks}": partial(ddptrain, ranks, *clusters[name]) for name in clusters}
        variants |= {f"warm-{ranks}": partial(ddptrain, ranks, *clusters["warm"]) for ranks in _MANY}
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


def _protection_row(peer: str) -> Row:
    return Row(
        name=f"first-step-{peer}",
        unit="s",
        ours=Source("warm-2", "first_step_s"),
        peer=Source(f"{peer}-2", "first_step_s"),
        peer_name=f"ddptrain on {_PEERS[peer]}",
        goal=None,
        what=f"the same on a cluster that is up, over unix sockets, against {_PEERS[peer]}",
    )


EXPERIMENT = Experiment(
    rows=(
        *(_row(ranks, where) for where in _WHERE for ranks in _RANKS),
        *(_many_row(ranks) for ranks in _MANY),
        *(_protection_row(peer) for peer in _PEERS),
    ),
    open=_open,
)
