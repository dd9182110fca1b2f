"""The command line itself: completion, help."""

from __future__ import annotations

import pytest

from tests.contract.conftest import Project


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("ddptrain tr", ["train"]),
        ("ddptrain results sh", ["show"]),
        ("ddptrain results show ", ["latest", "mine-1"]),
        ("ddptrain train peti", []),
        ("ddptrain train petnames-s", ["petnames-sweep"]),
        ("ddptrain train work.yaml --resume l", ["latest"]),
    ],
)
def test_tab_completes_commands_and_what_is_on_this_machine(project: Project, words: str, expected: list[str]) -> None:
    project.write("runs/mine-1/run.json", "{}")
    env = {"_DDPTRAIN_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = project(env=env)
    assert (done.stdout.split(), done.stderr) == (expected, "")
