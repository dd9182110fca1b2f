"""`ddptrain results prune`: what it prints, and its exit codes."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from ddptrain.cli.main import main
from ddptrain.model_registry.records import VersionRecord
from ddptrain.model_registry.registry import ModelRegistry
from ddptrain.results.run import Run
from ddptrain.results.run_record import RunRecord

DAY_S = 86_400


def at(days_ago: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - days_ago * DAY_S))


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs that ended 10, 20, 30 and 40 days ago, each of 2,048 bytes; the oldest is the champion's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DDPTRAIN_MODELS_DIR", raising=False)
    for days in (10, 20, 30, 40):
        layout = Run(tmp_path / "runs" / f"pets-{days}")
        layout.root.mkdir(parents=True)
        record = RunRecord(run_id=layout.root.name, name="pets", status="succeeded", started_at=at(days))
        layout.run_json.write_text(record.to_json())
        (layout.root / "data").write_bytes(b"d" * (2048 - layout.run_json.stat().st_size))
    registry = ModelRegistry.open("models")
    version = VersionRecord("", 0, "", "pets-40", "petnames", 1, {}, ())
    registry.promote("names", registry.add_version("names", {"w": b"w"}, version).version)
    return tmp_path / "runs"


def prune(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    code = main(["results", "prune", *options])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_dry_run_and_prune_print_the_same_runs(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = """\
RUN      AGE      SIZE     REASON
pets-20  20 days  2.0 KiB  1 newer successful run
pets-30  30 days  2.0 KiB  1 newer successful run
"""
    kept = "2 runs kept, 4.0 KiB: among the newest 1 successful; champion of names\n"
    would = "2 runs would be deleted, 4.0 KiB would be freed\n"
    assert prune(capsys, "--keep", "1", "--dry-run") == (0, table + would + kept, "")
    assert len(list(runs.iterdir())) == 4
    assert prune(capsys, "--keep", "1") == (0, f"{table}2 runs deleted, 4.0 KiB freed\n{kept}", "")
    assert sorted(path.name for path in runs.iterdir()) == ["pets-10", "pets-40"]
    assert prune(capsys, "--keep", "1")[:2] == (0, f"0 runs deleted, 0 B freed\n{kept}")


def test_age_and_size_limit_what_stays(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "pets-30 " in prune(capsys, "--keep", "0", "--older-than", "25d", "--dry-run")[1]
    assert "pets-20 " not in prune(capsys, "--keep", "0", "--older-than", "25d", "--dry-run")[1]
    code, out, _ = prune(capsys, "--max-size", "1KB")
    assert code == 0 and out.splitlines()[-2:] == [
        "1 run kept, 2.0 KiB: champion of names",
        "this is more than --max-size, 1000 B: the rest is protected",
    ]


def test_json_has_every_run_with_its_reason(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = prune(capsys, "--keep", "3", "--json")
    report = json.loads(out)
    assert (code, err) == (0, "") and report["freed_bytes"] == 0 and report["dry_run"] is False
    assert [(each["run_id"], each["reason"]) for each in report["kept"]][-1] == ("pets-40", "champion of names")
    assert report["removed"] == report["finished"] == report["problems"] == []


def test_other_folder_without_models_is_pointed_out(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = prune(capsys, "--keep", "1", "--models-dir", "other", "--dry-run")
    where = Path("other").absolute()
    assert (code, err) == (
        0,
        f"ddptrain: no run is kept because of a model: {where} has no models (--models-dir names another place)\n",
    )
    assert prune(capsys, "--name", "dogs")[2] == "ddptrain: no runs in runs with the name dogs\n"
    assert main(["results", "--runs-dir", "nowhere", "prune"]) == 0
    assert capsys.readouterr().err == "ddptrain: no runs in nowhere\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--older-than", "30"],
            'error: --older-than: the text "30" is not a duration: write a number with s, m, h, d',
        ),
        (
            ["--max-size", "much"],
            'error: --max-size: the text "much" is not a size: write a number with KB, MB, GB or TB',
        ),
        (["--keep", "-1"], '--keep: must be greater than or equal to 0, got "-1"'),
        (["--keep", "few"], '--keep: must be a valid integer, got "few"'),
        (["--runs-dir", "ftp:///"], "error: cannot keep runs in ftp:///"),
    ],
)
def test_wrong_option_deletes_nothing(
    runs: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    code, out, err = prune(capsys, "--keep", "0", *options)
    assert (code, out) == (2, "") and message in err
    assert len(list(runs.iterdir())) == 4


def test_damaged_registry_deletes_nothing(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = max(Path("models/names/history").iterdir())
    newest.write_text("{")
    code, out, err = prune(capsys, "--keep", "0")
    assert (code, out) == (4, "") and f"{newest} is damaged" in err and err.count("\n") == 1
    assert len(list(runs.iterdir())) == 4
