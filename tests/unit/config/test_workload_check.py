"""A workload whose module is missing, or no valid Python, is an error before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddptrain.config.load import load_config
from ddptrain.config.workload_check import check_workload
from ddptrain.errors import ConfigError

FORM = "c.yaml:1: workload: is not of the form package.module:function"


def problem_of(folder: Path, workload: str, more: str = "") -> str:
    """The problem, without the folder; "" if there is none."""
    (folder / "c.yaml").write_text(f"workload: {workload}\n{more}")
    try:
        check_workload(load_config(folder / "c.yaml"))
    except ConfigError as error:
        (problem,) = error.problems
        return str(problem).replace(f"{folder}/", "").partition(" (looked for in ")[0]
    return ""


@pytest.mark.parametrize(
    ("workload", "expected"),
    [
        ("nothere:main", 'c.yaml:1: workload: there is no module nothere, got the text "nothere:main"'),
        (
            "digist:main",
            'c.yaml:1: workload: there is no module digist, got the text "digist:main" (did you mean digits:main?)',
        ),
        (
            "digits.py:main",
            (
                'c.yaml:1: workload: there is no module digits.py, got the text "digits.py:main" '
                "(did you mean digits:main?)"
            ),
        ),
        (
            "./digits.py:main",
            f'{FORM}, got the text "./digits.py:main" (did you mean digits:main?)',
        ),
        (
            "digits.main",
            f'{FORM}, got the text "digits.main" (did you mean digits:main?)',
        ),
        (
            "src/digits.py",
            (
                f'{FORM}, got the text "src/digits.py" (did you mean src.digits:train? '
                "A script is workload: {script: src/digits.py})"
            ),
        ),
        ("broken:main", "c.yaml:1: workload: broken.py:2 is not valid Python: invalid syntax (the line is: x = = 1)"),
        (
            "pack.inside:main",
            "c.yaml:1: workload: pack/__init__.py:1 is not valid Python: invalid syntax (the line is: from)",
        ),
        ("digits:main", ""),
        ("asyncio:all_tasks", ""),
        ("space.inside:main", ""),
        ("sys:exit", ""),
        ("petnames", ""),
    ],
)
def test_missing_or_broken_module_is_named_with_what_was_meant(tmp_path: Path, workload: str, expected: str) -> None:
    (tmp_path / "digits.py").write_text("def main(ctx): ...\n")
    (tmp_path / "broken.py").write_text("def main(ctx):\n    x = = 1\n")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("from\n")
    (tmp_path / "pack" / "inside.py").write_text("def main(ctx): ...\n")
    (tmp_path / "space").mkdir()
    (tmp_path / "space" / "inside.py").write_text("def main(ctx): ...\n")
    assert problem_of(tmp_path, workload) == expected


def test_hosts_of_a_cluster_may_have_other_modules(tmp_path: Path) -> None:
    assert problem_of(tmp_path, "nothere:main", "cluster: {address: 'tcp://host:8786'}\n") == ""


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("ok.py", ""),
        (
            "broken.py",
            "c.yaml:2: workload.script: broken.py:1 is not valid Python: invalid syntax (the line is: x = = 1)",
        ),
        (
            "a.ipynb",
            (
                'c.yaml:2: workload.script: expected a Python file, got the notebook "a.ipynb" '
                "(convert it: jupyter nbconvert --to script a.ipynb)"
            ),
        ),
        (
            "pack",
            (
                'c.yaml:2: workload.script: expected a Python file, got the folder "pack" '
                "(name the file in it; a folder is run only if it has a __main__.py)"
            ),
        ),
    ],
)
def test_script_that_python_cannot_run_is_named_with_its_line(tmp_path: Path, script: str, expected: str) -> None:
    (tmp_path / "ok.py").write_text("print(1)\n")
    (tmp_path / "broken.py").write_text("x = = 1\n")
    (tmp_path / "a.ipynb").write_text('{"cells": []}')
    (tmp_path / "pack").mkdir()
    assert problem_of(tmp_path, "", f"  script: {script}\n") == expected


def test_module_that_is_only_imported_is_no_function(tmp_path: Path) -> None:
    (tmp_path / "digits.py").write_text("import math\n\ndef main(ctx): ...\n")
    assert problem_of(tmp_path, "digits:math") == (
        "c.yaml:1: workload: math is a module that digits.py imports, not a function (name a function of digits, "
        "as digits:train)"
    )


@pytest.mark.parametrize(
    ("evaluate", "expected"),
    [
        ("digits:score", ""),
        (
            "digits:scor",
            'c.yaml:2: evaluate: digits.py has no scor, got the text "digits:scor" (did you mean digits:score?)',
        ),
        ("dynamic:score", ""),
    ],
)
def test_evaluation_function_that_does_not_exist_is_named_before_a_training(
    tmp_path: Path, evaluate: str, expected: str
) -> None:
    (tmp_path / "digits.py").write_text("def main(ctx): ...\ndef score(ctx, checkpoint): ...\n")
    (tmp_path / "dynamic.py").write_text("from digits import *\n")
    assert problem_of(tmp_path, "digits:main", f"evaluate: {evaluate}\n") == expected
