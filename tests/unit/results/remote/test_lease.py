from __future__ import annotations

import dataclasses
import json
import os
import secrets
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
from ddptrain.storage.store import Limits, StoreError, Versioned, WriteConflict
from tests.support import fake_time
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
    assert STALE_S == 180.0 > remote_lock._OWNED_S == 120.0


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


class Conditional:
    """A store with conditional writes, whose clock is at 5,000 s."""

    url = "s3://bucket/r-1"

    def __init__(self) -> None:
        self.file: Versioned | None = None
        self.errors: list[StoreError] = []
        self.is_answer_lost = False
        self.removed: list[str] = []

    def with_limits(self, limits: Limits) -> Conditional:
        assert limits == Limits(timeout_s=20.0)
        return self

    def test_conditions(self, name: str) -> float:
        assert name.startswith(f"{LOCK}.")
        return 5000.0

    def read_versioned(self, name: str) -> Versioned | None:
        assert name == LOCK
        return self.file

    def write_versioned(self, name: str, data: bytes, before: Versioned | None) -> Versioned:
        assert name == LOCK
        if self.errors:
            raise self.errors.pop(0)
        if before != self.file:
            raise WriteConflict("changed")
        self.file = Versioned(data, {"etag": secrets.token_hex(4)}, 5000.0)
        if self.is_answer_lost:
            self.is_answer_lost = False
            raise StoreError("no answer")
        return self.file

    def remove(self, name: str) -> None:
        self.removed.append(name)

    @property
    def claim(self) -> Claim | None:
        return claim_from(self.file.data if self.file else None)

    def put(self, claim: Claim, written_s: float = 5000.0) -> None:
        self.file = Versioned(json.dumps(dataclasses.asdict(claim)).encode(), {"etag": "x"}, written_s)


@pytest.fixture
def store() -> Any:
    return Conditional()


OTHER = Claim("elsewhere", 7, 0.0, "token", 0.0, machine="elsewhere")


def test_lease_in_a_store_with_conditional_writes_needs_no_pause(store: Any) -> None:
    lock = StoreLock(store, settle_s=3600.0)
    assert lock.take(contested=True) is None and lock.weakness == ""
    assert store.claim.token == lock.claim.token and not store.claim.released
    lock.assure()
    with pytest.raises(
        RunLocked, match=f"run s3://bucket/r-1 is held by process {os.getpid()} on .*, last heartbeat 0 s"
    ):
        StoreLock(store).take(contested=True)


def test_lease_ends_three_minutes_after_the_last_write_by_the_clock_of_the_store(store: Any) -> None:
    store.put(OTHER, written_s=5000.0 - 175.0)
    with pytest.raises(RunLocked) as refused:
        StoreLock(store).take(contested=False)
    assert str(refused.value).startswith(
        "run s3://bucket/r-1 is held by process 7 on elsewhere, last heartbeat 175 s ago; "
    )
    assert "dead after 180 s" in str(refused.value) and refused.value.exit_code == 6
    store.put(OTHER, written_s=5000.0 - 181.0)
    lock = StoreLock(store)
    assert lock.take(contested=False) == OTHER and store.claim.token == lock.claim.token


@pytest.mark.parametrize(
    ("age_s", "is_held"), [(0.0, True), (180.0, True), (180.5, False), (-180.0, True), (-181.0, False)]
)
def test_claim_is_held_for_three_minutes(age_s: float, is_held: bool) -> None:
    assert OTHER.is_held(age_s) is is_held
    assert dataclasses.replace(OTHER, machine="").is_held(age_s) is is_held
    assert not dataclasses.replace(OTHER, released=True).is_held(age_s)


@pytest.mark.parametrize(("by_s", "is_held"), [(0.0, True), (1.5, True), (-1.5, True), (2.5, False), (-2.5, False)])
def test_claim_of_this_machine_is_held_by_the_process_that_was_born_then(by_s: float, is_held: bool) -> None:
    mine = Claim.of_this_process()
    assert mine.born == psutil.Process().create_time() and mine.pid == os.getpid() and len(mine.token) == 16
    assert dataclasses.replace(mine, born=mine.born + by_s).is_held(0.0) is is_held


def test_process_that_may_not_be_looked_at_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(pid: int) -> float:
        raise psutil.AccessDenied(pid)

    monkeypatch.setattr(remote_lock, "_process_start", denied)
    assert remote_lock._is_alive(7, 0.0)


def test_lease_is_renewed_before_a_change_only_after_two_minutes(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(remote_lock, "_elapsed_s", lambda: now[0])
    lock = StoreLock(store)
    lock.take(contested=False)
    first = store.file
    for now[0] in (219.0, 220.0):
        lock.assure()
        assert store.file is first
    now[0] = 220.5
    lock.assure()
    assert store.file is not first and store.claim.token == lock.claim.token
    lock.release()
    assert store.claim.released
    with pytest.raises(RunLocked, match=r"^this process does not hold run s3://bucket/r-1 any more$"):
        lock.assure()


def test_loss_of_the_lease_is_told_and_nothing_is_written_over(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_lock, "_elapsed_s", lambda: 0.0)
    lost: list[DdptrainError] = []
    lock = StoreLock(store, refresh_s=3600.0)
    lock.take(contested=False)
    lock.keep(lost.append)
    store.put(OTHER)
    monkeypatch.setattr(remote_lock, "_elapsed_s", lambda: 121.0)
    with pytest.raises(RunLocked, match="is held by process 7 on elsewhere"):
        lock.assure()
    assert [type(error) for error in lost] == [RunLocked] and store.claim == OTHER
    with pytest.raises(RunLocked, match="does not hold"):
        lock.assure()
    lock.release()
    assert store.claim == OTHER and len(lost) == 1


def test_lease_whose_file_was_deleted_or_whose_answer_was_lost_is_renewed(store: Any) -> None:
    lock = StoreLock(store)
    lock.take(contested=False)
    store.file = None
    lock._renew()
    assert store.claim.token == lock.claim.token
    store.is_answer_lost = True
    with pytest.raises(StoreError, match="no answer"):
        lock._renew()
    lock._renew()
    assert store.claim.token == lock.claim.token
    store.errors = [WriteConflict("first"), WriteConflict("second")]
    with pytest.raises(RunLocked, match=r"^run s3://bucket/r-1 was taken meanwhile$"):
        lock._renew()


def test_lease_whose_first_answer_was_lost_is_taken_at_the_second_attempt(store: Any) -> None:
    lock = StoreLock(store)
    store.is_answer_lost = True
    with pytest.raises(StoreError, match="no answer"):
        lock.take(contested=True)
    before = lock.take(contested=True)
    assert before is not None and before.token == lock.claim.token


def test_driver_that_was_faster_is_looked_at_again(store: Any) -> None:
    store.errors = [WriteConflict("another was faster")]
    lock = StoreLock(store)
    assert lock.take(contested=True) is None and store.claim.token == lock.claim.token


def test_forgotten_lock_is_deleted_unless_another_driver_has_it(store: Any) -> None:
    lock = StoreLock(store)
    lock.take(contested=False)
    lock.release(forget=True)
    assert store.removed == [LOCK] and not store.claim.released
    store.put(OTHER)
    lock.release(forget=True)
    assert store.removed == [LOCK]


def test_renewal_that_fails_is_repeated_ten_times_as_often(store: Any) -> None:
    waits: list[float] = []
    lock = StoreLock(store)
    lock.take(contested=False)
    store.errors = [StoreError("away"), StoreError("away")]

    class Over:
        def wait(self, seconds: float) -> bool:
            waits.append(seconds)
            return len(waits) > 4

    lock._stopped = cast(threading.Event, Over())
    lock._refresh()
    assert waits == [60.0, 6.0, 6.0, 60.0, 60.0]
    store.put(OTHER)
    waits.clear()
    lock._stopped = SimpleNamespace(wait=Over().wait, set=lambda: waits.append(-1.0))  # type: ignore[assignment]
    lock._refresh()
    assert waits == [60.0, -1.0], "it ends when the lease is lost"


def test_store_without_conditional_writes_is_compared_before_it_is_written() -> None:
    weak, _ = watched_store()
    file = remote_lock._LockFile(weak, "probe")
    assert 0 < len(file.weakness) <= 200 and file.read() is None
    seen = file.write(b"one", None)
    assert file.read() == seen == Versioned(b"one")
    with pytest.raises(WriteConflict, match=r"/run\.lock was written by another process$"):
        file.write(b"two", None)
    with pytest.raises(WriteConflict):
        file.write(b"two", Versioned(b"other"))
    assert file.write(b"two", Versioned(b"one", {"etag": "any"})) == Versioned(b"two") == file.read()


def test_intervals_of_the_lease_are_those_of_other_versions() -> None:
    assert (remote_lock._REFRESH_S, remote_lock._SETTLE_S, remote_lock._CLOSE_S) == (60.0, 1.0, 5.0)
    assert remote_lock._LARGEST_BYTES == 65_536
