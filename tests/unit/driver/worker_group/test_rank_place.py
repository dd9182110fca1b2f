"""Where ranks run, and what their workers see."""

from __future__ import annotations

import pytest

from ddptrain.clusters.scheduler.slots import Slot
from ddptrain.driver.worker_group import rank_place
from ddptrain.driver.worker_group.rank_place import rank_places


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
