"""Equal lines of many ranks become one: known values, and properties that hold for every order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddptrain.driver.display.grouping import HOLD_S, MAX_HELD_CHARS, LineGrouper, TracebackFilter, label
from ddptrain.driver.display.log_tail import RankLine


def texts(groups: Iterable[tuple[Sequence[int], Sequence[RankLine]]]) -> list[tuple[str, str]]:
    return [(label(ranks), line.text) for ranks, lines in groups for line in lines]


def lines(*words: str) -> list[RankLine]:
    return [RankLine(word) for word in words]


def test_line_that_all_ranks_have_printed_is_shown_once_and_at_once() -> None:
    grouper = LineGrouper(3)
    for rank in (2, 0, 1):
        assert not list(grouper.due(10.0))
        grouper.add(rank, lines("epoch 1/20"), 10.0)
    assert texts(grouper.due(10.0)) == [("[ranks 0-2]", "epoch 1/20")]
    assert not list(grouper.flush())


def test_line_waits_for_other_ranks_no_longer_than_the_stated_time() -> None:
    grouper = LineGrouper(3, hold_s=0.4)
    grouper.add(0, lines("a"), 10.0)
    grouper.add(2, lines("a"), 10.3)
    assert not list(grouper.due(10.39))
    assert texts(grouper.due(10.4)) == [("[ranks 0, 2]", "a")]
    grouper.add(1, lines("a"), 10.5)
    assert texts(grouper.due(10.9)) == [("[rank 1]", "a")]
    assert HOLD_S <= 0.4  # with the display's own 0.1 s, half a second


def test_lines_of_a_rank_stay_in_order_and_equal_ones_are_not_merged_within_it() -> None:
    grouper = LineGrouper(2)
    grouper.add(0, lines("a", "a", "b"), 0.0)
    grouper.add(1, lines("a", "b", "a"), 0.0)
    assert texts(grouper.flush()) == [("[ranks 0-1]", "a"), ("[rank 0]", "a"), ("[ranks 0-1]", "b"), ("[rank 1]", "a")]


def test_line_behind_one_that_waits_is_shown_after_it() -> None:
    grouper = LineGrouper(2, hold_s=0.4)
    grouper.add(0, lines("only rank 0"), 0.0)
    grouper.add(0, lines("both"), 0.3)
    grouper.add(1, lines("both"), 0.3)
    assert not list(grouper.due(0.3))
    assert texts(grouper.due(0.4)) == [("[rank 0]", "only rank 0"), ("[ranks 0-1]", "both")]


def test_piece_of_a_line_is_not_merged_with_a_whole_line() -> None:
    grouper = LineGrouper(2)
    grouper.add(0, [RankLine("a")], 0.0)
    grouper.add(1, [RankLine("a", ended=False)], 0.0)
    assert texts(grouper.flush()) == [("[rank 0]", "a"), ("[rank 1]", "a")]


def test_memory_is_bounded_while_lines_wait() -> None:
    grouper = LineGrouper(2)
    grouper.add(0, [RankLine(f"{number:099}") for number in range(20_000)], 0.0)
    shown = texts(grouper.due(0.0))
    left = texts(grouper.flush())
    assert sum(len(text) for _, text in left) <= MAX_HELD_CHARS
    assert [int(text) for _, text in shown + left] == list(range(20_000))


@pytest.mark.parametrize(
    ("ranks", "shown"),
    [
        ([7], "[rank 7]"),
        (range(64), "[ranks 0-63]"),
        ([0, 1, 2, 5], "[ranks 0-2, 5]"),
        (range(0, 64, 2), "[32 ranks: 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, ...]"),
    ],
)
def test_label_names_the_ranks(ranks: Sequence[int], shown: str) -> None:
    assert label(list(ranks)) == shown


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from("abc"), st.floats(0, 1)), max_size=60), st.booleans())
def test_every_rank_gets_all_of_its_lines_in_order(events: list[tuple[int, str, float]], polls: bool) -> None:
    grouper, now, shown = LineGrouper(5), 0.0, []
    for rank, text, pause in events:
        now += pause
        grouper.add(rank, lines(text), now)
        if polls:
            shown += list(grouper.due(now))
    shown += list(grouper.flush())
    for rank in range(5):
        mine = [line.text for ranks, group in shown if rank in ranks for line in group]
        assert mine == [text for printer, text, _ in events if printer == rank]


def test_lines_that_are_shown_make_room_for_others() -> None:
    grouper = LineGrouper(2, hold_s=10.0)
    long = RankLine("x" * 600_000)
    for second in range(3):
        grouper.add(0, [long], float(second))
        assert list(grouper.due(float(second))) == []
        grouper.add(1, [long], float(second))
        assert list(grouper.due(float(second))) == [([0, 1], [long])]
    grouper.add(0, [RankLine("a" * 600_000), RankLine("b" * 448_576)], 4.0)
    assert list(grouper.due(4.0)) == [], "a mebibyte is held"
    grouper.add(0, [RankLine("c")], 4.0)
    assert [len(line.text) for _, lines in grouper.due(4.0) for line in lines] == [600_000]


def test_label_of_40_characters_is_shown_whole() -> None:
    ranks = [*range(10, 28, 2), 300]  # "10, 12, 14, 16, 18, 20, 22, 24, 26, 300" has 39
    assert label(ranks) == "[ranks 10, 12, 14, 16, 18, 20, 22, 24, 26, 300]"
    assert label([*ranks[:-1], 3000]) == "[ranks 10, 12, 14, 16, 18, 20, 22, 24, 26, 3000]"
    assert label([*ranks[:-1], 30000]) == "[10 ranks: 10, 12, 14, 16, 18, 20, 22, 24, 26, ...]"


TRACE = ("Traceback (most recent call last):", '  File "train.py", line 3, in train', "    f()", "", "ValueError: no")


def test_traceback_of_another_rank_is_replaced_by_its_last_line() -> None:
    shown = TracebackFilter()
    assert shown.add(0, lines("before", *TRACE, "after")) == lines("before", *TRACE, "after")
    assert not shown.add(1, lines(*TRACE[:2]))  # its end is missing
    assert shown.add(2, lines("between")) == lines("between")
    (same, after) = shown.add(1, lines(*TRACE[2:], "after"))
    assert same.text == "ValueError: no (the traceback is that of rank 0)" and after.text == "after"
    assert shown.add(0, lines(*TRACE)) == lines(*TRACE)  # the same rank again
    other = (*TRACE[:-1], "ValueError: yes")
    assert shown.add(1, lines(*other)) == lines(*other)


def test_traceback_without_an_end_is_shown_at_the_next_flush() -> None:
    shown = TracebackFilter()
    assert not shown.add(1, lines(*TRACE[:3]))
    assert list(shown.flush()) == [([1], lines(*TRACE[:3]))]
    assert not list(shown.flush())
    assert shown.add(1, lines("after")) == lines("after")
