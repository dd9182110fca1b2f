from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ddptrain.errors import RunNotFound
from ddptrain.results.errors import ResultsError
from ddptrain.results.log_tail import LogTail
from ddptrain.results.run import Run
from ddptrain.results.run_record import RunRecord
from ddptrain.results.show.log_follower import final_text, follow_logs, show_logs


def view_of(root: Path, world_size: int = 1, **logs: bytes) -> Run:
    layout = Run(root)
    layout.logs_dir.mkdir(parents=True)
    for name, data in logs.items():
        (layout.logs_dir / f"rank-{name.removeprefix('rank')}.log").write_bytes(data)
    return Run(layout.root, RunRecord(run_id="r", status="succeeded", world_size=world_size))


class Followed(Run):
    """A run that is running until nothing is left to happen."""

    left: Sequence[object] = ()

    @classmethod
    def of(cls, view: Run) -> Followed:
        return cls(view.root, view.record)

    def follow(self, *patterns: str) -> Callable[[], Run]:
        return lambda: self

    @property
    def goes_on(self) -> bool:
        return bool(self.left)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("plain", "plain"),
        ("dos\r", "dos"),
        ("10%\r 50%\r100%", "100%"),
        ("loading...\rdone", "doneing..."),
        ("loading...\r\x1b[Kdone", "\x1b[Kdone"),
        ("\r\r", ""),
    ],
)
def test_carriage_returns_end_up_as_on_a_terminal(line: str, text: str) -> None:
    assert final_text(line) == text


def test_one_rank_is_shown_as_it_is_and_several_with_their_number(tmp_path: Path) -> None:
    assert list(show_logs(view_of(tmp_path / "1", rank0=b"a\nb"))) == ["a", "b"]
    parts = [json.loads(line) for line in show_logs(view_of(tmp_path / "3", rank0=b"a\nb"), as_json=True)]
    of_rank = {"event": "log", "rank": 0}
    assert parts == [{**of_rank, "line": "a"}, {**of_rank, "line": "b", "partial": True}]
    two = view_of(tmp_path / "2", 2, rank0=b"a\n", rank1=b"b\n\nc")
    assert list(show_logs(two)) == ["[rank 0] a", "[rank 1] b", "[rank 1] ", "[rank 1] c"]
    assert list(show_logs(two, rank=1)) == ["b", "", "c"]


def test_a_rank_without_a_log_is_told_with_those_that_have_one(tmp_path: Path) -> None:
    view = view_of(tmp_path, rank0=b"", rank2=b"")
    with pytest.raises(RunNotFound, match="no log of rank 7; it has logs of ranks 0, 2"):
        list(show_logs(view, rank=7))
    with pytest.raises(RunNotFound, match="no log of rank 7"):
        list(follow_logs(view, rank=7))


@pytest.mark.parametrize(
    ("data", "lines", "shown"),
    [
        (b"a\nb\nc\n", 2, ["b", "c"]),
        (b"a\nb\nc", 2, ["b", "c"]),
        (b"a\nb\nc\n", 9, ["a", "b", "c"]),
        (b"a\n\n", 1, [""]),
        (b"a\n", 0, []),
        (b"", 3, []),
        (b"x\n" + b"y" * 200_000 + b"\nz\n", 2, ["y" * 200_000, "z"]),
        (b"\n".join(b"%d" % n for n in range(100_000)), 1, ["99999"]),
    ],
)
def test_the_last_lines_are_found_from_the_end(tmp_path: Path, data: bytes, lines: int, shown: list[str]) -> None:
    assert list(show_logs(view_of(tmp_path, rank0=data), lines=lines)) == shown


def test_a_line_that_never_ends_is_shown_in_pieces(tmp_path: Path) -> None:
    view = view_of(tmp_path, rank0=b"x" * 5_000_000)
    pieces = list(show_logs(view))
    assert len(pieces) > 1
    assert sum(map(len, pieces)) == 5_000_000


def test_following_shows_new_lines_new_ranks_and_the_end(tmp_path: Path) -> None:
    view = Followed.of(view_of(tmp_path, 2, rank0=b"old\nlast\n"))
    log, other = view.log(0), view.log(1)

    def add(path: Path, data: bytes) -> None:
        with path.open("ab") as file:
            file.write(data)

    def rank_1_joins() -> None:
        add(log, b"ial\n")
        add(other, b"1\n2\n")

    left: list[Callable[[], None]] = [
        lambda: add(log, b"one\npart"),
        rank_1_joins,
        lambda: add(log, b"the end"),
    ]
    view.left = left
    lines = follow_logs(view, lines=1, wait=lambda _: left.pop(0)())
    assert list(lines) == [
        "[rank 0] last",
        "[rank 0] one",
        "[rank 0] partial",
        "[rank 1] 1",
        "[rank 1] 2",
        "[rank 0] the end",
    ]


def test_following_from_before_the_first_line_says_whose_each_line_is(tmp_path: Path) -> None:
    """How many ranks it has is not known yet: `train --detach` has just returned."""
    view = Followed.of(view_of(tmp_path, world_size=0))
    left = [(0, b"a\n"), (1, b"b\n")]

    def comes(_: float) -> None:
        rank, line = left.pop(0)
        view.log(rank).write_bytes(line)

    view.left = left
    lines = follow_logs(view, wait=comes)
    assert list(lines) == ["[rank 0] a", "[rank 1] b"]


@pytest.mark.parametrize("lines", [None, 3])
def test_a_log_that_is_a_link_is_refused_by_its_name(tmp_path: Path, lines: int | None) -> None:
    log = tmp_path / "rank-0.log"
    log.symlink_to("/etc/hosts")
    with pytest.raises(ResultsError, match=rf"^cannot read {re.escape(str(log))}: Too many levels of symbolic links"):
        list(LogTail(log, lines).texts())
