"""The parts of a W&B run on the disk, and which of them have to be sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddptrain.tracking.wandb.wandb_folders import (
    ARTIFACTS,
    OPEN,
    SENT,
    UNSENT,
    RunPart,
    links_in,
    parts_below,
    unsent_parts,
)


def make(folder: Path, time: str, run_id: str = "w1", *, offline: bool = False, mark: str | None = None) -> None:
    part = folder / f"{'offline-' if offline else ''}run-20250101_{time}-{run_id}"
    part.mkdir(parents=True)
    (part / f"run-{run_id.partition('-')[0]}.wandb").touch()
    if mark is not None:
        (part / UNSENT).write_text(mark)


def times(parts: list[RunPart]) -> list[str]:
    return [part.began.partition("_")[2] for part in parts]


@pytest.mark.parametrize(
    ("offline", "mark", "is_sent"),
    [(True, None, False), (False, None, True), (False, SENT, True), (False, OPEN, False), (False, "", False)],
)
def test_part_is_sent_by_its_mark(tmp_path: Path, offline: bool, mark: str | None, is_sent: bool) -> None:
    make(tmp_path, "000001", offline=offline, mark=mark)
    (part,) = parts_below(tmp_path)
    assert part.sent is is_sent
    part.log.with_suffix(".wandb.synced").touch()
    assert part.sent


def test_part_of_which_the_artifacts_are_still_to_be_logged_waits(tmp_path: Path) -> None:
    make(tmp_path, "000001", offline=True, mark=ARTIFACTS)
    (part,) = parts_below(tmp_path)
    part.log.with_suffix(".wandb.synced").touch()
    assert not part.sent
    (part.folder / UNSENT).write_text(SENT)
    assert part.sent


def test_killed_part_is_not_sent_again_if_the_run_continued_online(tmp_path: Path) -> None:
    make(tmp_path, "000001", mark=OPEN)
    assert times(unsent_parts(parts_below(tmp_path))) == ["000001"]
    make(tmp_path, "000002", mark=SENT)
    assert unsent_parts(parts_below(tmp_path)) == []
    make(tmp_path, "000003", mark=OPEN)
    assert times(unsent_parts(parts_below(tmp_path))) == ["000003"], "nothing came after it"


def test_part_that_ended_without_being_sent_waits_whatever_came_after_it(tmp_path: Path) -> None:
    make(tmp_path, "000001", mark="")
    make(tmp_path, "000002", mark=SENT)
    assert times(unsent_parts(parts_below(tmp_path))) == ["000001"]


def test_rank_of_a_shared_run_is_sent_as_a_run_of_its_own(tmp_path: Path) -> None:
    make(tmp_path, "000001", "w1-rank_2", mark=OPEN)
    make(tmp_path, "000002", "w1", mark=SENT)
    shared, whole = parts_below(tmp_path)
    assert (shared.run_id, shared.rank, shared.target) == ("w1", "rank_2", "w1-rank_2")
    assert (whole.run_id, whole.rank, whole.target) == ("w1", "", "w1")
    assert unsent_parts([shared, whole]) == [shared], "the other run continued, this one did not"


def test_other_folders_and_links_are_no_parts(tmp_path: Path) -> None:
    make(tmp_path / "below", "000001")
    (tmp_path / "run-20250101_000002-w2").mkdir()
    (tmp_path / "run-20250101_000002-w2" / "run-w2.wandb").symlink_to(tmp_path / "elsewhere")
    make(tmp_path / "two" / "deep", "000003")
    assert times(parts_below(tmp_path)) == ["000001"]
    assert parts_below(tmp_path / "missing") == []


def test_damaged_links_are_none(tmp_path: Path) -> None:
    assert links_in(tmp_path) == {}
    (tmp_path / "links.json").write_text('{"w1": "http://x"}')
    assert links_in(tmp_path) == {"w1": "http://x"}
    for damaged in ("[1]", "{", "3"):
        (tmp_path / "links.json").write_text(damaged)
        assert links_in(tmp_path) == {}
