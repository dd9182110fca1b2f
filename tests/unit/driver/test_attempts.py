"""What the user is told about the next attempt."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ddptrain.driver.attempts import starting_point

SAVED: Any = SimpleNamespace(words="checkpoint step-3")


@pytest.mark.parametrize(
    ("checkpoint", "is_script", "words"),
    [
        (SAVED, False, "from checkpoint step-3"),
        (SAVED, True, "from checkpoint step-3"),
        (None, False, "from the start: there is no checkpoint yet"),
        (None, True, "the script starts again"),
    ],
)
def test_script_may_have_its_own_snapshot(checkpoint: Any, is_script: bool, words: str) -> None:
    assert starting_point(checkpoint, is_script=is_script) == words
