"""How long ranks are given for what, in seconds, once something has gone wrong or they are told to end."""

from __future__ import annotations

from ddptrain.protocol.rank_spec import RankSpec

SETTLE_S = 0.15  # after the first fault: an earlier one of another rank may still be on its way
VICTIM_SETTLE_S = 1.5  # after a fault of which another must be the cause
CLEAN_UP_S = 2.0  # for a rank that has failed by itself to run its own clean-up, before it is stopped, too
STOP_MARGIN_S = 3.0  # beyond grace_s, for the word of a rank's end to arrive
_AT_ONCE_S = 1.0  # for ranks that have nothing to save
_HUNG_S = 2.0  # for ranks that hang: they have had their time
_TRACKERS_S = 10.0  # for those of such ranks to tell how they have ended


def at_once_s(spec: RankSpec) -> float:
    """The grace of ranks that have nothing to save; `spec` is rank 0's, which has trackers where any has."""
    return min(_TRACKERS_S, spec.supervision.grace_s) if spec.tracking else _AT_ONCE_S


def hung_s(spec: RankSpec) -> float:
    """The grace of ranks that hang; `spec` is rank 0's."""
    return min(_TRACKERS_S if spec.tracking else _HUNG_S, spec.supervision.grace_s)
