"""What is read from a terminal and from a run while it is recorded."""

from __future__ import annotations

from typing import Any

import pyte

from tests.docs.recording import KILL_AFTER_EPOCH, pid_to_kill, row_of
from tests.docs.terminal_svg import Span


def test_row_has_a_span_for_each_style_and_no_blanks_at_its_end() -> None:
    screen = pyte.Screen(20, 1)
    pyte.Stream(screen).feed("\x1b[31mred\x1b[39;1mbold\x1b[0m   end ")
    assert row_of(screen.buffer[0], 20) == (
        Span(0, "red", "red"),
        Span(3, "bold", bold=True),
        Span(7, "   end"),
    )


def test_rank_1_is_killed_once_enough_epochs_are_logged() -> None:
    events = [{"event": "rank_started", "rank": rank, "pid": 100 + rank} for rank in (0, 1)]
    early: list[dict[str, Any]] = [{"epoch": KILL_AFTER_EPOCH - 1}, {"step": 3, "epoch": None}]
    assert pid_to_kill(events, early) is None
    assert pid_to_kill(events, [*early, {"epoch": KILL_AFTER_EPOCH}]) == 101
    assert pid_to_kill([], [{"epoch": KILL_AFTER_EPOCH}]) is None
