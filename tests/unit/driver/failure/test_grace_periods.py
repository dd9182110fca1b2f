"""How long ranks get to save, to clean up, and to end."""

from __future__ import annotations

import pytest

from ddptrain.driver.failure.grace_periods import at_once_s, hung_s, preempt_s
from ddptrain.protocol.rank_spec import TrackingSpec
from tests.unit.specs import make_spec

TRACKED = TrackingSpec(trackers=())


@pytest.mark.parametrize(
    ("grace_s", "tracking", "preempt", "at_once", "hung"),
    [
        (30.0, None, 27.0, 1.0, 2.0),
        (30.0, TRACKED, 27.0, 10.0, 10.0),  # the trackers report the end
        (4.0, TRACKED, 3.0, 4.0, 4.0),  # of a short grace period a quarter is for the exit of the ranks
        (1.0, None, 0.75, 1.0, 1.0),
    ],
)
def test_grace_periods_follow_from_grace_s_and_the_trackers(
    grace_s: float, tracking: TrackingSpec | None, preempt: float, at_once: float, hung: float
) -> None:
    spec = make_spec(grace_s=grace_s, tracking=tracking)
    assert (preempt_s(spec), at_once_s(spec), hung_s(spec)) == (preempt, at_once, hung)
