"""The driver's copy of a rank's files: nothing lost, nothing twice, whatever the order and size of what arrives."""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddptrain.driver.output import LogMirror
from ddptrain.protocol import events
from ddptrain.results.errors import ResultsError
from ddptrain.worker.spool import RankSpool, read_chunk


def spool_in(folder: Path) -> RankSpool:
    spool = RankSpool(folder / "spool")
    spool.create()
    (folder / "home").mkdir()
    return spool


def mirror_of(spool: RankSpool, folder: Path, *, shared: bool) -> LogMirror:
    return LogMirror(spool, folder / "home" / "rank-0.log", shared=shared, fetch=read_chunk)


def advance(mirror: LogMirror, log_size: int = 0, events_size: int = 0) -> None:
    mirror.receive("log", log_size)
    mirror.receive("events", events_size)


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_log_becomes_the_same_file_when_the_worker_has_created_it(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    spool = RankSpool(tmp_path / "spool")
    mirror = mirror_of(spool, tmp_path, shared=True)  # before the rank is started
    spool.create()
    append(spool.log, b"first\n")
    advance(mirror, 6, 0)
    assert os.path.samefile(spool.log, mirror.home_log)
    append(spool.log, b"printed after the driver was killed\n")
    assert mirror.home_log.read_bytes() == b"first\nprinted after the driver was killed\n"


def test_log_is_copied_where_no_hard_link_is_possible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    spool = spool_in(tmp_path)
    mirror = mirror_of(spool, tmp_path, shared=True)
    append(spool.log, b"first\n")
    monkeypatch.setattr(os, "link", refuse)
    advance(mirror, 3, 0)
    advance(mirror, 6, 0)
    assert mirror.home_log.read_bytes() == b"first\n"
    assert not os.path.samefile(spool.log, mirror.home_log)


def test_log_of_an_earlier_attempt_is_added_to(tmp_path: Path) -> None:
    spool = spool_in(tmp_path)
    (tmp_path / "home" / "rank-0.log").write_bytes(b"first attempt\n")
    mirror = mirror_of(spool, tmp_path, shared=True)
    append(spool.log, b"second\n")
    advance(mirror, 7, 0)
    assert mirror.home_log.read_bytes() == b"first attempt\nsecond\n"


@pytest.mark.parametrize("shared", [True, False])
def test_log_is_not_written_through_a_link(tmp_path: Path, shared: bool) -> None:
    spool = spool_in(tmp_path)
    (tmp_path / "home" / "rank-0.log").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ResultsError, match=r"rank-0\.log"):
        mirror_of(spool, tmp_path, shared=shared)
    assert not (tmp_path / "elsewhere").exists()


@settings(max_examples=60)
@given(
    data=st.binary(max_size=400),
    cuts=st.lists(st.integers(0, 400), max_size=8),
    dropped=st.sets(st.integers(0, 8)),
    doubled=st.sets(st.integers(0, 8)),
)
def test_any_loss_and_repetition_of_notices_gives_the_same_log(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, cuts: list[int], dropped: set[int], doubled: set[int]
) -> None:
    folder = tmp_path_factory.mktemp("mirror")
    spool = spool_in(folder)
    mirror = mirror_of(spool, folder, shared=False)
    append(spool.log, data)
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    for number, (start, end) in enumerate(itertools.pairwise(edges)):
        for _ in range(0 if number in dropped else 2 if number in doubled else 1):
            mirror.receive("log", end, data[start:end])
    advance(mirror, len(data), 0)
    assert mirror.home_log.read_bytes() == data


def test_events_come_whole_however_they_are_cut(tmp_path: Path) -> None:
    spool = spool_in(tmp_path)
    mirror = mirror_of(spool, tmp_path, shared=False)
    lines = events.encode(events.Entered(1)) + events.encode(events.Finished(2))
    append(spool.events, lines)
    mirror.receive("events", 10, lines[:10])
    assert list(mirror.take_events()) == []
    advance(mirror, 0, len(lines))
    assert list(mirror.take_events()) == [events.Entered(1), events.Finished(2)]
    assert list(mirror.take_events()) == []


def test_lines_that_are_no_events_are_counted_and_left_out(tmp_path: Path) -> None:
    spool = spool_in(tmp_path)
    mirror = mirror_of(spool, tmp_path, shared=True)
    append(spool.events, b"rubbish\n" + events.encode(events.Finished(1)))
    advance(mirror, *spool.sizes())
    assert list(mirror.take_events()) == [events.Finished(1)]
    assert mirror.refused == 1


def test_source_that_is_gone_is_an_error(tmp_path: Path) -> None:
    spool = spool_in(tmp_path)
    mirror = mirror_of(spool, tmp_path, shared=False)
    with pytest.raises(OSError, match="announced"):
        advance(mirror, 10, 0)
