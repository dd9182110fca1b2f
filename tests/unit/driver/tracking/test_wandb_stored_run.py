"""What is sent of a run in an object store: only what waits is fetched, and what has become of it is written there."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddptrain.driver.tracking import wandb_stored_run, wandb_sync
from ddptrain.driver.tracking.wandb_stored_run import StoredWandbRun
from ddptrain.driver.tracking.wandb_sync import SyncResult, sync_run
from ddptrain.results.checkpoints.retention import CheckpointPolicy
from ddptrain.results.layout import RunLayout
from ddptrain.results.lookup import RunView
from ddptrain.results.remote.lease import LOCK, Claim
from ddptrain.results.remote.local_copy import Origin
from ddptrain.results.remote.upload import StoreUpload
from ddptrain.results.run_record import RunRecord
from ddptrain.results.run_writer import RunWriter
from ddptrain.results.tracker_records import wandb_parts
from ddptrain.storage.remote_folder import RemoteFolder
from ddptrain.tracking.wandb import transaction_log
from ddptrain.tracking.wandb.wandb_folders import CHECKPOINT_TYPE, OPEN, SENT, unsent_parts
from tests.unit.results.conftest import Stage, stage, writer
from tests.unit.results.stores import WatchedFs, watched_store

__all__ = ["stage", "writer"]

WANDB = "tracking/wandb"
ONE, TWO = (f"{WANDB}/run-20250101_00000{number}-w{number}" for number in (1, 2))
STAGING = f"{WANDB}/data/artifacts/staging"


def log_with(tmp_path: Path, **artifacts: list[str]) -> bytes:
    """A log with an artifact of each of these types, made from files of these names."""
    from wandb.proto import wandb_internal_pb2

    record_of: Any = wandb_internal_pb2.Record  # type: ignore[attr-defined]
    made = [record_of(run={"run_id": "w1"})]
    for kind, paths in artifacts.items():
        contents = [{"path": Path(path).name, "digest": "1", "local_path": path} for path in paths]
        made.append(record_of(artifact={"type": kind, "name": kind, "manifest": {"contents": contents}}))
    transaction_log.write(tmp_path / "log", (record.SerializeToString() for record in made))
    return (tmp_path / "log").read_bytes()


@pytest.fixture
def stored(tmp_path: Path, stage: Stage) -> tuple[RemoteFolder, WatchedFs]:
    """A run of two W&B runs that were online, the second of which was killed; and two checkpoints."""
    store, fs = watched_store()
    with RunWriter.create(tmp_path / "runs", "a-run", "n", "name: n\n", "w") as writer:
        for step in (1, 2):
            event, folder = stage(step, {"val/loss": 1.0})
            writer.adopt_checkpoint(0, event, folder, CheckpointPolicy(keep=3, metric="val/loss", mode="min"))
        uploads = StoreUpload(store, writer.layout.root)
        uploads.begin()
        assert uploads.flush(60) == ""
    uploads.close(60)
    log = log_with(tmp_path, **{CHECKPOINT_TYPE: ["/gone/step-2/model.safetensors"], "dataset": ["/gone/tmpx"]})
    files = {f"{ONE}/run-w1.wandb": log, f"{ONE}/unsent": SENT.encode(), f"{ONE}/files/a": b"1"}
    files |= {f"{TWO}/run-w2.wandb": log, f"{TWO}/unsent": OPEN.encode(), f"{TWO}/files/b": b"2"}
    files |= {f"{STAGING}/tmpx": b"3", f"{STAGING}/tmpy": b"4", f"{WANDB}/cache/c": b"5", f"{WANDB}/../up": b"6"}
    for path, data in files.items():
        store.write(path, data)
    return store, fs


def contents(folder: Path) -> dict[str, bytes]:
    """Of the files that are not empty."""
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {path: data for path, data in found.items() if data}


def test_only_what_waits_is_fetched_and_only_how_it_stands_goes_back(
    stored: tuple[RemoteFolder, WatchedFs], tmp_path: Path
) -> None:
    store, fs = stored
    stored_run = StoredWandbRun(store, tmp_path / "borrowed")
    stored_run.refresh()
    assert contents(stored_run.layout.root) == {f"{ONE}/unsent": b"sent", f"{TWO}/unsent": b"open"}
    (part,) = unsent_parts(wandb_parts(stored_run.layout, RunRecord(run_id="a-run")))
    assert part.folder == stored_run.layout.root / TWO
    with pytest.raises(TimeoutError):
        stored_run.fetch([part], time.monotonic() - 1)
    stored_run.fetch([part], time.monotonic() + 100)
    there = contents(stored_run.layout.root)
    assert {f"{TWO}/files/b", f"{TWO}/run-w2.wandb", f"{STAGING}/tmpx"} <= there.keys()
    assert not {f"{ONE}/files/a", f"{STAGING}/tmpy", f"{WANDB}/cache/c"} & there.keys()
    assert there["checkpoints/step-2/model.safetensors"] == b"w" * 1000
    assert not (stored_run.layout.checkpoints_dir / "step-1").exists()

    fs.writes.clear()
    part.log.with_suffix(".wandb.synced").touch()
    (stored_run.layout.root / WANDB / "links.json").write_text("{}")
    stored_run.upload_states()
    assert sorted(path.partition("/tracking/")[2] for path in fs.writes) == [
        "wandb/links.json",
        f"{TWO.removeprefix('tracking/')}/run-w2.wandb.synced",
    ]
    stored_run.refresh()
    assert not unsent_parts(wandb_parts(stored_run.layout, RunRecord(run_id="a-run")))


def test_checkpoints_are_not_fetched_after_the_time_limit(
    stored: tuple[RemoteFolder, WatchedFs], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored_run = StoredWandbRun(stored[0], tmp_path / "borrowed")
    stored_run.refresh()
    (part,) = unsent_parts(wandb_parts(stored_run.layout, RunRecord(run_id="a-run")))
    fetched: list[str] = []
    clock = SimpleNamespace(monotonic=lambda: float(len(fetched)))
    fetch = stored[0].fetch

    def take(path: str, target: Path) -> None:
        fetched.append(path)
        fetch(path, target)

    monkeypatch.setattr(wandb_stored_run, "time", clock)
    monkeypatch.setattr(stored_run, "store", SimpleNamespace(fetch=take))
    with pytest.raises(TimeoutError):
        stored_run.fetch([part], 2.0)
    assert sorted(fetched) == sorted([f"{TWO}/run-w2.wandb", f"{TWO}/files/b", f"{STAGING}/tmpx"])


@pytest.fixture
def view(stored: tuple[RemoteFolder, WatchedFs], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunView:
    """The run as readers have it."""
    monkeypatch.setattr(wandb_sync, "RemoteFolder", type("Opened", (), {"open": staticmethod(lambda url: stored[0])}))
    (tmp_path / "copy").mkdir()
    Origin(stored[0].url).mark(tmp_path / "copy")
    tracking = {"wandb": {"id": "w1", "base_url": "https://w.example"}}
    return RunView(RunLayout(tmp_path / "copy"), RunRecord(run_id="a-run", status="failed", tracking=tracking))


def came_of(view: RunView, environ: dict[str, str]) -> SyncResult:
    return sync_run(view, environ, time.monotonic() + 60)


def test_key_of_the_shell_goes_to_no_server_that_only_the_store_names(view: RunView) -> None:
    came = came_of(view, {"WANDB_API_KEY": "k" * 40})
    assert came.summary == (
        "a-run: 1 of 1 W&B runs not sent: they are for https://w.example: set WANDB_BASE_URL=https://w.example "
        "if your key is to go there"
    )


def test_run_that_another_machine_is_sending_is_left_alone(
    view: RunView, stored: tuple[RemoteFolder, WatchedFs]
) -> None:
    claim = dataclasses.replace(Claim.of_this_process(), host="elsewhere")
    stored[0].write(f"{WANDB}/{LOCK}", json.dumps(dataclasses.asdict(claim)).encode())
    environ = {"WANDB_API_KEY": "k" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    assert came_of(view, environ).skipped == "another process is sending it"


def test_store_that_is_away_is_told_as_what_could_not_be_sent(
    view: RunView, stored: tuple[RemoteFolder, WatchedFs]
) -> None:
    stored[1].errors = [OSError("away")] * 3
    came = came_of(view, {})
    assert "a-run: not sent: memory://" in came.summary and "can't be listed: away" in came.summary
