"""What `ddptrain stop` says of runs that it can't, or need not, stop."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import pytest

from ddptrain.cli.main import main
from ddptrain.results.remote.lease import LOCK, Claim
from ddptrain.results.run_record import DriverRecord, FailureRecord, RunRecord, RunStatus
from tests.unit.results.stores import serve_folder

RUNNING = RunRecord(run_id="a-run", driver=DriverRecord(7, "far"))


def write(folder: Path, record: RunRecord) -> Path:
    (folder / record.run_id).mkdir(parents=True)
    (folder / record.run_id / "run.json").write_text(record.to_json())
    return folder / record.run_id


def test_run_that_has_ended_says_how(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failure = FailureRecord(message="no such name\nat all")
    write(tmp_path, dataclasses.replace(RUNNING, status=RunStatus.FAILED, exit_code=1, failure=failure))
    assert main(["stop", "a-run", "--runs-dir", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said == "run a-run is not running, it has ended: failed (exit code 1): no such name\n"
    assert main(["stop", "latest", "--runs-dir", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"run_id": "a-run", "status": "failed", "exit_code": 1}


def test_run_that_cannot_be_read_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (write(tmp_path, RUNNING) / "run.json").write_text("{")
    assert main(["stop", "a-run", "--runs-dir", str(tmp_path)]) == 2
    assert "run a-run can't be stopped: cannot read" in capsys.readouterr().err


def test_run_of_a_store_is_stopped_on_its_drivers_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    claim = Claim("far", 7, 0.0, "token", time.time())
    (write(tmp_path / "store", RUNNING) / LOCK).write_text(json.dumps(dataclasses.asdict(claim)))
    assert main(["stop", f"{serve_folder(tmp_path, monkeypatch)}/store/a-run"]) == 2
    assert "run a-run can only be stopped on far, where its driver is process 7" in capsys.readouterr().err
