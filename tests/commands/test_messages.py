"""What each command prints, word for word: the files in golden/, which hold input and output.

A case begins with `## TITLE`. Lines as `NAME| TEXT` are files of its folder, lines as `$ ddptrain WORDS` are commands,
each followed by its output and its exit code. With UPDATE_GOLDEN=1 the output is written instead of compared.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddptrain.cli.main import main

GOLDEN = Path(__file__).parent / "golden"
FINISHED_RUNS = Path(__file__).parent / "finished_runs"  # two of petnames: one failed, one succeeded
_FILE = re.compile(r"^([\w./-]+)\| ?(.*)$")


def cases() -> Iterator[tuple[Path, str, str]]:
    for path in sorted(GOLDEN.glob("*.txt")):
        for case in re.split(r"^(?=## )", path.read_text(), flags=re.MULTILINE)[1:]:
            yield path, case.partition("\n")[0].removeprefix("## "), case


CASES = [pytest.param(path, case, id=f"{path.stem}: {title}") for path, title, case in cases()]


@pytest.mark.parametrize(("path", "case"), CASES)
def test_command_prints_what_the_golden_file_says(
    path: Path, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {"HOME": tmp_path, "XDG_STATE_HOME": tmp_path / "state", "COLUMNS": 100, "TZ": "UTC"}.items():
        monkeypatch.setenv(name, str(value))
    shutil.copytree(FINISHED_RUNS, tmp_path / "runs")
    printed = "".join(_played(case, tmp_path, capsys)).rstrip("\n") + "\n\n"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(path.read_text().replace(case, printed).rstrip("\n") + "\n")
    assert printed.rstrip("\n") == case.rstrip("\n")


def _played(case: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[str]:
    """Yield the case with the output of its commands in place of what it says."""
    is_output = False
    for line in case.splitlines(keepends=True):
        if line.startswith("$ ddptrain "):
            yield line
            code = main(shlex.split(line.removeprefix("$ ddptrain ")))
            out, err = capsys.readouterr()
            yield from (text.replace(str(folder), "DIR") for text in (out, err))
            yield f"[exit {code}]\n"
            is_output = True
        elif (match := _FILE.match(line.rstrip("\n"))) and not is_output:
            (folder / match[1]).parent.mkdir(parents=True, exist_ok=True)
            with (folder / match[1]).open("a") as file:
                file.write(f"{match[2]}\n")
            yield line
        elif not is_output:
            yield line
