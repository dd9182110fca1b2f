"""The requests of shells, and the answers in their forms."""

from __future__ import annotations

import os
import pty
import resource
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddptrain.completion import shells

COMMAND = str(Path(sys.executable).with_name("ddptrain"))
MOST_CPU_S = 0.15


@pytest.mark.parametrize(
    ("words", "cword", "expected"),
    [
        ("ddptrain\ntrain\npet", "2", (["train"], "pet")),
        ("ddptrain\ntrain\n", "2", (["train"], "")),
        ("ddptrain\ntrain\nx\n--set\nparams.lr\n=", "5", (["train", "x", "--set"], "params.lr=")),
        ("ddptrain\ntrain\nx\n--set\nparams.lr\n=\n0", "6", (["train", "x", "--set"], "params.lr=0")),
        ("ddptrain\ngenerate\npets\n@c", "3", (["generate"], "pets@c")),
        ("ddptrain\ntrain\n'my\nother", "2", (["train"], "my")),
        ("ddptrain", "1", ([], "")),
        ("ddptrain tr", "1", ([], "tr")),
    ],
)
def test_words_that_bash_has_split_are_joined(words: str, cword: str, expected: tuple[list[str], str]) -> None:
    assert shells.bash_words({"COMP_WORDS": words, "COMP_CWORD": cword}) == expected


def said(capsys: pytest.CaptureFixture[str], **environment: str) -> tuple[int, str]:
    code = shells.answer(environment)
    return code, capsys.readouterr().out


def test_bash_gets_only_the_part_that_it_replaces(capsys: pytest.CaptureFixture[str]) -> None:
    asked = {"_DDPTRAIN_COMPLETE": "complete_bash", "COMP_CWORD": "5"}
    words = "ddptrain\ntrain\npetnames\n--set\ncheckpoint.mode\n="
    assert said(capsys, COMP_WORDS=words, **asked) == (0, "min\nmax\n")
    # Two candidates for a value that is free: bash adds no space after their common part.
    asked["COMP_CWORD"] = "4"
    words = "ddptrain\ntrain\npetnames\n--set\nparams.epo"
    assert said(capsys, COMP_WORDS=words, **asked) == (0, "params.epochs=\nparams.epochs=VALUE\n")


def test_zsh_gets_commands_and_fish_lines(capsys: pytest.CaptureFixture[str]) -> None:
    asked = {"_DDPTRAIN_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "ddptrain train x --output l"}
    assert said(capsys, **asked) == (0, "local -a found; found=('live'); _describe ddptrain found;\n")
    asked["_TYPER_COMPLETE_ARGS"] = "ddptrain train x --set checkpoint.kee"
    assert said(capsys, **asked)[1].endswith("_describe ddptrain found -S '';\n")
    asked["_TYPER_COMPLETE_ARGS"] = "ddptrain run train.py "
    assert said(capsys, **asked) == (0, "_files\n")
    asked = {"_DDPTRAIN_COMPLETE": "complete_fish", "_TYPER_COMPLETE_ARGS": "ddptrain tra"}
    assert said(capsys, **asked) == (0, "train\tTrain what a YAML file describes.\n")
    asked["_TYPER_COMPLETE_FISH_ACTION"] = "is-args"
    assert said(capsys, **asked) == (0, "")
    assert said(capsys, **asked | {"_TYPER_COMPLETE_ARGS": "ddptrain run train.py "}) == (1, "")


def test_request_that_makes_no_sense_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, _DDPTRAIN_COMPLETE="complete_bash", COMP_WORDS="ddptrain", COMP_CWORD="x") == (0, "")


@pytest.mark.parametrize(
    "line", ["ddptrain train pet", "ddptrain train petnames --set params.", "ddptrain results show "]
)
def test_answer_is_fast(line: str, tmp_path: Path) -> None:
    words = line.split(" ")
    asked = {"_DDPTRAIN_COMPLETE": "complete_bash", "COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}

    def cpu_s() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([COMMAND], cwd=tmp_path, env={**os.environ, **asked}, stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(cpu_s() for _ in range(3)) <= MOST_CPU_S


def test_answer_needs_neither_the_parser_nor_the_models() -> None:
    code = "import sys, ddptrain.completion.shells; print({'typer', 'pydantic', 'yaml'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_a_line_that_is_typed(tmp_path: Path) -> None:
    shown = subprocess.run(
        [COMMAND, "--show-completion", "bash"],
        capture_output=True,
        text=True,
        env={**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
    )
    assert shown.returncode == 0, shown.stderr
    (tmp_path / "script").write_text(shown.stdout)
    path = f"{Path(COMMAND).parent}:/usr/bin:/bin"
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execve(shutil.which("bash") or "", ["bash", "--norc", "-i"], {"PATH": path, "PS1": "> ", "TERM": "dumb"})
    try:
        os.write(terminal, b"source ./script; echo rea''dy\n")
        read_until(terminal, b"\nready")
        os.write(terminal, b"ddptrain train petnames --set checkpoint.mod")
        os.write(terminal, b"\t")
        read_until(terminal, b"e=m")
        os.write(terminal, b"i\t")
        read_until(terminal, b"in ")
    finally:
        os.write(terminal, b"\x03exit\n")
        os.close(terminal)
        os.waitpid(pid, 0)


def read_until(terminal: int, wanted: bytes, limit_s: float = 60.0) -> None:
    seen, deadline = b"", time.monotonic() + limit_s
    while wanted not in seen:
        assert time.monotonic() < deadline, seen
        if select.select([terminal], [], [], 0.2)[0]:
            seen += os.read(terminal, 1 << 16)
