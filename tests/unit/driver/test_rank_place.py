"""Where ranks run, and what their workers see."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddptrain.clusters.scheduler.slots import Slot
from ddptrain.driver import ranks as rank_place
from ddptrain.driver.ranks import RankPlace, rank_places


@pytest.mark.parametrize(
    ("mine", "theirs", "same"),
    [("boot1 mnt:[1]", "boot1 mnt:[1]", True), ("boot1 mnt:[1]", "boot1 mnt:[2]", False), ("", "", False)],
)
def test_worker_with_the_drivers_view_sees_the_same_files(
    mine: str, theirs: str, *, same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_place, "file_view", lambda: mine)
    about = {"w": {"gpus": "", "hostname": "h", "scratch": "/s", "files": theirs}}
    (place,) = rank_places([Slot("w", "h", 0, False, True)], about, {"w": True})
    assert place.same_files is same


def test_worker_that_does_not_say_what_it_sees_gets_copies() -> None:
    about = {"w": {"gpus": "", "hostname": "h", "scratch": "/s"}}
    (place,) = rank_places([Slot("w", "h", 0, False, True)], about, {"w": True})
    assert not place.same_files


def test_ranks_are_numbered_by_slot_and_hosts_by_their_first_rank() -> None:
    gpus = {"w": "GPU-a,GPU-b", "v": ""}
    about = {worker: {"gpus": gpus[worker], "hostname": f"host-{worker}", "scratch": f"/{worker}"} for worker in "wv"}
    slots = [Slot("w", "10.0.0.1", 1, True, True), Slot("v", "127.0.0.1", 0, False, True)]
    slots.append(Slot("w", "10.0.0.1", 2, True, True))
    first, second, third = rank_places(slots, about, {"w": False, "v": True})
    assert first == RankPlace(0, 0, 2, 0, slots[0], "host-w", Path("/w"), False, "GPU-b")
    assert second == RankPlace(1, 0, 1, 1, slots[1], "host-v", Path("/v"), True, "")
    assert third == RankPlace(2, 1, 2, 0, slots[2], "host-w", Path("/w"), False, "")
    assert not first.same_files
    assert [place.host for place in (first, second)] == ["host-w (10.0.0.1)", "host-v"]
