from __future__ import annotations

import dataclasses
import json
import secrets
import subprocess
import sys
from typing import Any

import psutil
import pytest

from ddptrain.errors import DdptrainError, RunLocked, UsageError
from ddptrain.results.remote.lease import LOCK, Claim, Lease, claim_from
from ddptrain.storage.store import Limits, NoConditionalWrites, StoreError, Versioned, WriteConflict
from tests.support.command import wait_until

OTHER = Claim("elsewhere", 7, 0.0, "token", 0.0, machine="elsewhere")


class Conditional:
    """A store with conditional writes, whose clock is at 5,000 s."""

    url = "s3://bucket/r-1"

    def __init__(self) -> None:
        self.file: Versioned | None = None
        self.errors: list[StoreError] = []
        self.is_answer_lost = False
        self.removed: list[str] = []

    def with_limits(self, limits: Limits) -> Conditional:
        return self

    def test_conditions(self, name: str) -> float:
        assert name.startswith(f"{LOCK}.")
        return 5000.0

    def read_versioned(self, name: str) -> Versioned | None:
        return self.file

    def write_versioned(self, name: str, data: bytes, before: Versioned | None) -> Versioned:
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


def test_lease_ends_three_minutes_after_the_last_write_by_the_clock_of_the_store(store: Any) -> None:
    store.put(OTHER, written_s=5000.0 - 175.0)
    with pytest.raises(RunLocked, match="is held by process 7 on elsewhere, last heartbeat 175 s ago; ") as refused:
        Lease(store).take()
    assert refused.value.exit_code == 6
    store.put(OTHER, written_s=5000.0 - 181.0)
    lock = Lease(store)
    assert lock.take().before == OTHER and store.claim.token == lock.claim.token


def test_driver_of_this_host_is_known_to_be_dead_at_once(store: Any) -> None:
    mine = Claim.of_this_process()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    born = psutil.Process(child.pid).create_time()
    store.put(dataclasses.replace(mine, token="x", pid=child.pid, born=born))
    with pytest.raises(RunLocked):
        Lease(store).take()
    child.kill()
    child.wait()
    Lease(store).take()
    # The process id was used again.
    assert mine.is_held(0.0) and not dataclasses.replace(mine, born=mine.born + 2.5).is_held(0.0)


def test_lease_is_renewed_and_its_loss_is_reported_once(store: Any) -> None:
    lock = Lease(store, refresh_s=0.02)
    lock.take()
    lost: list[DdptrainError] = []
    lock.keep(lost.append)
    before = store.file
    wait_until(lambda: store.file is not before)
    store.file = None  # deleted
    wait_until(lambda: store.claim is not None and store.claim.token == lock.claim.token)
    store.is_answer_lost = True
    wait_until(lambda: not store.is_answer_lost)
    before = store.file
    wait_until(lambda: store.file is not before)
    assert not lost
    store.put(OTHER)
    wait_until(lambda: bool(lost))
    with pytest.raises(RunLocked, match="does not hold"):
        lock.assure()
    lock.release()
    assert store.claim == OTHER and [type(error) for error in lost] == [RunLocked]


def test_lease_whose_first_answer_was_lost_is_taken_at_the_second_attempt(store: Any) -> None:
    lock = Lease(store)
    store.is_answer_lost = True
    with pytest.raises(StoreError, match="no answer"):
        lock.take()
    before = lock.take().before
    assert before is not None and before.token == lock.claim.token


def test_forgotten_lock_stays_if_another_driver_has_it(store: Any) -> None:
    lock = Lease(store)
    lock.take()
    store.put(OTHER)
    lock.release(forget=True)
    assert store.removed == [] and store.claim == OTHER


def test_store_without_conditional_writes_is_refused(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_conditions(name: str) -> float:
        raise NoConditionalWrites("the store ignores the conditions of writes")

    store.test_conditions = no_conditions
    with pytest.raises(UsageError, match="s3://bucket/r-1 can't be used: the store ignores the conditions of writes; "):
        Lease(store).take()
    assert store.file is None
