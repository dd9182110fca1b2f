"""A rank is slow if the other ranks wait for it for a fifth of each step."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ddptrain.driver.recorder import STEPS, SlowRank, SlowRanks
from ddptrain.protocol.events import StepTimes


def named(waits: Sequence[Sequence[float]], compute: Sequence[float], step_s: float = 1.0) -> SlowRank | None:
    """What is found after these waits of each rank in its last steps."""
    ranks, found = SlowRanks(len(waits)), None
    for number in range(STEPS):
        for rank, of_rank in enumerate(waits):
            found = ranks.after(rank, StepTimes(1, step_s, compute[rank], of_rank[number]))
    return found


@pytest.mark.parametrize(
    ("waits", "compute", "expected"),
    [
        ([[0.5] * 5, [0.1] * 5], [0.5, 0.9], SlowRank(1, 0.9, 0.5, computes=True)),
        ([[0.5] * 5, [0.1] * 5], [0.5, 0.5], SlowRank(1, 0.9, 0.5, computes=False)),
        ([[0.28] * 5, [0.1] * 5], [0.5, 0.9], None),  # the others wait for less than a fifth
        ([[0.5, 0.0, 0.5, 0.5, 0.0], [0.1] * 5], [0.5, 0.9], None),  # not in each step
        ([[0.5, 0.0, 0.5, 0.5, 0.5], [0.9, 0.1, 0.1, 0.1, 0.1]], [0.5, 0.9], SlowRank(1, 0.9, 0.5, computes=True)),
        ([[0.4] * 5, [0.4] * 5, [0.0] * 5, [0.5] * 5], [0.5] * 4, SlowRank(2, 1.0, 0.6, computes=False)),
        ([[0.4] * 5, [0.4] * 5, [0.4] * 5, [0.4] * 5], [0.5] * 4, None),  # a slow network
    ],
)
def test_slow_rank(waits: Sequence[Sequence[float]], compute: Sequence[float], expected: SlowRank | None) -> None:
    assert named(waits, compute) == expected


def test_no_rank_is_slow_before_all_have_reported_their_steps() -> None:
    ranks = SlowRanks(2)
    found = [ranks.after(1, StepTimes(1, 1.0, 0.9, 0.0)) for _ in range(2 * STEPS)]
    assert found == [None] * (2 * STEPS)
