"""The attempt's loop with many ranks that are no processes: real spools, notices, run directory and display."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from ddptrain.clusters.scheduler.slots import Slot
from ddptrain.driver import inbox as messages
from ddptrain.driver.attempt import Attempt, AttemptLoop, now
from ddptrain.driver.display.display import Display
from ddptrain.driver.fault import FaultKind
from ddptrain.driver.inbox import Inbox
from ddptrain.driver.output import RankOutput
from ddptrain.driver.ranks import Rank, RankPlace
from ddptrain.driver.recorder import Recorder
from ddptrain.driver.watchdog import new_watchdog
from ddptrain.protocol import events
from ddptrain.protocol.commands import Command
from ddptrain.protocol.news import News, RankExit, RankNews
from ddptrain.protocol.rank_spec import Placement, RankSpec
from ddptrain.results.run_writer import RunWriter
from ddptrain.worker.spool import RankSpool, rank_spool
from tests.unit.specs import make_spec

_RANKS, _SLOTS, _STEPS = 64, 8, 12


class StubGroup:
    """A worker group whose ranks write their files at once, and end."""

    connected = True

    def __init__(self, inbox: Inbox, scratch: Path) -> None:
        self.inbox, self.scratch = inbox, scratch
        self.submitted: list[int] = []
        self.lost: set[str] = set()

    def submit(self, specs: Sequence[RankSpec], _: object) -> None:
        for spec in specs:
            self.submitted.append(spec.rank)
            if spec.rank == 0:
                self.inbox.put(News(spec.attempt, store_port=4711, worker="tcp://h0"))
            for part in train(spec, rank_spool(self.scratch, spec.run_id, spec.attempt, spec.rank)):
                self.inbox.put(News(spec.attempt, (part,), worker=f"tcp://h{spec.rank // _SLOTS}"))

    def has(self, worker: str) -> bool:
        return worker not in self.lost

    def forget(self, worker: str) -> None:
        self.lost.add(worker)

    def stop(self, specs: Sequence[RankSpec], grace_s: float) -> None:
        """Nothing runs."""

    def fetch(self, worker: str, path: Path, offset: int, size_bytes: int) -> bytes:
        raise AssertionError("the ranks share the driver's file system")


def train(spec: RankSpec, spool: RankSpool) -> Iterator[RankNews]:
    """Write what a rank writes; the news of it come in pieces that end within lines."""
    spool.create()
    written = [events.Started(1, 100 + spec.rank, "h"), events.Entered(2)]
    written += [events.Metrics(3 + step, {"loss": 1.0 / (step + 1)}, step) for step in range(_STEPS)]
    spool.events.write_bytes(b"".join(map(events.encode, [*written, events.Finished(99)])))
    spool.log.write_text("".join(f"step {step}\n" for step in range(_STEPS)) + "the last line\n")
    log_size, events_size = spool.sizes()
    for part in (3, 2):
        yield RankNews(spec.rank, log_size // part, events_size // part)
    yield RankNews(spec.rank, log_size, events_size, ended=RankExit(100 + spec.rank, 0, 100))


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[RunWriter]:
    (tmp_path / "runs").mkdir()
    with RunWriter.create(tmp_path / "runs", "many", "many", "{}", "w") as made:
        made.update(attempts=(made.next_attempt(None, _RANKS),))
        yield made


@pytest.fixture
def display(writer: RunWriter) -> Iterator[Display]:
    with Display("plain", writer.layout.logs_dir, "many", stdout=io.StringIO()) as opened:
        opened.on_event({"event": "ranks", "count": _RANKS, "offsets": {}, "hidden": ()})
        yield opened


def attempt_of(
    count: int,
    writer: RunWriter,
    display: Display,
    folder: Path,
    lost_after_s: float = 60.0,
    *,
    shared: bool = True,
    group: type[StubGroup] = StubGroup,
    transfer: object = None,
) -> AttemptLoop:
    inbox = Inbox()
    ranks = []
    for rank in range(count):
        node, slot = divmod(rank, _SLOTS)
        placement = Placement(count, slot, _SLOTS, node, slot, shared=shared)
        place = RankPlace(rank, placement, Slot(f"tcp://h{node}", f"h{node}", slot, False, True), "h", folder)
        ranks.append(Rank(make_spec(rank=rank, world_size=count, lost_after_s=lost_after_s), place))
    workers = cast(Any, group(inbox, folder))
    logs = [writer.layout.log(rank) for rank in range(count)]
    output = RankOutput(ranks, logs, inbox, workers.fetch, workers.has)
    recorder, watchdog = Recorder(writer, [display]), new_watchdog("auto", 60.0)
    attempt = Attempt(ranks, workers, output, cast(Any, transfer), recorder, watchdog, now())
    return AttemptLoop(attempt, inbox, lambda: None)


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_files_of_many_ranks_are_complete(tmp_path: Path, writer: RunWriter, display: Display) -> None:
    attempt = attempt_of(_RANKS, writer, display, tmp_path / "scratch")
    end = attempt.run()
    assert end.finished
    assert sorted(cast(StubGroup, attempt.workers).submitted) == list(range(_RANKS))
    rows = [(row["rank"], row["step"]) for row in json_lines(writer.layout.metrics_jsonl)]
    assert sorted(rows) == [(rank, step) for rank in range(_RANKS) for step in range(_STEPS)]
    seen = [(line["event"], line["rank"]) for line in json_lines(writer.layout.events_jsonl) if "rank" in line]
    kinds = ("rank_started", "entered", "finished", "rank_ended")
    assert sorted(seen) == sorted((kind, rank) for kind in kinds for rank in range(_RANKS))
    for rank in range(_RANKS):
        log = writer.layout.log(rank)
        spool = rank_spool(tmp_path / "scratch", "r-1", 1, rank).log
        assert log.read_text().endswith(f"step {_STEPS - 1}\nthe last line\n")
        assert os.path.samefile(log, spool)  # complete even if the driver is killed
    assert [record.pid for record in writer.record.attempts[-1].ranks] == [100 + rank for rank in range(_RANKS)]


def test_loss_of_a_worker_that_is_back_does_not_end_the_next_attempt(
    tmp_path: Path, writer: RunWriter, display: Display
) -> None:
    attempt = attempt_of(2, writer, display, tmp_path / "scratch")
    attempt.inbox.put(messages.WorkerLost("tcp://h0"))  # lost in the pause before this attempt
    assert attempt.run().finished


def test_many_workers_that_are_lost_together_do_not_block_the_loop(
    tmp_path: Path, writer: RunWriter, display: Display
) -> None:
    attempt = attempt_of(_RANKS, writer, display, tmp_path / "scratch")
    group = cast(StubGroup, attempt.workers)
    group.submit = lambda specs, _: None  # type: ignore[method-assign]
    nodes = range(_RANKS // _SLOTS)
    for node in nodes:
        group.forget(f"tcp://h{node}")
    for node in [*nodes] * 8:  # as many messages as a cluster with 64 hosts sends
        attempt.inbox.put(messages.WorkerLost(f"tcp://h{node}"))
    began = time.monotonic()
    end = attempt.run()
    assert end.fault is not None and end.fault.kind is FaultKind.WORKER_LOST
    assert time.monotonic() - began < 3.0  # with 0.1 s for each message: over 6 s


def test_silence_is_judged_while_the_inbox_is_never_empty(tmp_path: Path, writer: RunWriter, display: Display) -> None:
    attempt = attempt_of(_SLOTS + 1, writer, display, tmp_path / "scratch", lost_after_s=0.5)
    group = cast(StubGroup, attempt.workers)
    group.submit = lambda specs, _: None  # type: ignore[method-assign]
    stop = threading.Event()

    def busy() -> None:
        while not stop.wait(0.001):
            for _ in range(20):  # the worker of the last rank sends more than can be read
                attempt.inbox.put(News(1, worker="tcp://h1"))

    sender = threading.Thread(target=busy)
    sender.start()
    attempt.inbox.put(News(1, store_port=4711, worker="tcp://h0"))
    end = attempt.run()
    stop.set()
    sender.join()
    assert end.fault is not None and (end.fault.rank, end.fault.kind) == (0, FaultKind.WORKER_LOST)


class FarGroup(StubGroup):
    """Its ranks are on other hosts: bytes come in news, and some must be fetched, which takes until a command."""

    def __init__(self, inbox: Inbox, scratch: Path) -> None:
        super().__init__(inbox, scratch)
        self.released = threading.Event()
        self.in_time: list[bool] = []
        self.told: list[Command] = []

    def submit(self, specs: Sequence[RankSpec], _: object) -> None:
        for spec in specs:
            if spec.rank == 0:
                self.inbox.put(News(spec.attempt, store_port=4711, worker="tcp://h0"))
            written = b"".join(map(events.encode, [events.Started(1, 100 + spec.rank, "h"), events.Entered(2)]))
            self._put(RankNews(spec.rank, 0, len(written), events=written))
            if spec.rank == 1:
                self._put(RankNews(1, 4, len(written)))  # four bytes of the log are missing
                self.inbox.put(messages.SignalReceived(signal.SIGTERM))

    def fetch(self, worker: str, path: Path, offset: int, size_bytes: int) -> bytes:
        self.in_time.append(self.released.wait(20.0))
        return b"line"[offset : offset + size_bytes]

    def tell(self, specs: Sequence[RankSpec], command: Command) -> None:
        self.told.append(command)
        self.released.set()
        for spec in specs:
            self._put(RankNews(spec.rank, 4 * spec.rank, 0, ended=RankExit(100, 1, 100)))

    def _put(self, part: RankNews) -> None:
        self.inbox.put(News(1, (part,), worker="tcp://h0"))


def test_command_to_save_does_not_wait_for_bytes_of_a_host_that_is_cut_off(
    tmp_path: Path, writer: RunWriter, display: Display
) -> None:
    attempt = attempt_of(2, writer, display, tmp_path / "scratch", shared=False, group=FarGroup)
    group = cast(FarGroup, attempt.workers)
    attempt.run()
    assert group.told == [Command.PREEMPT] and group.in_time == [True]
    assert writer.layout.log(1).read_bytes() == b"line"  # and its exit is handled after its last bytes
