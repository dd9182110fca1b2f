"""The text of `ddptrain explain CODE`."""

from __future__ import annotations

import pytest

from ddptrain.errors import ExitCode
from ddptrain.explain import EXPLANATIONS, as_text, explanation_of


@pytest.mark.parametrize("code", list(ExitCode))
def test_every_exit_code_is_explained(code: ExitCode) -> None:
    text = as_text(code)
    assert text[0].startswith(f"exit code {int(code)}: ") and len(text) > 1
    assert EXPLANATIONS[code].causes or code == ExitCode.SUCCEEDED


def test_causes_stand_with_what_to_do() -> None:
    text = "\n".join(as_text(ExitCode.LOCKED))
    assert "  - its driver on another host is silent\n    -> wait: the lock ends by itself" in text


def test_codes_of_others_are_named() -> None:
    assert as_text(137)[0] == "exit code 137: ddptrain itself was killed by SIGKILL"
    assert explanation_of(139).title == "ended by SIGSEGV"
    assert explanation_of(42).remarks == ("Its exit codes: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 75, 130, 143, 137, 141.",)
