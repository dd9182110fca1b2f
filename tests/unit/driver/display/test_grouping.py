"""Of many ranks rank 0 is shown, and what other ranks print besides: known values, and properties of every order."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from ddptrain.driver.display.logs import HOLD_S, MAX_HELD_CHARS, DifferingLines, RankLines, TracebackFilter
from ddptrain.results.log_tail import LogLine


def texts(groups: Iterable[RankLines]) -> list[tuple[int, str]]:
    return [(rank, line.text) for rank, lines in groups for line in lines]


def lines(*words: str) -> list[LogLine]:
    return [LogLine(word) for word in words]


def test_line_that_rank_0_prints_within_the_wait_is_shown_of_rank_0_only() -> None:
    shown = DifferingLines()
    shown.add(2, lines("epoch 1/20", "only rank 2"), 10.0)
    assert not list(shown.due(10.0 + HOLD_S - 0.1))
    assert texts(shown.add(0, lines("epoch 1/20"), 10.3)) == [(0, "epoch 1/20")]
    assert texts(shown.due(10.0 + HOLD_S)) == [(2, "only rank 2")]


def test_memory_is_bounded_while_lines_wait() -> None:
    shown = DifferingLines()
    shown.add(1, [LogLine(f"{number:099}") for number in range(20_000)], 0.0)
    early, late = texts(shown.due(0.0)), texts(shown.due(float("inf")))
    assert sum(len(text) for _, text in late) <= MAX_HELD_CHARS
    assert [int(text) for _, text in early + late] == list(range(20_000))


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from("abc"), st.floats(0, 1)), max_size=60), st.booleans())
def test_rank_0_is_complete_and_every_line_is_shown_of_some_rank(
    events: list[tuple[int, str, float]], polls: bool
) -> None:
    differing, now, shown = DifferingLines(), 0.0, []
    for rank, text, pause in events:
        now += pause
        shown += texts(differing.add(rank, lines(text), now))
        if polls:
            shown += texts(differing.due(now))
    shown += texts(differing.due(float("inf")))
    assert [text for rank, text in shown if rank == 0] == [text for rank, text, _ in events if rank == 0]
    assert {text for _, text in shown} == {text for _, text, _ in events}


TRACE = ("Traceback (most recent call last):", '  File "train.py", line 3, in train', "    f()", "", "ValueError: no")


def test_traceback_of_another_rank_is_replaced_by_its_last_line() -> None:
    shown = TracebackFilter()

    def of(rank: int, *words: str) -> list[str]:
        return [text for _, text in texts(shown.add(rank, lines(*words), 0.0))]

    assert of(0, "before", *TRACE, "after") == ["before", *TRACE, "after"]
    assert not of(1, *TRACE[:2])  # its end is missing
    assert of(2, "between") == ["between"]
    assert of(1, *TRACE[2:], "after") == ["ValueError: no (the traceback is that of rank 0)", "after"]
    assert of(0, *TRACE) == list(TRACE)  # the same rank again
    other = (*TRACE[:-1], "ValueError: yes")
    assert of(1, *other) == list(other)


def test_traceback_without_an_end_is_shown_at_the_next_flush() -> None:
    shown = TracebackFilter()
    assert not shown.add(1, lines(*TRACE[:3]), 0.0)
    assert texts(shown.due(float("inf"))) == [(1, text) for text in TRACE[:3]]
    assert not list(shown.due(float("inf")))
    assert texts(shown.add(1, lines("after"), 0.0)) == [(1, "after")]
