"""The pages of the exit codes say what `ddptrain explain` says."""

from __future__ import annotations

from collections import Counter
from dataclasses import astuple
from pathlib import Path

import pytest

from ddptrain.errors import SIGNALLED, ExitCode
from ddptrain.explain import EXPLANATIONS
from tests.docs.troubleshooting import CODE, FOLDER, LINKS, codes_of, marked, page_with_explanations

PAGES = sorted(FOLDER.glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.stem))
def test_pages_are_as_written_from_the_explanations(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert page_with_explanations(text) == text, "run: python -m tests.docs.troubleshooting"


def test_each_exit_code_has_one_page() -> None:
    codes = Counter(code for page in PAGES for code in codes_of(page.read_text(encoding="utf-8")))
    assert set(codes.values()) == {1}
    shared = {ExitCode.SUCCEEDED} | SIGNALLED - {ExitCode.INTERRUPTED}  # nothing to do; explained with 130
    assert set(codes) == {int(code) for code in ExitCode if code not in shared}
    assert len({(EXPLANATIONS[code].causes, EXPLANATIONS[code].remarks) for code in SIGNALLED}) == 1


def test_a_block_is_replaced_and_the_rest_stays() -> None:
    page = page_with_explanations("# A\n<!-- explain 8 -->\nold\n<!-- end -->\nrest\n")
    assert page == (
        "# A\n<!-- explain 8 -->\n\n| cause, or message | what to do |\n|---|---|\n"
        "| `retrain.deadline` is over | set a longer deadline, or train for fewer epochs |\n\n"
        "The state is saved; the next start of `ddptrain retrain` continues.\n\n<!-- end -->\nrest\n"
    )


def test_commands_become_code_and_some_words_links() -> None:
    text = "ddptrain stop RUN ends it; look at the gate"
    assert marked(text) == "`ddptrain stop RUN` ends it; look at [the gate](../unattended.md#gate)"


@pytest.mark.parametrize("phrase", [*CODE, *LINKS])
def test_every_phrase_that_is_marked_occurs(phrase: str) -> None:
    assert phrase in "\n".join(str(astuple(explanation)) for explanation in EXPLANATIONS.values()).replace("\\'", "'")
