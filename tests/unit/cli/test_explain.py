"""`ddptrain explain`: exit codes and runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddptrain.cli.main import main


def test_code_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "5"]) == 0
    assert capsys.readouterr().out.startswith("exit code 5: hang: no progress in time\n")
    assert main(["explain", "75", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["exit_code"] == 75
    assert main(["explain", "999"]) == 2
    assert "999 is not an exit code: exit codes are 0 to 255" in capsys.readouterr().err
    assert main(["explain", "99"]) == 2
    assert "99 is not an exit code of ddptrain; its exit codes: 0, 1, 2, 3, 4, 5" in capsys.readouterr().err
    assert main(["explain", "139"]) == 0  # SIGSEGV


def test_run_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "runs" / "r-1"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text('{"run_id": "r-1", "status": "failed", "exit_code": 4}')
    assert main(["explain", "latest", "--runs-dir", str(tmp_path / "runs")]) == 0
    out = capsys.readouterr().out
    assert "run r-1 failed (exit code 4: cluster or infrastructure)" in out
    assert f"ddptrain results show r-1 --runs-dir {tmp_path}/runs" in out
