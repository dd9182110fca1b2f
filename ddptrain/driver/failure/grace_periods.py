"""The grace periods of ranks after a failure, or when they are told to end. All times are in seconds."""

from __future__ import annotations

from ddptrain.protocol.rank_spec import RankSpec

SETTLE_S = 0.15  # after the first fault, because an earlier fault of another rank may still arrive
VICTIM_SETTLE_S = 1.5  # after a victim's fault, because the root cause has not arrived yet
CLEAN_UP_S = 2.0  # for the clean-up of a rank that failed by itself, before it is stopped as well
STOP_MARGIN_S = 3.0  # after grace_s, until the exit of a rank must have arrived
PREEMPT_STOP_S = 1.0  # between SIGTERM and SIGKILL for ranks that did not save in time
_AT_ONCE_S = 1.0  # for ranks that have nothing to save
_HUNG_S = 2.0  # for ranks that hang
_TRACKERS_S = 10.0  # for the trackers of such ranks to report the end


def preempt_s(spec: RankSpec) -> float:
    """Return the time in which ranks must save after a preemption notice; `spec` is rank 0's."""
    return spec.supervision.grace_s - min(STOP_MARGIN_S, spec.supervision.grace_s / 4)


def at_once_s(spec: RankSpec) -> float:
    """Return the grace period of ranks that have nothing to save; `spec` is rank 0's."""
    return min(_TRACKERS_S, spec.supervision.grace_s) if spec.tracking else _AT_ONCE_S


def hung_s(spec: RankSpec) -> float:
    """Return the grace period of ranks that hang; `spec` is rank 0's."""
    return min(_TRACKERS_S if spec.tracking else _HUNG_S, spec.supervision.grace_s)
