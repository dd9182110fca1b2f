"""Handles the driver's commands in a rank: preempt (save and end), report stacks, and stop.

SIGTERM alone only announces that the host will stop; after the command to stop, it ends the rank.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddptrain.protocol import events
from ddptrain.protocol.commands import Command, CommandReader
from ddptrain.protocol.rank_spec import RankSpec
from ddptrain.rank import process_control
from ddptrain.rank.checkpoint.coordination import CheckpointCalls
from ddptrain.rank.emitter import Emitter
from ddptrain.rank.failure.stacks import StackReporter
from ddptrain.rank.trackers import RankTrackers

if TYPE_CHECKING:
    from ddptrain.tracking.protocol import State

_PREEMPT_MARGIN_S = 3.0  # the part of the grace period that the driver needs
_EXIT_S = 1.0  # time for a finished rank to exit by itself


@dataclass(frozen=True, eq=False)
class CommandHandler:
    """Executes a rank's commands in a thread.

    state: returns how the rank has ended, or "crashed" while it runs. report_handled: reports the exception that the
    user's code is handling.
    """

    spec: RankSpec
    emitter: Emitter
    commands: CommandReader
    calls: CheckpointCalls
    tracked: RankTrackers
    state: Callable[[], State]
    complete_saves: Callable[[], None]
    report_handled: Callable[[], None]

    def start(self) -> None:
        """Start to handle commands. Must be called in the main thread."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        os.register_at_fork(after_in_child=self._on_fork)
        self.commands.on(Command.NOTICED, lambda: self.emitter.emit(events.Noticed(time.time_ns())))
        self.commands.on(Command.PREEMPT, self._preempt)
        self.commands.on(Command.INTERRUPT, lambda: self._preempt(signal.SIGINT))
        self.commands.on(Command.HANG_UP, lambda: self._preempt(signal.SIGHUP))
        self.commands.on(Command.QUIT, lambda: self._preempt(signal.SIGQUIT))
        self.commands.on(Command.STOP, self._stop)
        self.commands.on(Command.STACKS, StackReporter(self.spec, self.emitter).report)
        self.commands.listen()

    def _on_sigterm(self, *_: object) -> None:
        try:
            self.commands.post(Command.NOTICED)
        except OSError:  # the user's code has closed all descriptors
            process_control.die_of_sigterm()

    def _owns_sigterm(self) -> bool:
        """Return whether our handler of SIGTERM is active, and not one that the user's code has set."""
        return signal.getsignal(signal.SIGTERM) == self._on_sigterm

    def _on_fork(self) -> None:
        if self._owns_sigterm():  # a forked child must end on SIGTERM, and not notify the driver for the rank
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _preempt(self, signum: int = signal.SIGTERM) -> None:
        """End after the next save. A workload that does not save here gets `signum`, with its child processes."""
        grace_s = self.spec.supervision.grace_s
        self.calls.notified = True
        self.tracked.hurry(grace_s - min(_PREEMPT_MARGIN_S, grace_s / 4))
        if self.state() != "crashed":
            return  # the rank is already ending
        if self.calls.saves:
            self.calls.tell_to_end()
        elif signum != signal.SIGTERM:
            if signal.getsignal(signum) == signal.SIG_DFL:
                self.tracked.finish("preempted")
            os.killpg(os.getpgrp(), signum)
        elif self._owns_sigterm():
            self.tracked.finish("preempted")
            process_control.die_of_sigterm()
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    def _stop(self) -> None:
        self.report_handled()
        self.tracked.hurry(self.spec.supervision.grace_s)
        is_own = self._owns_sigterm()
        if is_own:
            self.tracked.end(self.state())
        self.complete_saves()
        if not is_own:
            return
        self.tracked.finish(self.state())
        if self.tracked.is_on and self.state() != "crashed":
            time.sleep(_EXIT_S)  # the main thread has also finished, and is about to exit with its own code
        process_control.die_of_sigterm()
