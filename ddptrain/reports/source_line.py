"""The line of the user's code that an error came from."""

from __future__ import annotations

import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ddptrain.errors import Problem
from ddptrain.results.run_record import CodeRecord, FailureRecord

_FRAME = re.compile(r'^[ |+]*File "([^"\n]+)", line (\d{1,9})', re.MULTILINE)
_PLACE = re.compile(r"(.+):(\d{1,9})")
_INSTALLED = re.compile(r"/(?:site|dist)-packages/")
_PACKAGE = Path(__file__).parents[1]
_STANDARD = Path(sysconfig.get_paths()["stdlib"])


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of a file: `file` is relative to the workspace, `line` counts from 1."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def line_of_failure(failure: FailureRecord | None, code: CodeRecord | None, workspace: Path) -> SourceLine | None:
    """Return the last line of the traceback that is a file in the workspace and no installed package; else None.

    code: the project as it was uploaded; files of the upload are found in the folder that they come from.
    """
    frames = _FRAME.findall(failure.traceback) if failure is not None else []
    for file, line in reversed(frames):
        if found := _in_workspace(_original(file, code), workspace):
            return SourceLine(found, int(line))
    return None


def line_of_problem(problem: Problem, workspace: Path, folder: Path) -> SourceLine | None:
    """Return the line of a configuration that a problem is at; `folder` is the one that its path is relative to."""
    match = _PLACE.fullmatch(problem.where)
    found = _in_workspace(str(folder / match[1]), workspace) if match else ""
    return SourceLine(found, int(match[2])) if match and found else None


def _original(file: str, code: CodeRecord | None) -> str:
    if code is None or not code.hash or not code.folder:
        return file
    _, found, rest = file.partition(f"/{code.hash}/")
    return f"{code.folder}/{rest}" if found else file


def is_installed(file: str) -> bool:
    """Return whether a file of a traceback belongs to ddptrain, the standard library or an installed package."""
    path = Path(file)
    return bool(
        _INSTALLED.search(file) or path.is_relative_to(_PACKAGE) or path.is_relative_to(_STANDARD) or "<frozen" in file
    )


def _in_workspace(file: str, workspace: Path) -> str:
    """Return the path relative to the workspace; "" if it is elsewhere, or not the user's code."""
    path = Path(file)
    try:
        if is_installed(file):
            return ""
        resolved = path.resolve()
        is_there = resolved.is_file()
    except (OSError, ValueError, RuntimeError):  # ValueError: a NUL character; RuntimeError: a circle of links
        return ""
    root = workspace.resolve()
    if not is_there or not resolved.is_relative_to(root):
        return ""
    return str(PurePosixPath(resolved.relative_to(root)))
