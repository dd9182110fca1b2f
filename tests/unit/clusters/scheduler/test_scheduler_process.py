"""The detached scheduler, as a real process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import distributed.scheduler
import pytest
from distributed import Client

from ddptrain.clusters.resolve import Target
from ddptrain.clusters.scheduler import slots
from ddptrain.clusters.scheduler.scheduler_process import drop_the_silent
from ddptrain.clusters.security import make_tls, own_security
from ddptrain.clusters.status import call
from tests.support.command import wait_until

START_S = 60.0
END_S = 60.0
IDLE_S = 1.0
TTL_S = 0.4


class Started:
    """A scheduler's process and its folder."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        command = [
            sys.executable,
            "-P",
            "-m",
            "ddptrain.clusters.scheduler.scheduler_process",
            "--folder",
            str(folder),
            *options,
        ]
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def card(self) -> dict[str, Any]:
        """What it has written once it listens."""
        path = self.folder / "scheduler.json"
        wait_until(lambda: path.exists() or self.process.poll() is not None)
        assert path.exists(), self.log.read_text()
        loaded: dict[str, Any] = json.loads(path.read_text())
        return loaded

    def has_ended(self) -> bool:
        return self.process.poll() is not None


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    started: list[Started] = []

    def start(*options: str) -> Started:
        make_tls(tmp_path)
        started.append(Started(tmp_path, *options))
        return started[-1]

    yield start
    for each in started:
        each.process.terminate()
        each.process.wait(END_S)


def client_of(scheduler: Started, **options: Any) -> Client:
    address = scheduler.card()["address"]
    return Client(address, set_as_default=False, timeout=30, security=own_security(scheduler.folder), **options)


@contextlib.contextmanager
def connected_in_time(start: Callable[..., Started], **options: Any) -> Iterator[tuple[Started, Client, float]]:
    """A scheduler with a client that came before it was idle for too long, and how long that is, in seconds."""
    for idle_s in (IDLE_S, 2 * IDLE_S, 4 * IDLE_S, 8 * IDLE_S):  # on a busy machine it may take a while to come
        scheduler = start("--idle-timeout", str(idle_s))
        try:
            client = client_of(scheduler, **options)
        except (OSError, AssertionError):
            assert scheduler.process.wait(END_S) == 0, scheduler.log.read_text()
            continue
        with client:
            yield scheduler, client, idle_s
        return
    pytest.fail("no client came in time")


def test_file_with_the_address_and_folder_that_dask_imports_from_are_private_and_go_with_the_scheduler(
    start: Callable[..., Started],
) -> None:
    scheduler = start()
    card = scheduler.card()
    path = scheduler.folder / "scheduler.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert card["address"].startswith("tls://127.0.0.1:") and card["pid"] == scheduler.process.pid
    with client_of(scheduler) as client:
        folder = client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.local_directory)
    private = Path(folder).parents[1]
    assert private != Path(tempfile.gettempdir()) and stat.S_IMODE(private.stat().st_mode) == 0o700
    scheduler.process.send_signal(signal.SIGTERM)
    assert scheduler.process.wait(END_S) == 0
    assert not private.exists()
    assert sorted(os.listdir(scheduler.folder)) == ["cert.pem", "key.pem", "log"]
    assert "WARNING" not in scheduler.log.read_text()


def test_forgotten_scheduler_ends_and_says_why(start: Callable[..., Started]) -> None:
    scheduler = start("--idle-timeout", str(IDLE_S))
    scheduler.card()
    assert scheduler.process.wait(END_S) == 0
    ended = json.loads((scheduler.folder / "ended.json").read_text())
    assert ended["reason"] == "idle for 1 s"
    assert ended["at"].endswith("+00:00")
    assert not (scheduler.folder / "scheduler.json").exists()


def test_connected_driver_keeps_the_scheduler_up(start: Callable[..., Started]) -> None:
    with connected_in_time(start) as (scheduler, _, idle_s):
        time.sleep(3 * idle_s)
        assert not scheduler.has_ended()
    assert scheduler.process.wait(END_S) == 0


def test_calls_of_cluster_up_keep_the_scheduler_up(
    start: Callable[..., Started],
) -> None:
    scheduler = start("--idle-timeout", str(2 * IDLE_S))
    target = Target(scheduler.card()["address"], own_security(scheduler.folder))
    deadline = time.monotonic() + 4 * IDLE_S
    while time.monotonic() < deadline:
        asyncio.run(call(target, 10.0, slots.overview, counts=True))
        time.sleep(0.2)
    assert not scheduler.has_ended()
    asyncio.run(call(target, 10.0, slots.overview))  # as of `cluster status`, which does not count
    assert scheduler.process.wait(END_S) == 0


def test_client_that_shuts_the_scheduler_down_is_named_as_the_reason(start: Callable[..., Started]) -> None:
    scheduler = start()
    with client_of(scheduler) as client:
        client.shutdown()
    assert scheduler.process.wait(END_S) == 0
    assert "shut it down" in json.loads((scheduler.folder / "ended.json").read_text())["reason"]


# --- Silent workers are dropped by a clock that nobody sets. ---


@dataclass
class Beating:
    last_seen: float = 1000.0


class Heartbeats:
    """Workers with the wall clock's time of their last heartbeat, as Dask notes it."""

    def __init__(self, *workers: str) -> None:
        self.workers = {address: Beating() for address in workers}

    async def remove_worker(self, address: str, stimulus_id: str) -> None:
        del self.workers[address]


async def watched(scheduler: Any, beat: Any, times: int) -> None:
    """Watch while `beat(number)` is called every eighth of the time to live."""
    watch = asyncio.ensure_future(drop_the_silent(scheduler, lambda: TTL_S))
    for number in range(times):
        beat(number)
        await asyncio.sleep(TTL_S / 8)
    watch.cancel()


@pytest.fixture
def few_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed.scheduler, "heartbeat_interval", lambda _: 0.0)


@pytest.mark.usefixtures("few_heartbeats")
def test_worker_without_heartbeats_is_dropped_and_the_others_stay() -> None:
    scheduler = Heartbeats("silent", "alive")

    def beat(number: int) -> None:
        scheduler.workers["alive"].last_seen += 1.0

    asyncio.run(watched(scheduler, beat, 16))
    assert [*scheduler.workers] == ["alive"]


@pytest.mark.usefixtures("few_heartbeats")
def test_jump_of_the_clock_drops_nobody() -> None:
    scheduler = Heartbeats("one", "two")

    def beat(number: int) -> None:
        for state in scheduler.workers.values():
            state.last_seen += -3600.0 if number == 8 else 3600.0 if number == 4 else 0.01

    asyncio.run(watched(scheduler, beat, 16))
    assert [*scheduler.workers] == ["one", "two"]


@pytest.mark.usefixtures("few_heartbeats")
def test_time_in_which_the_scheduler_itself_stood_still_does_not_count() -> None:
    scheduler = Heartbeats("alive")

    def beat(number: int) -> None:
        if number == 8:
            time.sleep(2 * TTL_S)  # what workers send now is read when it is over
        else:
            scheduler.workers["alive"].last_seen += 1.0

    asyncio.run(watched(scheduler, beat, 12))
    assert [*scheduler.workers] == ["alive"]
