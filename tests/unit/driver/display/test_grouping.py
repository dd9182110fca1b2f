"""Of many ranks rank 0 is shown, and what other ranks print besides: known values, and properties of every order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from ddptrain.driver.display.display import HOLD_S, MAX_HELD_CHARS, ShownLines
from ddptrain.results.log_tail import LogLine


def texts(groups: Iterable[tuple[int, Sequence[LogLine]]]) -> list[tuple[int, str]]:
    return [(rank, line.text) for rank, lines in groups for line in lines]


def lines(*words: str) -> list[LogLine]:
    return [LogLine(word) for word in words]


def test_line_that_rank_0_prints_within_the_wait_is_shown_of_rank_0_only() -> None:
    shown = ShownLines(groups=True)
    shown.add(2, lines("epoch 1/20", "only rank 2"), 10.0)
    assert not list(shown.due(10.0 + HOLD_S - 0.1))
    assert shown.add(0, lines("epoch 1/20"), 10.3) == lines("epoch 1/20")
    assert texts(shown.due(10.0 + HOLD_S)) == [(2, "only rank 2")]


def test_memory_is_bounded_while_lines_wait() -> None:
    shown = ShownLines(groups=True)
    shown.add(1, [LogLine(f"{number:099}") for number in range(20_000)], 0.0)
    early, late = texts(shown.due(0.0)), texts(shown.due(float("inf")))
    assert sum(len(text) for _, text in late) <= MAX_HELD_CHARS
    assert [int(text) for _, text in early + late] == list(range(20_000))


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from("abc"), st.floats(0, 1)), max_size=60), st.booleans())
def test_rank_0_is_complete_and_every_line_is_shown_of_some_rank(
    events: list[tuple[int, str, float]], polls: bool
) -> None:
    differing, now, shown = ShownLines(groups=True), 0.0, []
    for rank, text, pause in events:
        now += pause
        shown += texts([(rank, differing.add(rank, lines(text), now))])
        if polls:
            shown += texts(differing.due(now))
    shown += texts(differing.due(float("inf")))
    assert [text for rank, text in shown if rank == 0] == [text for rank, text, _ in events if rank == 0]
    assert {text for _, text in shown} == {text for _, text, _ in events}
