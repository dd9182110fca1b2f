"""The line of the user's code in a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddptrain import ci
from ddptrain.errors import Problem
from ddptrain.reports.facts import line_of_failure, line_of_problem
from ddptrain.results.run_record import CodeRecord, FailureRecord


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    for name in ("train.py", "lib/model.py", "venv/lib/python3.11/site-packages/torch/nn.py", "other/model.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x\n")
    return folder


def found(workspace: Path, *frames: str, code: CodeRecord | None = None, indent: str = "  ") -> str:
    trace = "".join(f"{indent}File {frame}, in main\n{indent}  call()\n" for frame in frames)
    text = f"Traceback (most recent call last):\n{trace}ValueError: 'File \"/x\", line 1'\n"
    return str(line_of_failure(FailureRecord(traceback=text), code, workspace))


def test_last_frame_of_the_workspace_counts(workspace: Path) -> None:
    installed = f'"{workspace}/venv/lib/python3.11/site-packages/torch/nn.py", line 5'
    standard = f'"{json.__file__}", line 3'
    package = f'"{ci.__file__}", line 3'
    frames = [f'"{workspace}/train.py", line 12', f'"{workspace}/lib/model.py", line 7', installed, standard, package]
    assert found(workspace, *frames) == "lib/model.py:7"
    assert found(Path("/"), *frames[:1]) == f"{workspace}/train.py:12".removeprefix("/")


def test_frames_elsewhere_and_without_a_file_are_none(workspace: Path) -> None:
    assert found(workspace / "lib", f'"{workspace}/train.py", line 12') == "None"
    assert (
        found(workspace, '"<frozen importlib>", line 1', f'"{workspace}/gone.py", line 1', '"a\0b", line 2') == "None"
    )
    assert line_of_failure(None, None, workspace) is line_of_failure(FailureRecord(), None, workspace) is None


def test_path_that_leaves_the_workspace_is_refused(workspace: Path) -> None:
    (workspace.parent / "secret.py").write_text("")
    (workspace / "link.py").symlink_to(workspace.parent / "secret.py")
    assert found(workspace, f'"{workspace}/../secret.py", line 1', f'"{workspace}/link.py", line 1') == "None"


def test_uploaded_code_is_found_in_its_project(workspace: Path) -> None:
    code = CodeRecord("0a1b2c", str(workspace / "lib"))
    assert found(workspace, '"/home/x/.cache/ddptrain/code/0a1b2c/model.py", line 9', code=code) == "lib/model.py:9"


def test_frames_of_exception_groups_count(workspace: Path) -> None:
    assert found(workspace, f'"{workspace}/train.py", line 3', indent="    | ") == "train.py:3"


def test_problem_of_a_configuration_is_relative_to_the_folder(workspace: Path) -> None:
    (workspace / "lib" / "a.yaml").write_text("x")
    assert str(line_of_problem(Problem("a.yaml:12", "x", "wrong"), workspace, workspace / "lib")) == "lib/a.yaml:12"
    for where in ("a.yaml", "--ranks 0", "gone.yaml:3", ""):
        assert line_of_problem(Problem(where, "x", "wrong"), workspace, workspace / "lib") is None
