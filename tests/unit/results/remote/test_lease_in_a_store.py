"""The lock of a run in an object store: one driver at a time, whatever host names and clocks say."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddptrain.errors import DdptrainError, RunLocked, UsageError
from ddptrain.results.remote import lease as remote_lock
from ddptrain.results.remote.lease import LOCK, Claim, Lease, claim_from
from ddptrain.results.remote.uploader import Uploader
from ddptrain.storage.object_store import ObjectStore, open_folder
from tests.servers.s3server import s3_server
from tests.servers.seaweed import seaweed

PATIENCE_S = 60.0
ACQUISITIONS = 1000
# A driver among several: it takes the lock again and again; a file that it alone may make says that it has it.
_OWNER = """
import os, sys, threading
from ddptrain.errors import RunLocked
from ddptrain.storage.object_store import ObjectStore, open_folder
from ddptrain.results.remote.lease import Lease

url, inside, share, threads = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
taken, refused, doubles = [], [], []


def take_often():
    lock = Lease(open_folder(url))
    while len(taken) < share:
        try:
            lock.take()
        except RunLocked:
            refused.append(lock)
            continue
        try:
            os.close(os.open(inside, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            doubles.append(lock.claim.token)
        else:
            os.unlink(inside)
        taken.append(lock.claim.token)
        lock.release()


crowd = [threading.Thread(target=take_often) for _ in range(threads)]
[each.start() for each in crowd]
[each.join() for each in crowd]
print(len(taken), len(refused), len(doubles))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with seaweed(tmp_path_factory.mktemp("seaweed"), "bucket") as found:
        yield found


@pytest.fixture
def store(environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """A folder of its own in a store that keeps conditions."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return replace(open_folder(f"s3://bucket/{tmp_path.name}"), pauses_s=(0.0,))


def there(store: ObjectStore) -> Claim:
    claim = claim_from(store.read(LOCK))
    assert claim is not None
    return claim


def write_claim(store: ObjectStore, **changes: Any) -> None:
    claim = replace(Claim.of_this_process(), **changes)
    store.write(LOCK, json.dumps(dataclasses.asdict(claim)).encode())


@pytest.mark.slow
def test_of_many_that_want_it_only_one_has_it(store: ObjectStore, environment: dict[str, str], tmp_path: Path) -> None:
    processes, threads = 2, 2
    words = [store.url, str(tmp_path / "inside"), str(ACQUISITIONS // processes), str(threads)]
    owners = [
        subprocess.Popen(
            [sys.executable, "-c", _OWNER, *words], stdout=subprocess.PIPE, env={**os.environ, **environment}
        )
        for _ in range(processes)
    ]
    said = [[int(number) for number in owner.communicate(timeout=200)[0].split()] for owner in owners]
    taken, refused, doubles = (sum(numbers) for numbers in zip(*said, strict=True))
    assert taken >= ACQUISITIONS and refused > 0, "they were in each other's way"
    assert doubles == 0


def test_host_names_and_clocks_of_hosts_do_not_matter(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    # A container on another host, which is called as this one, and whose process ids mean nothing here; its clock is
    # slow by an hour, and one that asks has a clock that is fast by an hour.
    hour_s = 3600.0
    write_claim(store, machine="another boot pid:[1]", pid=2**22, time_s=time.time() - hour_s)
    late = Lease(store)
    with pytest.raises(RunLocked, match=r"last heartbeat \d s ago"):
        late.take()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + hour_s)
    with pytest.raises(RunLocked):
        Lease(store).take()


def test_owner_that_has_slept_notices_that_its_lease_is_gone_and_writes_nothing_more(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = Lease(store, refresh_s=PATIENCE_S * 10)  # no thread of its own tells it
    owner.take()
    lost: list[DdptrainError] = []
    root = tmp_path / "run"
    root.mkdir()
    (root / "notes").write_text("first")
    (root / "run.json").write_text("{}")
    uploads = Uploader(replace(store, guard=owner.assure), root)
    owner.keep(uploads.lose)
    with closing(uploads):
        uploads.begin(lambda text: None, lost.append)
        assert uploads.flush(PATIENCE_S) == ""
        assert store.read("notes") == b"first"
        # Meanwhile, by the store's clock, the lease has ended, and another driver has taken the run.
        monkeypatch.setattr(remote_lock, "STALE_S", -1.0)
        heir = Lease(store)
        heir.take()
        elapsed_s = remote_lock._elapsed_s()
        monkeypatch.setattr(remote_lock, "_elapsed_s", lambda: elapsed_s + 200.0)
        (root / "notes").write_text("second, too late")
        assert "is held by process" in uploads.flush(PATIENCE_S)
    assert [type(error) for error in lost] == [RunLocked]
    assert store.read("notes") == b"first"
    with pytest.raises(RunLocked):
        owner.assure()
    owner.release()
    assert (there(store).token, there(store).released) == (heir.claim.token, False)


def test_store_that_ignores_conditions_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server(tmp_path) as server:
        (server.buckets / "bucket").mkdir()
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        store = open_folder("s3://bucket/run")
        with pytest.raises(UsageError, match="ignores the conditions of writes; runs need a store with conditional"):
            Lease(store).take()
        assert not store.files(), "the object of the test is deleted"
