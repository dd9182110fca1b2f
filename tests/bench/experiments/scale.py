"""Many workers, many ranks and a slow network, on one machine. The many ranks are simulated: see programs/simulated.py.

make bench ARGS="--rows workers-64,ranks-1024,preempt-slow-link"
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import psutil

from tests.bench.measure import Experiment, Figures, Goal, NotHere, Row, Source, Variants
from tests.bench.stage import BenchError, Stage
from tests.servers import netns
from tests.servers.dask_cluster import write_tls

_EVENTS_PER_S = 10_000  # of all ranks
_PATIENCE_S = 240.0
_LINK = "20mbit"  # a quarter of what the rank prints
_PEM = {"CA_FILE": "cert.pem", "CLIENT__CERT": "cert.pem", "CLIENT__KEY": "key.pem"}


def _until(holds: Callable[[], bool], what: str, timeout_s: float = _PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            raise BenchError(f"{what} took over {timeout_s:g} s")
        time.sleep(0.01)


def _module(stage: Stage, name: str, *options: str) -> list[str]:
    return [stage.python, "-P", "-m", name, *options]


def _tls(folder: Path) -> dict[str, str]:
    return {f"DASK_DISTRIBUTED__COMM__TLS__{name}": str(folder / file) for name, file in _PEM.items()}


@contextmanager
def _simulated_cluster(stage: Stage, workers: int, slots: int) -> Iterator[tuple[str, dict[str, str]]]:
    """A scheduler, and workers whose ranks are simulated; gives its address, and the environment of clients."""
    folder = stage.new_folder("cluster")
    write_tls(folder)
    (folder / "sitecustomize.py").write_text("import simulated\nsimulated.install()\n")
    env = {"PYTHONPATH": f"{folder}:{stage.programs}"}
    with ExitStack() as stack:
        scheduler = _module(stage, "ddptrain.clusters.scheduler.scheduler_process", "--folder", str(folder))
        stack.enter_context(stage.started(scheduler))
        card = folder / "scheduler.json"
        _until(card.exists, "the start of the scheduler")
        for number in range(workers):
            options = ("--slots", str(slots), "--gpus", "none", "--name", f"w{number}", "--tls-dir", str(folder))
            worker = _module(stage, "ddptrain.worker", "--scheduler-file", str(card), *options, "--timeout", "240")
            stack.enter_context(stage.started(worker, env=env))
        yield str(json.loads(card.read_text())["address"]), {**_tls(folder), "DDPTRAIN_WARM_DRIVER": "off"}


def _simulated_run(
    stage: Stage, ranks: int, address: str, env: Mapping[str, str], *, seconds: float, events_per_s: float
) -> Figures:
    """Return the seconds from the command to the last rank's begin, and the cores that the driver used from then on."""
    marks = stage.new_folder("marks")
    params = {"folder": str(marks), "seconds": seconds, "events_per_s": events_per_s / ranks}
    options = ["--cluster", address, "--set", "cluster.start_timeout_s=240"]
    files = [marks / f"step-{rank}" for rank in range(ranks)]
    command = stage.ddptrain("simulated", ranks, *options, **params)
    began_ns = time.time_ns()
    with stage.started(command, env=env) as popen:
        driver = psutil.Process(popen.pid)
        _until(lambda: popen.poll() is not None or len(os.listdir(marks)) == ranks, "the start of all ranks")
        cores = 0.0
        if seconds > 2.0:
            time.sleep(1.0)  # the driver records the start of the ranks
            before, at = driver.cpu_times(), time.monotonic()
            time.sleep(seconds - 2.0)
            after = driver.cpu_times()
            cores = (after.user + after.system - before.user - before.system) / (time.monotonic() - at)
        if popen.wait(_PATIENCE_S):
            raise BenchError(f"the run of {ranks} simulated ranks ended with {popen.returncode}")
    return {"start_s": (max(int(file.read_text()) for file in files) - began_ns) / 1e9, "driver_cores": cores}


@contextmanager
def _open_workers(stage: Stage) -> Iterator[Variants]:
    count = stage.sizes.workers
    with ExitStack() as stack:
        many = stack.enter_context(_simulated_cluster(stage, count, 1))
        few = stack.enter_context(_simulated_cluster(stage, 8, count // 8))
        run = partial(_simulated_run, stage, count, seconds=0.5, events_per_s=count)
        for cluster in (many, few):
            run(*cluster)  # returns when all have joined
        yield {"one-slot": partial(run, *many), "eight-workers": partial(run, *few)}


@contextmanager
def _open_ranks(stage: Stage) -> Iterator[Variants]:
    with _simulated_cluster(stage, 8, stage.sizes.ranks // 8) as cluster:
        run = partial(_simulated_run, stage, stage.sizes.ranks, *cluster, events_per_s=_EVENTS_PER_S)
        run(seconds=0.5)
        yield {"simulated": partial(run, seconds=stage.sizes.events_s)}


@contextmanager
def _open_slow_link(stage: Stage) -> Iterator[Variants]:
    if reason := netns.why_not():
        raise NotHere(reason)
    folder, home, scratch = (stage.new_folder(name) for name in ("site", "home", "scratch"))
    write_tls(folder)
    with netns.Network(folder / "net") as network:
        head, desk = network.add("head"), network.add("desk")
        hosts = [network.add(name, home, scratch) for name in ("w1", "w2")]
        listen = _module(stage, "ddptrain.clusters.scheduler.scheduler_process", "--host", head.address)
        head.start(*listen, "--folder", str(folder))
        card = folder / "scheduler.json"
        _until(card.exists, "the start of the scheduler")
        address = str(json.loads(card.read_text())["address"])
        for host in hosts:
            host.run("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", _LINK, "burst", "32k", "latency", "1s")
            worker = _module(stage, "ddptrain.worker", "--scheduler", address, "--slots", "1", "--gpus", "none")
            host.start(*worker, "--host", host.address, "--scratch", str(scratch), "--tls-dir", str(folder))

        def preempt() -> Figures:
            marks = stage.new_folder("marks")
            config = {
                "workload": {"script": str(stage.programs / "chatty.py"), "args": [str(marks)]},
                "cluster": {"address": address, "ranks": 2},
                "results": {"dir": str(home / "runs")},
            }
            (folder / "chatty.yaml").write_text(json.dumps(config))
            command = [*desk.enter(folder), stage.python, "-m", "ddptrain", "train", "chatty.yaml", "--output", "plain"]
            with stage.started(command, env=_tls(folder)) as popen:
                _until(lambda: popen.poll() is not None or len(os.listdir(marks)) == 2, "the start of the ranks")
                time.sleep(10.0)  # what the rank prints has filled all buffers on the way
                (driver,) = psutil.Process(popen.pid).children()
                sent_ns = time.time_ns()
                driver.send_signal(signal.SIGTERM)
                files = [marks / f"preempted-{rank}" for rank in range(2)]
                _until(lambda: all(file.exists() and file.read_text() for file in files), "the preemption")
            return {"preempt_s": (max(int(file.read_text()) for file in files) - sent_ns) / 1e9}

        yield {"preempt": preempt}


def _row(name: str, unit: str, ours: Source, goal: Goal, what: str, peer: Source | None = None) -> Row:
    return Row(name, unit, ours, peer, "8 workers" if peer else "", goal, what)


WORKERS = Experiment(
    rows=(
        _row(
            "workers-64",
            "s",
            Source("one-slot", "start_s"),
            Goal("ratio", "<=", 1.3),
            "command to the begin of the last of 64 simulated ranks, 64 workers with one slot",
            Source("eight-workers", "start_s"),
        ),
    ),
    open=_open_workers,
)
RANKS = Experiment(
    rows=(
        _row(
            "ranks-1024-start",
            "s",
            Source("simulated", "start_s"),
            Goal("ours", "<=", 5.2),
            "command to the begin of the last of 1,024 simulated ranks, 8 workers",
        ),
        _row(
            "ranks-1024-driver",
            "cores",
            Source("simulated", "driver_cores"),
            Goal("ours", "<=", 0.3),
            f"CPU of the driver while they write {_EVENTS_PER_S:,} events per second",
        ),
    ),
    open=_open_ranks,
)
SLOW_LINK = Experiment(
    rows=(
        _row(
            "preempt-slow-link",
            "s",
            Source("preempt", "preempt_s"),
            Goal("ours", "<=", 2.0),
            f"SIGTERM to the driver until both ranks have it; one prints 5 MB/s on a host with a link of {_LINK}",
        ),
    ),
    open=_open_slow_link,
)
