"""What several trackers, each in its thread, are handed at once."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, get_args

import pytest

from ddptrain.tracking import items


@pytest.mark.parametrize("kind", get_args(items.Item))
def test_items_can_not_be_changed_by_the_trackers_that_share_them(kind: Any) -> None:
    made = object.__new__(kind)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.time_ns = 1


def test_item_says_where_in_the_training_it_belongs() -> None:
    image = items.Image(1, "examples", Path("a.png"), "a cat", 5)
    table = items.Table(1, "predictions", ("image", "score"), ((image, 0.5),), 5)
    assert table.rows[0][0] == image
    assert (image.step, table.step, items.Numbers(1, {}).step) == (5, 5, None)
