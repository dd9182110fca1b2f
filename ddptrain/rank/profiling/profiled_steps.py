"""ctx.profile, and the section `profile` of the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddptrain.protocol.rank_spec import RankSpec, StepProfile
from ddptrain.rank.artifact_files import ArtifactFiles
from ddptrain.rank.emitter import Emitter
from ddptrain.rank.plain_numbers import whole
from ddptrain.rank.profiling.step_profiler import HOW_TO_REPORT, StepProfiler, note
from ddptrain.rank.steps.timed_activities import TimedActivities

if TYPE_CHECKING:
    import torch


class ProfiledSteps(TimedActivities):
    """The part of a rank's context that records steps.

    `_profiler` is None while there is no profile, which costs no time.
    """

    _files: ArtifactFiles
    device: torch.device
    _profiler: StepProfiler | None = None
    _last_profiled = 0

    @property
    def _known_step(self) -> int:
        """The last step that was saved or resumed; 0 at the beginning."""
        raise NotImplementedError

    def profile(self, steps: tuple[int, int], *, ranks: Sequence[int] | None = None) -> None:
        """Record the steps `steps[0]` to `steps[1]` (counted from 1, both included) with torch.profiler.

        `ranks`: None for every rank that calls this method. Writes a Chrome trace,
        artifacts/profile/steps-<a>-<b>/rank-<r>.pt.trace.json.gz.

        A step is complete when the workload reports it with ctx.checkpoint(step=), ctx.log(step=) or
        ctx.progress(unit="steps"). The profile begins at the first report of a step >= steps[0] - 1 (with steps[0] = 1
        in this call) and ends at the first report of a step >= steps[1]. A profile that fails is a warning.

        Raises:
            TypeError: a step or a rank is not an integer.
            ValueError: the steps are reversed, below 1 or more than 100, or another profile is not over.
        """
        first, last = (whole("step", step) for step in steps)
        wanted = StepProfile(first, last, tuple(whole("rank", rank) for rank in ranks or ()))
        if problem := wanted.problem:
            raise ValueError("ctx.profile(steps={}): {}; {}".format(tuple(steps), *problem))
        if self._profiler is not None:
            raise ValueError(
                f"ctx.profile: the profile of {self._profiler.wanted} is not over; leave out one of them (the section "
                "`profile` of the configuration counts, too)"
            )
        self._watch_steps(wanted)
        self._report_step(max(self._known_step, self._last_profiled))

    def _watch_steps(self, wanted: StepProfile | None) -> None:
        if wanted is None:
            return
        missing = sorted(rank for rank in set(wanted.ranks) if not 0 <= rank < self.world_size)
        if missing and self.rank == 0:
            names = ", ".join(map(str, missing[:10]))
            note(self._emitter, f"there is no rank {names}: the run has ranks 0 to {self.world_size - 1}")
        if wanted.includes(self.rank):
            self._profiler = StepProfiler(wanted, self.rank, self.device, self._files, self._emitter)

    def _report_step(self, step: int) -> None:
        """Tell the profiler, if there is one, that a step is over."""
        if self._profiler is not None:
            self._profiler.reported(step)
            if self._profiler.is_over:
                self._profiler, self._last_profiled = None, step

    def end_profile(self, *, complete: bool) -> None:
        """End the current profile with the workload: save it if `complete`, else discard it."""
        if self._profiler is not None:
            self._profiler.close(complete=complete)
            self._profiler = None


def note_unused(spec: RankSpec, emitter: Emitter) -> None:
    """Report that no steps were recorded, for a script that has not called ddptrain.context()."""
    if spec.profile is not None and spec.rank == spec.profile.speaker:
        text = f"{spec.profile} were not recorded: the script has not called ddptrain.context(); {HOW_TO_REPORT}"
        note(emitter, text)
