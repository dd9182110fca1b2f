"""`ddptrain explain`: exit codes and runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddptrain.cli.explain import titles
from ddptrain.cli.main import main
from ddptrain.errors import ExitCode


def test_every_exit_code_has_a_title_and_a_page() -> None:
    found = titles()
    assert {int(code) for code in ExitCode} | {137, 141} == set(found)
    assert all(page for code, (_, page) in found.items() if code)


def test_page_of_a_code_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "5"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("exit code 5: hang: no progress in time\n")
    assert "\n- nothing is wrong: a step takes longer than the limit\n  -> failure.hang_timeout_s: 1800" in printed
    assert main(["explain", "8"]) == 0  # whose page has other codes, too
    assert "champion" not in capsys.readouterr().out
    assert main(["explain", "75", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["exit_code"] == 75
    assert main(["explain", "999"]) == main(["explain", "99"]) == 2
    assert main(["explain", "139"]) == 0  # SIGSEGV


def test_run_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "runs" / "r-1"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text('{"run_id": "r-1", "status": "failed", "exit_code": 4}')
    assert main(["explain", "latest", "--runs-dir", str(tmp_path / "runs")]) == 0
    out = capsys.readouterr().out
    assert "run r-1 failed (exit code 4)" in out and "ddptrain explain 4 (likely causes, and what to do)" in out
    assert f"ddptrain results show r-1 --runs-dir {tmp_path}/runs" in out
