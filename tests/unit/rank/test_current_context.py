"""ddptrain.context() is for ranks, and raises an error elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

import ddptrain
from ddptrain.rank import current_context


def test_call_in_a_process_that_is_no_rank_is_an_error() -> None:
    with pytest.raises(
        current_context.NoRank, match="in a process that is not a rank: it is for code that `ddptrain train`"
    ):
        ddptrain.context()


def test_rank_has_its_context(monkeypatch: pytest.MonkeyPatch) -> None:
    context: Any = object()
    monkeypatch.setattr(current_context, "_make", None)
    current_context.provide(lambda: context)
    assert ddptrain.context() is context
