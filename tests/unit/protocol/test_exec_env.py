"""Where Python looks for modules: never in the working directory by accident."""

from __future__ import annotations

import os
import sys

import pytest

from ddptrain.protocol.exec_env import (
    exec_only,
    leave_working_directory,
    names_working_directory,
    without_working_directory,
)

LIBRARY = os.path.dirname(os.__file__)


@pytest.mark.parametrize(
    ("path", "kept", "named"),
    [
        (":/a", "/a", True),
        ("/a:", "/a", True),
        ("/a::/b", "/a:/b", True),
        ("", "", False),
        ("/a", "/a", False),
    ],
)
def test_empty_entries_of_the_path_go_for_they_are_the_working_directory(path: str, kept: str, named: bool) -> None:
    environ = {"PYTHONPATH": path, "HOME": "/h"}
    assert names_working_directory(environ) == named
    assert without_working_directory(environ) == {"PYTHONPATH": kept, "HOME": "/h"}
    assert exec_only(environ) == {"PYTHONPATH": kept}


def test_path_of_empty_entries_alone_goes_as_a_whole() -> None:
    assert without_working_directory({"PYTHONPATH": ":", "A": "b"}) == {"A": "b"}


def test_environment_without_a_path_stays_as_it_is() -> None:
    assert not names_working_directory({})
    assert without_working_directory({"A": "b"}) == {"A": "b"}


@pytest.mark.parametrize(
    ("variable", "before", "after"),
    [
        ("", ["HERE", "LIBRARY", "/site"], ["LIBRARY", "/site"]),
        (":/a", ["HERE", "HERE", "/a", "LIBRARY"], ["/a", "LIBRARY"]),
        ("", ["", "LIBRARY", "/site", "HERE"], ["LIBRARY", "/site", "HERE"]),
        ("HERE", ["HERE", "LIBRARY"], ["HERE", "LIBRARY"]),
        ("", ["/bin", "LIBRARY"], ["/bin", "LIBRARY"]),
    ],
    ids=["python -m", "empty entry", "editable installation", "named", "script"],
)
def test_working_directory_leaves_the_path_unless_it_was_named_or_installed(
    monkeypatch: pytest.MonkeyPatch, variable: str, before: list[str], after: list[str]
) -> None:
    def filled(entries: list[str]) -> list[str]:
        return [{"HERE": os.getcwd(), "LIBRARY": LIBRARY}.get(entry, entry) for entry in entries]

    monkeypatch.setenv("PYTHONPATH", variable.replace("HERE", os.getcwd()))
    monkeypatch.setattr(sys, "path", filled(before))
    leave_working_directory()
    assert sys.path == filled(after)
