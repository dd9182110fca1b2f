from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ddptrain.cli.main import app
from ddptrain.protocol.events import Metrics
from ddptrain.results.run_record import FailureRecord, RunStatus
from ddptrain.results.run_writer import RunWriter

# Through the package's own entry point, so that errors become exit codes as they do for a person.
COMMAND = [sys.executable, "-m", "ddptrain", "results"]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runs folder with a run that failed, in the working directory."""
    monkeypatch.chdir(tmp_path)
    with RunWriter.create(Path("runs"), "pets-1", "pets", "", "petnames", world_size=2) as writer:
        for step in (1, 2, 3):
            for rank in (0, 1):
                writer.add_metrics([Metrics(0, {"train/loss": 3 / step + rank}, step)], rank)
        (writer.layout.artifacts_dir / "names.json").write_text("[]")
        for rank in (0, 1):
            writer.layout.log(rank).write_bytes(f"hello from {rank}\nbye".encode())
        failure = FailureRecord(1, "h", "exception", "ValueError", "no [bold]name", "", "logs/rank-1.log")
        writer.finish(RunStatus.FAILED, 1, failure)
    return tmp_path / "runs"


@pytest.fixture
def under_way(tmp_path: Path) -> Iterator[RunWriter]:
    """A run that this process runs."""
    with RunWriter.create(tmp_path / "runs", "live-1", "live", "", "petnames", world_size=1) as writer:
        yield writer
        writer.finish(RunStatus.SUCCEEDED, 0)


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["results", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_json_is_all_there_is_on_stdout(runs: Path) -> None:
    (listed,) = json.loads(invoke("--json"))
    assert listed == json.loads(invoke("list", "--json"))[0]
    assert (listed["run_id"], listed["status"], listed["run_dir"]) == ("pets-1", "failed", "runs/pets-1")
    shown = json.loads(invoke("show", "latest", "--json"))
    assert shown["artifacts"] == [{"path": "names.json", "size_bytes": 2}]
    assert shown["logs"]["1"].endswith("rank-1.log")
    assert shown["last_metrics"] == {"train/loss": 1.5}, "the mean of two ranks"
    drawn = json.loads(invoke("compare", "pets-1", "--json"))
    assert [(row["name"], row["rank"]) for row in drawn["series"]] == [
        ("train/loss", 0),
        ("train/loss", 1),
        ("train/loss", "mean"),
    ]
    assert runs.exists()


def test_json_of_a_sync_of_all_is_one_list_and_that_of_a_run_is_one_object(runs: Path) -> None:
    assert json.loads(invoke("sync", "--all", "--json")) == []
    for name in ("pets-2", "pets-3"):
        with RunWriter.create(runs, name, "pets", "", "petnames") as writer:
            writer.update(tracking={"wandb": {"id": name}})
            writer.finish(RunStatus.SUCCEEDED, 0)
    came = json.loads(invoke("sync", "--all", "--json"))
    assert {each["run_id"]: each["sent"] for each in came} == {"pets-2": 0, "pets-3": 0}
    assert json.loads(invoke("sync", "pets-2", "--json"))["waiting"] == 0


def test_following_ends_with_the_run(under_way: RunWriter, tmp_path: Path) -> None:
    log = under_way.layout.log(0)
    log.write_bytes(b"first\n")
    with subprocess.Popen(
        [*COMMAND, "logs", "latest", "--follow"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as following:
        assert following.stdout is not None
        assert following.stdout.readline() == "first\n"
        with log.open("ab") as file:
            file.write(b"last words")
        under_way.finish(RunStatus.SUCCEEDED, 0)
        assert following.stdout.read() == "last words\n"
    assert following.returncode == 0


def test_control_c_ends_following_quietly(under_way: RunWriter, tmp_path: Path) -> None:
    under_way.layout.log(0).write_bytes(b"first\n")
    with subprocess.Popen(
        [*COMMAND, "logs", "latest", "--follow"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as following:
        assert following.stdout is not None
        assert following.stdout.readline() == "first\n"
        following.send_signal(signal.SIGINT)
        stdout, stderr = following.communicate(timeout=60)
    assert (following.returncode, stdout, stderr) == (130, "", "")


def test_a_reader_that_goes_ends_following_quietly(under_way: RunWriter, tmp_path: Path) -> None:
    under_way.layout.log(0).write_bytes(b"first\n")
    with subprocess.Popen(
        [*COMMAND, "logs", "latest", "--follow"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as following:
        assert following.stdout is not None and following.stderr is not None
        assert following.stdout.readline() == b"first\n"
        following.stdout.close()
        assert following.wait(60) == 141
        assert following.stderr.read() == b""


def test_head_takes_what_it_wants_of_a_long_log(under_way: RunWriter, tmp_path: Path) -> None:
    under_way.layout.log(0).write_bytes(b"line\n" * 100_000)
    shell = f"{sys.executable} -m ddptrain results logs latest | head -n 2"
    done = subprocess.run(["sh", "-c", shell], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("line\nline\n", "")


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_a_terminal_gets_colours_unless_told_not_to(runs: Path, no_color: str, coloured: bool) -> None:
    leader, follower = os.openpty()
    environment = {**os.environ, "NO_COLOR": no_color, "TERM": "xterm-256color", "COLUMNS": "100"}
    for command in (["list"], ["show", "latest"]):
        subprocess.run([*COMMAND, *command], cwd=runs.parent, env=environment, stdout=follower, check=True, timeout=60)
        said = os.read(leader, 1 << 16).decode()
        assert "pets-1" in said
        codes = ("\x1b[3", "\x1b[1m") if coloured else ("\x1b[3",)
        assert any(code in said for code in codes) == coloured
    os.close(leader)
    os.close(follower)
