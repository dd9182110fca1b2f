"""Which runs `results sync` leaves alone: those of a living driver, wherever it is, and those of other users."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import pytest

from ddptrain.driver.tracking.wandb_sync import SyncResult, sync_run
from ddptrain.errors import UsageError
from ddptrain.results.layout import RunLayout
from ddptrain.results.lookup import load_run
from ddptrain.results.run_record import DriverRecord, RunStatus
from ddptrain.results.run_writer import RunWriter


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    """A run that W&B has recorded offline; run.json says that a driver on another host runs it, silent for an hour."""
    with RunWriter.create(tmp_path, "a-run", "n", "", "w") as writer:
        part = writer.layout.tracking_dir / "wandb" / "offline-run-20250101_000000-w1"
        part.mkdir(parents=True)
        (part / "run-w1.wandb").write_bytes(b"recorded")
        writer.update(tracking={"wandb": {"id": "w1", "mode": "offline"}})
        writer.finish(RunStatus.SUCCEEDED, 0)
    driver = DriverRecord(1, "another-host", "another-boot")
    record = dataclasses.replace(writer.record, status=RunStatus.RUNNING, driver=driver)
    writer.layout.run_json.write_text(record.to_json())
    for path in writer.layout.root.iterdir():
        os.utime(path, (time.time() - 3600, time.time() - 3600))
    return writer.layout


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without a key of W&B's."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def sync(layout: RunLayout) -> SyncResult:
    return sync_run(load_run(layout.root), {"HOME": os.environ["HOME"]}, time.monotonic() + 60)


def test_run_of_another_host_is_left_alone_while_its_heart_beats_however_little_it_logs(layout: RunLayout) -> None:
    layout.lock_file.touch()
    assert sync(layout).skipped == "it is running"


@pytest.mark.usefixtures("home")
def test_run_of_another_host_whose_heart_has_stopped_is_sent(layout: RunLayout) -> None:
    layout.lock_file.touch()
    os.utime(layout.lock_file, (1, 1))
    with pytest.raises(UsageError, match="there is no API key"):
        sync(layout)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a run to another user")
def test_run_of_another_user_is_left_alone(layout: RunLayout) -> None:
    os.chown(layout.root, 65534, 65534)
    assert sync(layout).skipped == "it belongs to another user"
    assert not (layout.tracking_dir / "wandb" / ".sync.lock").exists()


@pytest.mark.usefixtures("home")
def test_lock_of_a_sync_is_not_taken_through_a_link(layout: RunLayout, tmp_path: Path) -> None:
    record = dataclasses.replace(load_run(layout.root).record, status=RunStatus.SUCCEEDED, failure=None)
    layout.run_json.write_text(record.to_json())
    (tmp_path / "precious").write_text("precious\n")
    (layout.tracking_dir / "wandb" / ".sync.lock").symlink_to(tmp_path / "precious")
    environ = {"HOME": os.environ["HOME"], "WANDB_API_KEY": "0" * 40}
    sent = sync_run(load_run(layout.root), environ, time.monotonic() + 60)
    assert ".sync.lock" in sent.problem and sent.waiting == 1
    assert (tmp_path / "precious").read_text() == "precious\n"


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (SyncResult("r"), "r: nothing to send to W&B"),
        (SyncResult("r", sent=2), "r: 2 sent to W&B"),
        (SyncResult("r", skipped="it is running"), "r: skipped, it is running"),
        (SyncResult("r", sent=2, waiting=1, problem="refused"), "r: 1 of 3 W&B runs not sent: refused"),
        (SyncResult("r", problem="damaged"), "r: not sent: damaged"),
    ],
)
def test_result_of_a_run_is_one_line(result: SyncResult, expected: str) -> None:
    assert result.summary == expected
