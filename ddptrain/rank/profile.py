"""Records some steps of this rank with torch.profiler, and saves a trace as an artifact."""

from __future__ import annotations

import gzip
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from ddptrain.config.rank_settings import StepProfile
from ddptrain.errors import one_line
from ddptrain.protocol.rank_spec import RankSpec
from ddptrain.rank.output import ArtifactFiles, Emitter

if TYPE_CHECKING:
    import torch
    from torch.profiler import profile

FOLDER = "profile"  # below artifacts/
HOW_TO_REPORT = "report each step, with ctx.checkpoint(step=...), ctx.log(..., step=...) or ctx.progress(unit='steps')"
_GZIP_LEVEL = 3  # a fifth of the size, in a tenth of the time of level 9


class StepProfiler:
    """The profile of this rank, if the section `profile` of the configuration names some of its steps.

    The workload reports the number of each step. A profile of the steps a to b begins at the first report of a step >=
    a - 1 and ends at the first report of a step >= b. A failed profile does not end the training.
    """

    def __init__(self, spec: RankSpec, device: torch.device, files: ArtifactFiles, emitter: Emitter) -> None:
        self._rank, self._device, self._files, self._emitter = spec.rank, device, files, emitter
        wanted, last_rank = spec.profile, spec.placement.world_size - 1
        self._wanted = wanted if wanted is not None and wanted.includes(spec.rank) else None  # None when it is over
        self._profile: profile | None = None  # while it records
        self._step = -1  # the last reported step
        self._began_after = 0
        if wanted is not None and (missing := [rank for rank in wanted.ranks if rank > last_rank]) and spec.rank == 0:
            self._note(f"there is no rank {', '.join(map(str, missing))}: the run has ranks 0 to {last_rank}")

    def reported(self, step: int) -> None:
        """Handle the report that the workload has completed `step` (0: that it is about to begin)."""
        wanted = self._wanted
        if wanted is None or step <= self._step:
            return
        before, self._step = self._step, step
        with self._failing_quietly(wanted):
            if self._profile is not None and step < wanted.last:
                self._profile.step_num = step
                self._profile.step()  # marks the next step in the trace
            elif self._profile is not None:
                self._save(wanted, self._profile)
            elif step >= wanted.last:
                self._end(wanted, f"after step {max(before, 0)}, step {step} was reported; {HOW_TO_REPORT}")
            elif step >= wanted.first - 1:
                self._begin(step)

    def close(self, *, complete: bool) -> None:
        """End the current profile with the workload: save the recorded steps if `complete`, else discard them."""
        if (wanted := self._wanted) is None:
            return
        with self._failing_quietly(wanted):
            if complete and self._profile is not None and self._step > self._began_after:
                self._save(wanted, self._profile)
            elif complete:
                self._end(wanted, f"the last reported step is {max(self._step, 0)}; {HOW_TO_REPORT}")
            elif self._profile is not None:
                # It is not stopped: this takes seconds, and a rank that is being stopped may not have them.
                self._end(wanted, "the rank has ended before", "info")

    @contextmanager
    def _failing_quietly(self, wanted: StepProfile) -> Iterator[None]:
        """Report what torch.profiler raises, and end the profile: the training continues."""
        try:
            yield
        except Exception as error:
            if (failed := self._profile) is not None:
                with suppress(Exception):  # torch.profiler may fail again; the first failure is the reason
                    failed.stop()
            self._wanted = self._profile = None
            self._note(f"{wanted} of rank {self._rank} were not recorded: {type(error).__name__}: {one_line(error)}")

    def _begin(self, step: int) -> None:
        import torch
        from torch.profiler import ProfilerAction, ProfilerActivity, profile

        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise Kineto writes its state to stderr
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.synchronize(self._device)  # kernels of earlier steps are not in the profile
        # Only the reports say when the profile ends, because a workload may not report every step.
        started = profile(activities=activities, schedule=lambda _: ProfilerAction.RECORD)
        started.step_num = step + 1
        started.start()
        self._profile, self._began_after = started, step

    def _save(self, wanted: StepProfile, recorded: profile) -> None:
        """Stop recording, compress the trace and announce it as an artifact. Raises OSError."""
        began = time.monotonic()
        self._wanted = self._profile = None
        recorded.stop()
        steps = StepProfile(self._began_after + 1, self._step)
        folder = f"{FOLDER}/steps-{steps.first}-{steps.last}"
        raw, staged = (self._files.new_staging(FOLDER) for _ in range(2))
        try:
            recorded.export_chrome_trace(str(raw))
            with raw.open("rb") as source, gzip.open(staged, "wb", _GZIP_LEVEL) as target:
                shutil.copyfileobj(source, target, 1 << 20)
        finally:
            raw.unlink(missing_ok=True)
        self._files.announce(f"{folder}/rank-{self._rank}.pt.trace.json.gz", staged)
        if self._rank == wanted.speaker:
            took_s = time.monotonic() - began
            self._note(f"{steps} recorded in artifacts/{folder}, which took {took_s:.1f} s to write", "info")

    def _end(self, wanted: StepProfile, reason: str, level: str = "warning") -> None:
        self._wanted = self._profile = None
        if self._rank == wanted.speaker:
            self._note(f"{wanted} were not recorded: {reason}", level)

    def _note(self, text: str, level: str = "warning") -> None:
        self._emitter.note(f"profile: {text}", level)


def note_unused(spec: RankSpec, emitter: Emitter) -> None:
    """Report that no steps were recorded, for a script that has not called ddptrain.context()."""
    if spec.profile is not None and spec.rank == spec.profile.speaker:
        text = f"{spec.profile} were not recorded: the script has not called ddptrain.context(); {HOW_TO_REPORT}"
        emitter.note(f"profile: {text}", "warning")
