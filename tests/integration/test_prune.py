"""`results prune` with a real S3 server: it is killed on the way, and a driver has a lease."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ddptrain.results.prune import MARK
from ddptrain.results.remote.lease import StoreLock
from ddptrain.results.run_record import RunRecord
from ddptrain.storage.remote_folder import RemoteFolder
from tests.conftest import PATIENCE_S, Cli
from tests.servers.seaweed import seaweed

FILES = 300


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "seaweed").mkdir()
    with seaweed(tmp_path / "seaweed", "bucket") as environment:
        home = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "XDG_STATE_HOME": str(tmp_path / "state")}
        for name, value in (environment | home).items():
            monkeypatch.setenv(name, value)
        yield "s3://bucket/runs"


def put(store: RemoteFolder, run_id: str, day: int, files: int) -> None:
    record = RunRecord(run_id=run_id, name="pets", status="succeeded", started_at=f"2025-01-{day:02}T00:00:00.000Z")
    run = store.below(run_id)
    for number in range(files):
        run.write(f"logs/rank-{number}.log", b"x" * 1000)
    run.write("run.json", record.to_json().encode())


def kill_on_the_way(store: RemoteFolder, run_cli: Cli, arguments: tuple[str, ...]) -> None:
    """Kill a prune once it has deleted old/run.json."""
    killed = run_cli.start(*arguments)
    deadline = time.monotonic() + PATIENCE_S
    while store.read("old/run.json") is not None:
        assert time.monotonic() < deadline
    with suppress(ProcessLookupError):
        os.kill(killed.popen.pid, signal.SIGKILL)
    killed.finish()


def test_run_in_a_store_is_deleted_though_the_first_prune_is_killed(url: str, run_cli: Cli) -> None:
    store = RemoteFolder.open(url)
    put(store, "old", 1, FILES)
    put(store, "live", 2, 1)
    put(store, "new", 3, 1)
    lock = StoreLock(store.below("live"))
    lock.take()
    arguments = ("results", "prune", "--keep", "1", "--runs-dir", url)

    told = run_cli(*arguments, "--dry-run", "--json")
    assert [each["run_id"] for each in json.loads(told.stdout)["removed"]] == ["live", "old"], told.stderr
    for _ in range(10):  # it may have been faster than the kill
        kill_on_the_way(store, run_cli, arguments)
        if left := store.files("old"):
            break
        put(store, "old", 1, FILES)
    assert f"old/{MARK}" in left and len(left) > 2

    listed = run_cli("results", "list", "--runs-dir", url)
    assert "live" in listed.stdout and "new" in listed.stdout and "old" not in listed.stdout
    second = run_cli(*arguments)
    assert second.rc == 0 and "left by an interrupted prune" in second.stdout, second.stderr
    assert "2 runs kept" in second.stdout and "in use" in second.stdout
    assert {path.partition("/")[0] for path in store.files()} == {"live", "new"}
    lock.release()
    assert "1 run deleted" in run_cli(*arguments).stdout
    assert {path.partition("/")[0] for path in store.files()} == {"new"}
