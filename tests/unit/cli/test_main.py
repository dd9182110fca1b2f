"""The top-level handler: every error becomes one message and one exit code."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import typer

import ddptrain
from ddptrain.cli import main as cli
from ddptrain.errors import (
    DdptrainError,
)

Handle = Callable[[Callable[[], object]], int]


@pytest.fixture
def handle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Handle:
    """Runs main() on an app whose one command is the given function."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def run(command: Callable[[], object]) -> int:
        app = typer.Typer(result_callback=cli._leave_with, rich_markup_mode=None)
        app.callback()(lambda: None)
        app.command("go")(command)
        monkeypatch.setattr(cli, "app", app)
        return cli.main(["go"])

    return run


def raising(error: BaseException) -> Callable[[], NoReturn]:
    def command() -> NoReturn:
        raise error

    return command


@pytest.mark.parametrize("error", [ValueError("so wrong"), DdptrainError("so wrong"), OSError(5, "so wrong")])
def test_unexpected_exception_is_one_line_and_a_file_that_only_the_user_reads(
    handle: Handle, capsys: pytest.CaptureFixture[str], tmp_path: Path, error: Exception
) -> None:
    assert handle(raising(error)) == 3
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "so wrong" in err
    (log,) = (tmp_path / "state" / "ddptrain").iterdir()
    assert f"the details are in {log}" in err
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    text = log.read_text()
    assert f"ddptrain {ddptrain.__version__}" in text and "Traceback" in text and "so wrong" in text


def test_crash_log_goes_to_the_temporary_folder_where_there_is_no_home(
    handle: Handle, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(blocked))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert handle(raising(ValueError("so wrong"))) == 3
    (log,) = tmp_path.glob("crash-*.log")
    assert str(log) in capsys.readouterr().err


# --- the real command ---


def ddptrain_(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ddptrain", *args],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **env},
    )


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_lists_the_commands(option: str) -> None:
    done = ddptrain_(option)
    assert (done.returncode, done.stderr) == (0, "")
    for command in ("train", "generate", "results", "init"):
        assert re.search(rf"^  {command}  +\S", done.stdout, re.MULTILINE), done.stdout


def test_help_loads_none_of_the_heavy_packages() -> None:
    code = (
        "import sys; from ddptrain.cli.main import main; code = main(['--help'])\n"
        "heavy = {'torch', 'dask', 'distributed', 'pydantic', 'rich', 'numpy', 'yaml'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_reader_that_goes_away_is_no_error_of_ours() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "ddptrain", "init", "--schema"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    ) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("options", [[], ["-u"]])
def test_full_disk_under_stdout_is_reported_once(options: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, *options, "-m", "ddptrain", "--version"], stdout=full, stderr=subprocess.PIPE, timeout=60
        )
    assert done.returncode == 4
    assert done.stderr == b"ddptrain: error: standard output, or a file, can't be written: No space left on device\n"


@pytest.mark.parametrize("words", ["--version", "explain 1", "explain 1 <&-"])
def test_closed_stdout_is_no_error(words: str) -> None:
    script = f"exec {sys.executable} -m ddptrain {words} >&-"
    done = subprocess.run(["sh", "-c", script], stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_closed_streams_are_opened_for_this_process_and_its_children() -> None:
    code = "import os; print([os.readlink(f'/proc/self/fd/{n}') for n in (0, 1, 2)], file=open(os.environ['OUT'], 'w'))"
    script = f"""import os, subprocess, sys; from ddptrain.__main__ import _open_closed_streams as opened; opened()
print(sys.stdin.read(), file=sys.stderr); subprocess.run([sys.executable, "-c", {code!r}], check=True)"""
    with tempfile.NamedTemporaryFile("r") as out:
        subprocess.run(
            ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, script],
            env={**os.environ, "OUT": out.name},
            check=True,
            timeout=60,
        )
        assert out.read() == "['/dev/null', '/dev/null', '/dev/null']\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completes_commands(shell: str) -> None:
    asked = {
        "_DDPTRAIN_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": "ddptrain tr",
        "COMP_CWORD": "1",
        "_TYPER_COMPLETE_ARGS": "ddptrain tr",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    done = ddptrain_(**asked)
    assert (done.returncode, done.stderr) == (0, "")
    assert "train" in done.stdout and "generate" not in done.stdout


def test_completion_script_is_shown_for_the_shell_that_asks() -> None:
    script = f"{sys.executable} -m ddptrain --show-completion; exit $?"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "_DDPTRAIN_COMPLETE=complete_bash" in done.stdout


def test_rank_context_is_there_for_user_code_and_costs_nothing_before() -> None:
    code = "import sys, ddptrain; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
    assert ddptrain.RankContext.__module__ == "ddptrain.rank.context"
