"""What a rank does when it is told to save and end, to say where it is, or to stop.

SIGTERM is a notice that the host is about to go; only the order to stop makes it deadly.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddptrain.protocol import commands as orders
from ddptrain.protocol import events
from ddptrain.protocol.commands import Orders
from ddptrain.protocol.rank_spec import RankSpec
from ddptrain.rank.checkpoint.coordination import Calls
from ddptrain.rank.collective.calls import GangCalls
from ddptrain.rank.emitter import Emitter
from ddptrain.rank.server import process_control
from ddptrain.rank.stacks import Stacks
from ddptrain.rank.trackers import Tracked

if TYPE_CHECKING:
    from ddptrain.tracking.protocol import State

_PREEMPT_MARGIN_S = 3.0  # of the grace: what the driver keeps for itself
_EXIT_S = 1.0  # for a rank whose work is over to end by itself


@dataclass(frozen=True, eq=False)
class Obeying:
    """Takes the orders of one rank, in their thread; `state` tells how it has ended, "crashed" where it has not."""

    spec: RankSpec
    emitter: Emitter
    orders: Orders
    calls: Calls
    gang_calls: GangCalls
    tracked: Tracked
    state: Callable[[], State]
    complete_saves: Callable[[], None]

    def begin(self) -> None:
        """Take orders from now on; to be called in the main thread."""
        signal.signal(signal.SIGTERM, self._notice)
        os.register_at_fork(after_in_child=self._forked)
        self.orders.on(orders.NOTICED, lambda: self.emitter.emit(events.Noticed(time.time_ns())))
        self.orders.on(orders.PREEMPT, self._preempt)
        self.orders.on(orders.STOP, self._stop)
        self.orders.on(orders.STACKS, Stacks(self.spec, self.emitter, self.gang_calls).tell)
        self.orders.listen()

    def _notice(self, *_: object) -> None:
        self.orders.post(orders.NOTICED)

    def _is_ours(self) -> bool:
        """Whether SIGTERM comes to us, and not to the user's own handler, which has a say."""
        return signal.getsignal(signal.SIGTERM) == self._notice

    def _forked(self) -> None:
        if self._is_ours():  # a child that is told to end is not to speak for the rank
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _preempt(self) -> None:
        grace_s = self.spec.supervision.grace_s
        self.calls.notified = True
        self.tracked.hurry(grace_s - min(_PREEMPT_MARGIN_S, grace_s / 4))
        if self.state() != "crashed":
            return  # it ends anyway
        if self.calls.saves:
            self.calls.tell_to_end()
        elif self._is_ours():
            self.tracked.finish("preempted")
            process_control.die_of_sigterm()
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    def _stop(self) -> None:
        self.tracked.hurry(self.spec.supervision.grace_s)
        ours = self._is_ours()
        if ours:
            self.tracked.end(self.state())
        self.complete_saves()
        if not ours:
            return
        self.tracked.finish(self.state())
        if self.tracked.is_on and self.state() != "crashed":
            time.sleep(_EXIT_S)  # the main thread has waited for the same, and ends with its own exit code
        process_control.die_of_sigterm()
