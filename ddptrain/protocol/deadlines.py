"""How long each process waits for the one below it to end. All times are in seconds.

    driver          asks the ranks to save (`preempt_s`), or stops them: SIGTERM, after `grace_s` SIGKILL.
      │             Ranks that have not ended STOP_MARGIN_S after that are given up.
      worker        stops ranks as the driver says. If its driver has ended: after RELEASED_GRACE_S at most.
        │           If it is sent SIGTERM itself: the ranks' grace period, and LEAVE_MARGIN_S for downloads.
        rank server sends the signals. If its worker has ended: SIGKILL ORPHAN_GRACE_S after SIGTERM.
          │         The worker waits SERVER_END_S for it.
          rank      saves at the agreed step and ends, with its trackers, within the grace period.

`grace_s` is failure.grace_s of the configuration. A worker that sends no news for failure.lost_after_s is lost, with
its ranks; it sends some at least every alive_s().
"""

from __future__ import annotations

from typing import Any

from ddptrain.protocol.rank_spec import RankSpec

# The driver, after a fault.
SETTLE_S = 0.15  # after the first fault, because an earlier fault of another rank may still arrive
VICTIM_SETTLE_S = 1.5  # after a victim's fault, because the root cause has not arrived yet
CLEAN_UP_S = 2.0  # for the clean-up of a rank that failed by itself, before it is stopped as well
STOP_MARGIN_S = 3.0  # after the grace period, until the exit of a rank must have arrived
PREEMPT_STOP_S = 1.0  # between SIGTERM and SIGKILL for ranks that did not save in time
_AT_ONCE_S = 1.0  # for ranks that have nothing to save
_HUNG_S = 2.0  # for ranks that hang
_TRACKERS_S = 10.0  # for the trackers of such ranks to report the end

# The worker.
_ALIVE_S = 2.0  # the longest time between two messages of a worker
RELEASED_GRACE_S = 5.0  # the longest grace period of ranks whose driver has ended, because other runs wait for the slot
LEAVE_MARGIN_S = 5.0  # after the ranks' grace period, for downloads by the driver
STORE_LOST_GRACE_S = 2.0  # for a rank to complete its checkpoint after its store has died
SERVER_END_S = 8.0  # for the rank server to end: the last grace period of its ranks, and a margin
HOST_END_S = 5.0  # for ranks to end after a foreign worker has closed the connection: SIGKILL follows after 2 s

# The rank server.
ORPHAN_GRACE_S = 2.0  # between SIGTERM and SIGKILL for ranks whose worker has ended

# The driver, at the end.
CLOSE_SILENCE_S = 60.0  # after an error of the driver: for transfers that move nothing
UPLOAD_S = 900.0  # for the last uploads to an object store


def preempt_s(spec: RankSpec) -> float:
    """Return the time in which ranks must save after a preemption notice; `spec` is rank 0's."""
    grace_s: float = spec.config.failure.grace_s
    return grace_s - min(STOP_MARGIN_S, grace_s / 4)


def at_once_s(spec: RankSpec) -> float:
    """Return the grace period of ranks that have nothing to save; `spec` is rank 0's."""
    return min(_TRACKERS_S, spec.config.failure.grace_s) if spec.tracking else _AT_ONCE_S


def hung_s(spec: RankSpec) -> float:
    """Return the grace period of ranks that hang; `spec` is rank 0's."""
    grace_s: float = spec.config.failure.grace_s
    return min(_TRACKERS_S if spec.tracking else _HUNG_S, grace_s)


def alive_s(failure: Any) -> float:
    """Return the seconds between two messages of a worker about ranks that are silent: short enough for both limits.

    failure: the section of the configuration, or its copy in a spec.
    """
    lost_s: float = failure.lost_after_s
    limit_s = failure.hang_timeout_s if isinstance(failure.hang_timeout_s, float) else lost_s
    return min(_ALIVE_S, lost_s / 4, limit_s / 4)
