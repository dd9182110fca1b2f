"""`make bench` works at all; its figures are not judged here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.conftest import Cli

REPOSITORY = Path(__file__).parents[2]
BENCH = (sys.executable, "-m", "tests.bench")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_bench_measures_the_rows_asked_for(run_cli: Cli, tmp_path: Path) -> None:
    raw = tmp_path / "raw.json"
    ended = run_cli(
        "--quick", "--rows", "checkpoint,restart", "--json", raw, cwd=REPOSITORY, program=BENCH, timeout_s=500
    )
    assert ended.rc == 0, ended.stderr
    assert [line.split()[0] for line in ended.stdout.splitlines()[:3]] == ["row", "restart", "checkpoint"]
    measured = json.loads(raw.read_text())
    assert [(row["row"], row["error"]) for row in measured["rows"][:2]] == [("restart", None), ("checkpoint", None)]
    assert all(row["ours"] for row in measured["rows"])


def test_bench_names_its_rows_when_one_is_unknown(run_cli: Cli) -> None:
    ended = run_cli("--rows", "speed", cwd=REPOSITORY, program=BENCH)
    assert ended.rc == 2
    assert "no such row: speed" in ended.stderr
    assert "first-step-warm-8" in ended.stderr
