"""Records some steps of this rank with torch.profiler, and saves a trace as an artifact."""

from __future__ import annotations

import gzip
import os
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ddptrain.errors import one_line
from ddptrain.protocol import events
from ddptrain.protocol.rank_spec import RankSpec, StepProfile
from ddptrain.rank.output import ArtifactFiles, Emitter

if TYPE_CHECKING:
    import torch
    from torch.profiler import profile, record_function

FOLDER = "profile"  # below artifacts/
HOW_TO_REPORT = "report each step, with ctx.checkpoint(step=...), ctx.log(..., step=...) or ctx.progress(unit='steps')"
_END_BYTES = 4096
STEP_MARK = "ProfilerStep"  # the name by which TensorBoard's plugin and HolisticTraceAnalysis find steps
_GZIP_LEVEL = 3  # a fifth of the size, in a tenth of the time of level 9


class StepProfiler:
    """Records the steps of `wanted` on one rank. The workload reports the number of each step.

    The profile begins at the first report of a step >= wanted.first - 1 and ends at the first report of a step >=
    wanted.last. Reports of threads other than the one that created this object are ignored. No method raises, because a
    failed profile must not end the training.
    """

    def __init__(
        self, wanted: StepProfile, rank: int, device: torch.device, files: ArtifactFiles, emitter: Emitter
    ) -> None:
        self.wanted = wanted
        self.is_over = False
        self._rank, self._device, self._files, self._emitter = rank, device, files, emitter
        self._thread = threading.get_ident()
        self._step = -1  # the last reported step
        self._began_after = 0
        self._profile: profile | None = None
        self._step_mark: record_function | None = None

    def reported(self, step: int) -> None:
        """Handle the report that the workload has completed `step` (0: that it is about to begin)."""
        if self.is_over or step <= self._step or threading.get_ident() != self._thread:
            return
        before, self._step = self._step, step
        try:
            if self._profile is not None:
                if step < self.wanted.last:
                    self._mark(step + 1)
                else:
                    self._save()
            elif step >= self.wanted.last:
                between = f"they are between two reports, of steps {before} and {step}; {HOW_TO_REPORT}"
                self._give_up(between if before > 0 else f"the first report is of step {step}")
            elif step >= self.wanted.first - 1:
                self._begin(step)
        except Exception as error:  # the training continues, whatever torch.profiler raises
            self._discard(f"{type(error).__name__}: {one_line(error)}")

    def close(self, *, complete: bool) -> None:
        """End the profile with the workload: save the recorded steps if `complete`, else discard them."""
        if self.is_over:
            return
        try:
            if complete and self._profile is not None and self._step > self._began_after:
                self._save()
            elif complete:
                self._give_up(self._why_unseen)
            elif self._profile is not None:
                # The profile is not stopped: this takes seconds, and a rank that is being stopped may not have them.
                self._note(f"{self.wanted} were not recorded: rank {self._rank} has ended before", "info")
        except Exception as error:  # whatever torch.profiler raises, it must not replace the result of the rank
            self._discard(f"{type(error).__name__}: {one_line(error)}")
        self.is_over = True

    def _begin(self, step: int) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise Kineto writes its state to stderr
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.synchronize(self._device)  # kernels of earlier steps are not in the profile
        started = profile(activities=activities)
        started.start()
        self._profile, self._began_after = started, step
        self._mark(step + 1)

    def _mark(self, step: int | None) -> None:
        """End the mark of the current step in the trace, and begin the mark of `step` (None: of no step)."""
        from torch.profiler import record_function

        if self._step_mark is not None:
            self._step_mark.__exit__(None, None, None)
            self._step_mark = None
        if step is not None:
            self._step_mark = record_function(f"{STEP_MARK}#{step}")
            self._step_mark.__enter__()

    def _save(self) -> None:
        began = time.monotonic()
        stopped = self._stop()
        assert stopped is not None, "only during a profile"
        steps = StepProfile(self._began_after + 1, self._step)
        folder = f"{FOLDER}/steps-{steps.first}-{steps.last}"
        self._save_trace(stopped, f"{folder}/rank-{self._rank}.pt.trace.json.gz")
        took_s = time.monotonic() - began
        self._note(f"{steps} recorded in artifacts/{folder}, which took {took_s:.1f} s to write", "info")

    def _stop(self) -> profile | None:
        """End the recording and return it; None if there is none."""
        stopped, self._profile, self.is_over = self._profile, None, True
        if stopped is not None:
            self._mark(None)
            stopped.stop()
        return stopped

    def _save_trace(self, recorded: profile, path: str) -> None:
        """Compress the trace and announce it as an artifact. Raises OSError."""
        raw, staged = (self._files.new_staging(FOLDER) for _ in range(2))
        try:
            recorded.export_chrome_trace(str(raw))
            _require_complete(raw)
            with raw.open("rb") as source, gzip.open(staged, "wb", _GZIP_LEVEL) as target:
                shutil.copyfileobj(source, target, 1 << 20)
            self._files.announce(path, staged)
        except BaseException:
            staged.unlink(missing_ok=True)
            raise
        finally:
            raw.unlink(missing_ok=True)

    def _discard(self, reason: str) -> None:
        with suppress(Exception):  # torch.profiler may fail again; the first failure is the reason
            self._stop()
        self.is_over = True
        self._note(f"{self.wanted} of rank {self._rank} were not recorded: {reason}")

    def _give_up(self, reason: str) -> None:
        """End a profile that has not begun."""
        self.is_over = True
        if self._rank == self.wanted.speaker:
            self._note(f"{self.wanted} were not recorded: {reason}")

    @property
    def _why_unseen(self) -> str:
        if self._step <= 0:
            return f"the workload has reported no step; {HOW_TO_REPORT}"
        return f"the last reported step is {self._step}"

    def _note(self, text: str, level: str = "warning") -> None:
        if level == "warning" or self._rank == self.wanted.speaker:
            note(self._emitter, text, level)


def note(emitter: Emitter, text: str, level: str = "warning") -> None:
    """Tell the user about a profile."""
    with suppress(OSError):  # the disk is full
        emitter.emit(events.Note(time.time_ns(), f"profile: {text}", level))


def note_unused(spec: RankSpec, emitter: Emitter) -> None:
    """Report that no steps were recorded, for a script that has not called ddptrain.context()."""
    if spec.profile is not None and spec.rank == spec.profile.speaker:
        text = f"{spec.profile} were not recorded: the script has not called ddptrain.context(); {HOW_TO_REPORT}"
        note(emitter, text)


def _require_complete(path: Path) -> None:
    """Raise OSError if a trace is incomplete, because torch.profiler ignores a full disk."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _END_BYTES))
        end = file.read()
    if b'"traceName"' not in end or not end.rstrip().endswith(b"}"):
        raise OSError(f"the trace is cut off after {size:,} bytes: is the disk full?")
