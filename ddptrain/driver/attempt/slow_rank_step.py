"""The part of the attempt's state machine that finds, explains and moves slow ranks."""

from __future__ import annotations

from ddptrain.config.wording import counted
from ddptrain.driver.attempt import actions, inbox
from ddptrain.driver.attempt.state import Draft
from ddptrain.driver.failure.slow_causes import RankUse, causes
from ddptrain.driver.failure.slow_ranks import Window
from ddptrain.protocol import events
from ddptrain.protocol.commands import Command
from ddptrain.protocol.worker_notices import SystemSample


class SlowRankDraft(Draft):
    """A step that may concern slow ranks."""

    def on_sample(self, sample: SystemSample) -> None:
        """Keep the newest system metrics of each rank, and record the sample."""
        uses = list(self.state.uses)
        for name, use in sample.ranks.items():
            if (rank := int(name)) < len(uses):
                uses[rank] = RankUse(use, sample.use, sample.host)
        self.change(uses=tuple(uses))
        self.do(actions.RecordSystem(sample))

    def on_step_times(self, rank: int, event: events.StepTimes) -> None:
        """Compare the ranks after a window of steps of one rank, and report slow ranks."""
        state = self.state
        window = Window(event.steps, event.own_s, event.waited_s)
        if state.steps is None or state.stopping or state.faults or not window.is_valid:
            return
        steps, slow_ranks = state.steps.after(rank, window)
        self.change(steps=steps)
        for slow in slow_ranks:
            self.do(actions.RecordSlowRank(slow, tuple(causes(slow.rank, state.uses))))
        if slow_ranks and state.replaces and not state.moving and state.notice is None:
            self.do(actions.FindSpareSlots(tuple(slow.rank for slow in slow_ranks)))

    def on_spare_slots(self, spare: inbox.SpareSlots) -> None:
        """Command the ranks to save and end, so that the next attempt begins without the slots of the slow ranks."""
        if self.state.stopping or self.state.moving:
            return
        what = counted(len(spare.ranks), "slot")
        if not spare.found:
            self.do(actions.Announce(f"failure.slow: {what} on another host would be needed, and none is free"))
            return
        names = ", ".join(str(rank) for rank in spare.ranks)
        self.change(moving=True)
        self.do(actions.Announce(f"rank {names} moves to another host with the next call of ctx.checkpoint"))
        self.do(actions.SendCommand(self.alive(), Command.MOVE))
