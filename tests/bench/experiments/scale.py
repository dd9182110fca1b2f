"""The control plane with many ranks: the real driver, scheduler and worker code, with stubs in place of the ranks."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.bench.experiments.first_step import warm_cluster
from tests.bench.measure import Experiment, Figures, Goal, Row, Source, Variants
from tests.bench.stage import BenchError, Stage

_EVENTS_PER_S = 10  # of each rank
_PROCESSES = 2  # that simulate the hosts
_START_S = 60.0
_SHORT_S = 1.0


class _Usage(threading.Thread):
    """Reads CPU seconds and memory of a process now and then, until it ends."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.process = psutil.Process(pid)
        self.rows: list[tuple[float, float, int]] = []  # time, CPU seconds, resident bytes

    def run(self) -> None:
        try:
            while True:
                times, memory = self.process.cpu_times(), self.process.memory_info()
                self.rows.append((time.time(), times.user + times.system, memory.rss))
                time.sleep(0.1)
        except psutil.Error:
            return  # it has ended

    def cpu_s(self, begin_s: float, end_s: float) -> float:
        """CPU seconds used between two times."""
        before = max((row[1] for row in self.rows if row[0] <= begin_s), default=0.0)
        return max(row[1] for row in self.rows if row[0] <= end_s) - before


def _simulate(stage: Stage, options: list[str], ranks: int, seconds: float, tracking: str = "off") -> Figures:
    """One run with simulated ranks, and with W&B (offline) in this mode."""
    folder = stage.new_folder("scale")
    config = {"name": "scale", "workload": "simulated_hosts:workload", "cluster": {"ranks": ranks, "gpus": 0}}
    config |= {"env": {"WANDB_MODE": "offline"}, "tracking": {"wandb": {"mode": tracking}}} if tracking != "off" else {}
    (stage.programs / "scale.yaml").write_text(json.dumps(config))
    command = [stage.command, "train", "scale.yaml", *options, "--runs-dir", str(folder), "--run-id", "scale"]
    said = folder / "said"
    began_s = time.time()
    with (
        said.open("wb") as file,
        stage.started([*command, "--output", "plain"], stdout=file.fileno(), stderr=file.fileno()) as driver,
    ):
        usage = _Usage(driver.pid)
        usage.start()
        code = driver.wait(_START_S + 10 * seconds)
    ended_s = time.time()
    if code:
        raise BenchError(f"the run ended with {code}: {said.read_text()[-2000:]}")
    return _figures(folder / "scale", usage, ranks, seconds, began_s, ended_s)


def _figures(run: Path, usage: _Usage, ranks: int, seconds: float, began_s: float, ended_s: float) -> Figures:
    events = _json_lines(run / "events.jsonl")
    entered = [event["time_s"] for event in events if event["event"] == "entered"]
    finished = [event for event in events if event["event"] == "finished"]
    read_s, last_s = (
        max(event["time_s"] for event in finished),
        max(event["rank_time_ns"] for event in finished) / 1e9,
    )
    begun = next(event["time_s"] for event in events if event["event"] == "run_started")
    rows = _json_lines(run / "metrics.jsonl")
    wanted = ranks * round(seconds * _EVENTS_PER_S)
    logs = sum((run / "logs" / f"rank-{rank}.log").read_text().endswith("the last line\n") for rank in range(ranks))
    lost = abs(wanted - len({(row["rank"], row["step"]) for row in rows}))
    cpu_s = usage.cpu_s(min(entered), read_s)  # for all events, however late they are read
    return {
        "start_s": max(entered) - began_s,
        "per_rank_ms": 1000 * (max(entered) - begun) / ranks,
        "cores": cpu_s / seconds,
        "event_us": 1e6 * cpu_s / wanted,
        "start_cpu_s": usage.cpu_s(began_s, max(entered)),
        "memory_mb": max(row[2] for row in usage.rows) / 1e6,
        "lost": lost + 2 * ranks - len(entered) - len(finished) + ranks - logs,
        "end_s": ended_s - last_s,
    }


def _json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@contextmanager
def _hosts(stage: Stage, hosts: int, slots: int, seconds: float) -> Iterator[list[str]]:
    """A cluster of simulated hosts; gives the options that lead there."""
    with ExitStack() as stack:
        options = stack.enter_context(warm_cluster(stage, 1, with_worker=False, transport="tcp"))
        folder = stage.new_folder("hosts")
        each = hosts // _PROCESSES
        for first in range(0, hosts, each):
            program = [stage.python, str(stage.programs / "simulated_hosts.py"), options[1]]
            numbers = (first, each, slots, _EVENTS_PER_S, seconds)
            program += [*map(str, numbers), str(folder)]
            said = (folder / f"said-{first}").open("wb")
            stack.enter_context(said)
            stack.enter_context(stage.started(program, stdout=said.fileno(), stderr=said.fileno()))
        _wait_for_hosts(folder)
        yield options


@contextmanager
def _open(stage: Stage) -> Iterator[Variants]:
    sizes = stage.sizes
    ranks, seconds = sizes.scale_hosts * sizes.scale_slots, sizes.scale_s
    with _hosts(stage, sizes.scale_hosts, sizes.scale_slots, seconds) as options:
        yield {
            "many": lambda: _simulate(stage, options, ranks, seconds),
            "tracked": lambda: _simulate(stage, options, ranks, seconds, tracking="rank0"),
        }


@contextmanager
def _open_workers(stage: Stage) -> Iterator[Variants]:
    """As many ranks on workers with one slot each, and on workers with several."""
    slots = stage.sizes.scale_slots
    ranks = slots * slots
    with (
        _hosts(stage, ranks, 1, _SHORT_S) as single,
        _hosts(stage, slots, slots, _SHORT_S) as several,
    ):
        yield {
            "single": lambda: _simulate(stage, single, ranks, _SHORT_S),
            "several": lambda: _simulate(stage, several, ranks, _SHORT_S),
        }


def _wait_for_hosts(folder: Path) -> None:
    deadline = time.monotonic() + _START_S
    while len(list(folder.glob("ready-*"))) < _PROCESSES:
        if time.monotonic() > deadline:
            said = "".join(path.read_text()[-1000:] for path in folder.glob("said-*"))
            raise BenchError(f"the simulated hosts did not start within {_START_S:g} s: {said}")
        time.sleep(0.05)


def _row(name: str, unit: str, figure: str, bound: float, what: str, variant: str = "many") -> Row:
    goal = Goal("ours", "<=", bound)
    return Row(name=name, unit=unit, ours=Source(variant, figure), peer=None, peer_name="", goal=goal, what=what)


def _against(name: str, figure: str, variants: tuple[str, str], bound: float, what: str, than: str) -> Row:
    ours, peer = (Source(variant, figure) for variant in variants)
    return Row(name=name, unit="s", ours=ours, peer=peer, peer_name=than, goal=Goal("ratio", "<=", bound), what=what)


_RANKS = "1,024 simulated ranks on 128 simulated hosts, with 10 events/s each"
EXPERIMENT = Experiment(
    rows=(
        _row(
            "scale", "s", "start_s", 6.0, f"command to the moment when the driver knows that all have entered: {_RANKS}"
        ),
        _row("scale-per-rank", "ms", "per_rank_ms", 3.0, "the same from the placed ranks on, divided by their number"),
        _row("scale-cpu", "cores", "cores", 0.6, "CPU use of the driver while it receives 10,000 events/s"),
        _row(
            "scale-start-cpu",
            "s",
            "start_cpu_s",
            3.0,
            "CPU seconds of the driver until all have entered, imports included",
        ),
        _row(
            "scale-event-cpu", "us", "event_us", 60.0, "CPU time of the driver for each event, however late it is read"
        ),
        _row("scale-memory", "MB", "memory_mb", 250.0, "most memory of the driver"),
        _row("scale-lost", "events", "lost", 0.0, "events, ends and logs that are missing in the run directory"),
        _row("scale-end", "s", "end_s", 5.0, "last rank's end to the end of the command"),
        _against(
            "scale-tracked",
            "start_cpu_s",
            ("tracked", "many"),
            1.05,
            "CPU seconds of the driver until all have entered, with W&B (offline) in mode rank0",
            "without W&B",
        ),
        _row("scale-tracked-lost", "events", "lost", 0.0, "as scale-lost, with W&B in mode rank0", "tracked"),
    ),
    open=_open,
)
_SLOTS = "64 workers with one slot, and 8 workers with 8"
WORKERS = Experiment(
    rows=(
        _against("scale-workers", "start_s", ("single", "several"), 1.25, f"as scale, 64 ranks: {_SLOTS}", "8 x 8"),
        _against(
            "scale-workers-cpu", "start_cpu_s", ("single", "several"), 1.25, f"as scale-start-cpu: {_SLOTS}", "8 x 8"
        ),
    ),
    open=_open_workers,
)
