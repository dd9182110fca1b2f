from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from ddptrain.errors import DdptrainError, RunLocked
from ddptrain.results.remote import lease as remote_lock
from ddptrain.results.remote.lease import LOCK, STALE_S, Claim, StoreLock, claim_from
from ddptrain.storage.remote_folder import RemoteFolder
from ddptrain.storage.store import Versioned
from tests import fake_time
from tests.unit.results.stores import watched_store


def write_claim(store: RemoteFolder, **changes: Any) -> Claim:
    claim = dataclasses.replace(Claim.of_this_process(), **{"host": "elsewhere", "machine": "elsewhere", **changes})
    store.write(LOCK, json.dumps(dataclasses.asdict(claim)).encode())
    return claim


def test_driver_that_was_heard_of_lately_keeps_others_out() -> None:
    store, _ = watched_store()
    write_claim(store, pid=7, time_s=time.time() - 60)
    with pytest.raises(RunLocked, match=r"is held by process 7 on elsewhere, last heartbeat 6\d s ago"):
        StoreLock(store, settle_s=0).take(contested=True)


@pytest.mark.parametrize("changes", [{"time_s": time.time() - STALE_S - 9}, {"released": True}])
def test_driver_that_is_gone_or_done_does_not(changes: dict[str, Any]) -> None:
    store, _ = watched_store()
    before = write_claim(store, **changes)
    lock = StoreLock(store, settle_s=0)
    assert lock.take(contested=True) == before
    assert claim_from(store.read(LOCK)) is not None


def test_driver_of_this_host_is_known_to_be_dead_at_once() -> None:
    store, _ = watched_store()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    born = psutil.Process(child.pid).create_time()
    write_claim(store, machine=Claim.of_this_process().machine, pid=child.pid, born=born)
    with pytest.raises(RunLocked):
        StoreLock(store, settle_s=0).take(contested=False)
    child.kill()
    child.wait()
    StoreLock(store, settle_s=0).take(contested=False)


def test_of_two_that_take_it_at_once_the_last_one_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    store, fs = watched_store()
    first, second = StoreLock(store), StoreLock(store)
    failed: list[str] = []
    both = threading.Barrier(2, timeout=60)

    def meet(*_: object) -> None:
        both.wait()

    fs.fails = meet  # both have looked before one writes
    monkeypatch.setattr(
        remote_lock, "time", SimpleNamespace(time=time.time, sleep=meet, monotonic=time.monotonic)
    )  # and both have written

    def take(lock: StoreLock) -> None:
        try:
            lock.take(contested=True)
        except RunLocked:
            failed.append(lock.claim.token)

    threads = [threading.Thread(target=take, args=(lock,)) for lock in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    there = claim_from(store.read(LOCK))
    assert there is not None and {there.token, *failed} == {first.claim.token, second.claim.token}


def test_lock_is_refreshed_and_its_loss_is_told_once() -> None:
    store, _ = watched_store()
    lock = StoreLock(store, refresh_s=0.02, settle_s=0)
    lock.take(contested=False)
    lost: list[DdptrainError] = []
    lock.keep(lost.append)
    before = claim_from(store.read(LOCK))
    deadline = time.monotonic() + 60
    while (after := claim_from(store.read(LOCK))) == before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert before is not None and after is not None and after.time_s > before.time_s
    assert not lost and after.pid == os.getpid()
    while not lost:
        assert time.monotonic() < deadline
        thief = write_claim(store)  # again, should the lock be refreshed at this very moment
        time.sleep(0.1)
    lock.release()
    assert len(lost) == 1 and isinstance(lost[0], RunLocked)
    assert claim_from(store.read(LOCK)) == thief


def test_released_lock_is_free_and_says_who_had_it() -> None:
    store, _ = watched_store()
    lock = StoreLock(store)
    lock.take(contested=False)
    lock.release()
    there = claim_from(store.read(LOCK))
    assert there is not None and there.released and there.token == lock.claim.token and not there.is_held(0)
    lock.release(forget=True)
    assert store.read(LOCK) is None


@pytest.mark.parametrize("data", [b"", b"nonsense", b"[]", b"{}", b'{"host": 1}', None])
def test_lock_that_cannot_be_read_is_none(data: bytes | None) -> None:
    assert claim_from(data) is None


def test_lease_without_a_heartbeat_ends_after_three_minutes() -> None:
    """Drivers of several versions share a store, so all of them must wait as long."""
    assert STALE_S == 180.0 > remote_lock._SURE_S == 120.0


def test_age_of_a_claim_is_told_by_the_clock_of_the_store_since_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0

    class Slow:
        """A store whose clock is at 5000 s when its answer arrives, 30 s after the question."""

        def with_limits(self, _: object) -> Slow:
            return self

        def test_conditions(self, name: str) -> float:
            nonlocal now_s
            assert name == "probe"
            now_s = 130.0
            return 5000.0

    fake_time.replace(monkeypatch, "monotonic", lambda: now_s)
    file = remote_lock._LockFile(cast(RemoteFolder, Slow()), "probe")
    claim = dataclasses.replace(Claim.of_this_process(), time_s=time.time() - 77.0)
    now_s = 140.0
    assert file.weakness == ""
    assert file.age_s(Versioned(b"", written_s=4950.0), claim) == 60.0
    assert file.age_s(Versioned(b""), claim) == pytest.approx(77.0, abs=60.0)
