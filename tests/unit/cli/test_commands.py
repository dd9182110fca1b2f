"""Commands that read, explain or write files and start nothing."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ddptrain.cli.explain import titles
from ddptrain.cli.main import app, main
from ddptrain.config.load import load_config
from ddptrain.errors import ExitCode, RunNotFound, UsageError
from ddptrain.results.remote.lease import LOCK, Claim
from ddptrain.results.run_record import DriverRecord, FailureRecord, RunRecord, RunStatus
from ddptrain.results.sweep_record import SweepRecord, TrialRecord, TrialState
from tests.unit.results.stores import serve_folder

# --- `ddptrain explain`: exit codes and runs ---


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
    failure = FailureRecord(rank=1, host="vm", type="ValueError", message="31 samples\nmore")
    ended = RunRecord(run_id="r-1", status="failed", exit_code=1, failure=failure, checkpoints=("step-20", "step-10"))
    write(tmp_path / "runs", ended)
    place = f"--runs-dir {tmp_path}/runs"
    assert main(["explain", "latest", *place.split()]) == 0
    out = capsys.readouterr().out
    assert out.startswith("run r-1 failed (exit code 1)\n\nroot cause:\n  rank 1 on vm: ValueError: 31 samples\n")
    assert f"\n  ddptrain results logs r-1 --rank 1 {place}\n" in out
    assert "\n  the same command again, with --resume r-1 (continues from step-20)\n\nexit code 1: " in out
    assert main(["explain", "latest", *place.split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["root_cause"] == "rank 1 on vm: ValueError: 31 samples"


# --- `ddptrain init`: files to start from, never in the place of others ---


def test_files_are_written_and_make_a_valid_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "my demo"
    assert main(["init", str(folder)]) == 0
    assert {path.name for path in folder.iterdir()} == {"train.yaml", "train.py", ".gitignore", "ddptrain.schema.json"}
    config = load_config(folder / "train.yaml").config
    assert config.workload == "train:train" and config.name == "train"
    assert "my demo' && ddptrain train train.yaml" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("workload", "name", "runs"),
    [
        ("function", "train.yaml", "train:train"),
        ("script", "train.yaml", "train.py"),
        ("images", "images.yaml", "images"),
        ("petnames", "petnames.yaml", "petnames"),
    ],
)
def test_each_workload_is_a_valid_configuration_with_a_schema(
    tmp_path: Path, workload: str, name: str, runs: str
) -> None:
    assert main(["init", str(tmp_path), "--workload", workload]) == 0
    assert load_config(tmp_path / name).config.workload_name == runs
    assert (tmp_path / name).read_text().startswith("# yaml-language-server: $schema=ddptrain.schema.json\n")
    assert "properties" in json.loads((tmp_path / "ddptrain.schema.json").read_text())
    assert (tmp_path / ".gitignore").is_file()


@pytest.mark.parametrize("name", ["train.yaml", "train.py", ".gitignore"])
def test_nothing_is_overwritten(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / name).write_text("mine")
    assert main(["init", str(tmp_path)]) == 2
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "mine")]
    assert f"has {name} already" in capsys.readouterr().err


def test_folder_that_cannot_be_made_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["init", str(tmp_path / "file" / "demo")]) == 2
    assert "cannot write into" in capsys.readouterr().err


# --- `ddptrain doctor`: its output and exit code ---


# --- `ddptrain results report`: what it writes, and about what ---


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "runs", "a-1", "succeeded", "2026-01-01T00:00:00Z")
    return tmp_path / "runs"


def put(runs: Path, name: str, status: str, started: str) -> None:
    (runs / name).mkdir(parents=True, exist_ok=True)
    (runs / name / "run.json").write_text(RunRecord(run_id=name, status=status, started_at=started).to_json())


def put_sweep(runs: Path, name: str, started: str) -> None:
    put(runs / name, f"{name}-0000", "succeeded", started)
    (runs / name / "run.json").write_text(json.dumps({"run_id": name, "kind": "sweep", "status": "succeeded"}))
    trial = TrialRecord(0, {}, TrialState.COMPLETE, 1.0, run_ids=[f"{name}-0000"])
    SweepRecord(name, "s", "s.yaml", started, trials=[trial]).save(runs / name)


def report(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["results", "report", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_latest_run_and_its_page(runs: Path) -> None:
    data = json.loads(report("--json"))
    page = Path("a-1.html").read_bytes()
    assert data == {
        "file": str(runs.parent / "a-1.html"),
        "size_bytes": len(page),
        "runs": ["a-1"],
        "sweep": None,
    }
    assert page.startswith(b"<!DOCTYPE html>") and b"<title>Run a-1</title>" in page


@pytest.mark.parametrize(("started", "is_newest"), [("2026-01-02T00:00:00Z", True), ("2025-12-31T00:00:00Z", False)])
def test_latest_is_a_sweep_if_that_is_newer(runs: Path, started: str, is_newest: bool) -> None:
    put_sweep(runs, "s-1", started)
    data = json.loads(report("--json"))
    assert (data["sweep"], data["runs"]) == (("s-1", ["s-1-0000"]) if is_newest else (None, ["a-1"]))


def test_latest_is_the_sweep_where_there_is_no_other_run(runs: Path) -> None:
    (runs / "a-1" / "run.json").unlink()
    put_sweep(runs, "s-1", "2025-12-31T00:00:00Z")
    assert json.loads(report("latest", "--json"))["sweep"] == "s-1"


def test_wrong_names_and_files_write_nothing(runs: Path) -> None:
    for arguments, error in ((["nope"], RunNotFound), (["-o", "-"], UsageError), (["-o", "runs"], UsageError)):
        with pytest.raises(error):
            report(*arguments)
    assert list(runs.parent.glob("*.html")) == []


# --- What `ddptrain stop` says of runs that it can't, or need not, stop ---


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


# --- Packages of extras ---


@pytest.mark.parametrize(
    ("package", "arguments"),
    [
        ("optuna", "sweep c.yaml"),
        ("apprise", "retrain c.yaml"),
        ("apprise", "notify test c.yaml"),
    ],
)
def test_command_that_lacks_the_package_of_an_extra_names_the_pip_command(
    runs: Path, package: str, arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "workload": "petnames",
        "retrain": {"model": "m"},
        "notify": {"urls": ["json://127.0.0.1"]},
        "sweep": {"space": {"params.layers": [1, 2]}, "search": "grid"},
    }
    Path("c.yaml").write_text(json.dumps(config))
    row = {"time_s": 1.0, "step": 1, "epoch": 1.0, "rank": 0, "attempt": 1, "loss": 3.0}
    (runs / "a-1" / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.setitem(sys.modules, package, None)
    assert main(arguments.split()) == ExitCode.USAGE
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith(f"ddptrain: error: this needs {package}: pip install '")
    assert not list(Path().glob("runs/petnames*")) and not Path("models").exists()
