"""`make bench` works at all; its figures are not judged here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.conftest import Cli

REPOSITORY = Path(__file__).parents[2]


def test_bench_measures_the_rows_asked_for(run_cli: Cli, tmp_path: Path) -> None:
    rows = ["help", "burst-wrong-lines", "burst-memory"]
    raw = tmp_path / "raw.json"
    options = ("--quick", "--rows", ",".join(rows), "--json", raw)
    ended = run_cli(*options, cwd=REPOSITORY, program=(sys.executable, "-m", "tests.bench"), timeout_s=100)
    assert ended.rc == 0, ended.stderr
    assert [line.split()[0] for line in ended.stdout.splitlines()[:4]] == ["row", *rows]
    measured = json.loads(raw.read_text())
    assert [(row["row"], row["error"]) for row in measured["rows"]] == [(row, None) for row in rows]
    assert all(row["ours"] for row in measured["rows"])
    assert measured["machine"]["torch"]


def test_bench_names_its_rows_when_one_is_unknown(run_cli: Cli) -> None:
    ended = run_cli("--rows", "speed", cwd=REPOSITORY, program=(sys.executable, "-m", "tests.bench"))
    assert ended.rc == 2
    assert "no such row: speed" in ended.stderr
    assert "first-step-warm-8" in ended.stderr
