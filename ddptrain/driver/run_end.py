"""The end of a run: whether another attempt follows, its status, exit code and root cause."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddptrain.driver.fault import LOSSES, FaultKind, format_ranks
from ddptrain.errors import DdptrainError, ExitCode, Interrupted, limit_error, one_line
from ddptrain.results.run_record import ENDED_BY_STOP, FailureRecord, RunStatus, root_cause
from ddptrain.text_tables import duration

if TYPE_CHECKING:
    from ddptrain.config.run_config import FailureConfig
    from ddptrain.driver.fault import Fault
    from ddptrain.driver.ranks import AttemptEnd, Rank
    from ddptrain.results.run import Run
    from ddptrain.results.run_writer import RunWriter


@dataclass(frozen=True, slots=True)
class RunEnd:
    """The end of a run; `failure` contains the root cause, None for a success. `more` follows it in the last line."""

    status: RunStatus
    exit_code: int
    failure: FailureRecord | None = None
    more: str = ""

    @property
    def line(self) -> str:
        """The root cause, and what to do; "" for a success."""
        return root_cause(self.failure) + self.more


def judge_attempt(end: AttemptEnd, writer: RunWriter) -> RunEnd:
    """Return the end of a run after its last attempt."""
    if end.finished and not end.fault and not end.unsaved:
        return RunEnd(RunStatus.SUCCEEDED, ExitCode.SUCCEEDED)
    if end.loss is not None:
        return judge_error(end.loss, writer)
    if end.fault is not None and not (end.fault.victim and (end.notice is not None or end.signum is not None)):
        return _failed(end, end.fault, writer.layout, describe_fault(end.fault, end.ranks))
    if end.signum not in (None, signal.SIGTERM) or end.unsaved:
        return _interrupted(end.signum or signal.SIGTERM, writer, end)
    if end.notice is not None and writer.record.checkpoints:
        return _preempted(end.notice, _to_continue(writer, end))
    if end.saved_itself:
        # Exit code 75 says that the ranks have saved, 0 does not.
        by_zero = any(rank.ended is not None and rank.ended.status == 0 for rank in end.ranks)
        what = "the script ended by itself" if by_zero else "it has saved its state"
        return _preempted(end.notice or "the script ended with exit code 75", f"{what}: run it again to continue")
    if end.signum is not None:
        return _interrupted(end.signum, writer, end)
    text = end.notice or "the ranks ended before their work was done"
    failure = FailureRecord(kind="worker_lost", message=text, cause=text)
    return RunEnd(RunStatus.FAILED, ExitCode.CLUSTER, failure, f"; {_to_continue(writer, end)}")


def _preempted(notice: str, more: str) -> RunEnd:
    """Return the end of a run that was asked to end, and can continue."""
    failure = FailureRecord(kind="preempted", message=notice, cause=notice)
    return RunEnd(RunStatus.PREEMPTED, ExitCode.PREEMPTED, failure, f"; {more}")


def _to_continue(writer: RunWriter, end: AttemptEnd | None = None) -> str:
    """Return the newest checkpoint, with its age if it is older than the signal, and how to continue from it."""
    unsaved = f"{end.unsaved} was not saved, " if end is not None and end.unsaved else ""
    if not writer.record.checkpoints:
        return f"{unsaved}there is no checkpoint to continue from"
    newest = writer.record.checkpoints[0]
    saved = f"checkpoint {newest} is saved"
    if unsaved:
        saved = f"{unsaved}the newest checkpoint is {newest}"
    elif end is not None and end.age_s is None:
        saved = f"no checkpoint was saved in this attempt, the newest one is {newest}"
    elif end is not None and end.age_s is not None and end.age_s > 0:
        saved = f"no checkpoint was saved after that, {newest} is {duration(end.age_s)} older"
    return f"{saved}, continue with --resume {writer.run_id}"


def describe_fault(fault: Fault, ranks: Sequence[Rank]) -> str:
    """Return the root cause of an attempt in one line."""
    if fault.kind is FaultKind.PARAMS:  # the same on all ranks
        return fault.line
    what = "hung" if fault.kind is FaultKind.HANG else "failed first"
    return f"rank {fault.rank} on {ranks[fault.rank].record().host} {what}: {fault.line}{_others(ranks, fault.rank)}"


def _failed(end: AttemptEnd, fault: Fault, layout: Run, cause: str) -> RunEnd:
    log = layout.shown_path(layout.log(fault.rank))
    failure = fault.record(end.ranks[fault.rank].record().host, log, cause)
    return RunEnd(RunStatus.FAILED, fault.exit_code, failure, f"; log: {log}")


def _others(ranks: Sequence[Rank], first: int) -> str:
    """Return text about other failed ranks: those with the same error, and the victims; "" if there are none."""
    first_fault = ranks[first].fault
    others = [(rank.spec.rank, rank.fault) for rank in ranks if rank.spec.rank != first and rank.fault is not None]
    victims = [rank for rank, fault in others if fault.victim]
    same = [rank for rank, fault in others if not fault.victim and first_fault and fault.line == first_fault.line]
    parts = [f"the same error: {_counted_ranks(same)}"] if same else []
    parts += [f"failed as a consequence: {_counted_ranks(victims)}"] if victims else []
    return f" ({'; '.join(parts)})" if parts else ""


def _counted_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {format_ranks(ranks)}"


def judge_error(error: BaseException, writer: RunWriter) -> RunEnd:
    """Return the end of a run that an error of the driver or the cluster ended."""
    if isinstance(error, Interrupted):
        if error.signum == signal.SIGTERM and writer.record.checkpoints:
            return _preempted(was_sent(error.signum), _to_continue(writer))
        return _interrupted(error.signum, writer)
    error = limit_error(error) or error
    kind, text = type(error).__name__, str(error)
    if isinstance(error, DdptrainError):
        failure = FailureRecord(kind="infrastructure", type=kind, message=text, cause=one_line(error))
        return RunEnd(RunStatus.FAILED, error.exit_code, failure, text.strip().removeprefix(one_line(error)))
    trace = "".join(traceback.format_exception(error))
    cause = f"a bug in ddptrain: {error!r}"
    failure = FailureRecord(kind="driver", type=kind, message=text, traceback=trace, cause=cause)
    return RunEnd(RunStatus.FAILED, ExitCode.INTERNAL, failure)


def was_sent(signum: int) -> str:
    """Return the text for a signal to the driver, as the reason why ranks are stopped or told to save and end."""
    return f"the driver was sent {signal.Signals(signum).name}"


def name_stop_command(end: RunEnd) -> RunEnd:
    """Return the end of a run that `ddptrain stop` has ended, with the command in place of the signal."""
    failure = end.failure
    if failure is None or failure.message not in (was_sent(signal.SIGINT), was_sent(signal.SIGTERM)):
        return end
    return replace(end, failure=replace(failure, message=ENDED_BY_STOP, cause=ENDED_BY_STOP))


def _interrupted(signum: int, writer: RunWriter, end: AttemptEnd | None = None) -> RunEnd:
    name = signal.Signals(signum).name
    cause = (end and end.quit) or f"interrupted by {name}"
    message = (end and end.quit) or was_sent(signum)
    failure = FailureRecord(kind="interrupted", type=name, message=message, cause=cause)
    return RunEnd(RunStatus.CANCELLED, 128 + signum, failure, f"; {_to_continue(writer, end)}")


# --- whether another attempt follows ---


_MAX_BACKOFF_S = 60.0
# Another attempt would end the same way.
_FINAL = frozenset({FaultKind.PARAMS, FaultKind.REFUSED, FaultKind.RESULTS})


@dataclass(frozen=True, slots=True)
class Restart:
    """Another attempt follows after `pause_s`; `count` is text such as "restart 1 of 3"."""

    pause_s: float
    count: str


class RestartPolicy:
    """Counts the attempts of one command against failure.max_restarts and failure.max_losses."""

    def __init__(self, settings: FailureConfig) -> None:
        self.settings = settings
        self._restarts = self._losses = 0
        self._before: tuple[str, str, int | None] | None = None  # line, traceback and step of the last failure

    def after(self, end: AttemptEnd, step: int | None, *, scheduler_is_there: bool) -> Restart | str:
        """Return the restart after an attempt, or why there is none, "" if the user needs no reason.

        `step` is the last step that the failed rank logged.
        """
        if end.signum is not None or end.loss is not None or (end.fault is None and end.notice is None):
            return ""
        if self._exhausted(lost := _lost(end)):
            return ""
        if not scheduler_is_there:
            return "the Dask scheduler has ended"
        if end.fault is not None and not lost:
            if reason := self._useless(end.fault, step):
                return reason
            if not any(rank.spec.code.is_script for rank in end.ranks):  # the progress of a script is not known
                self._before = (end.fault.line, end.fault.traceback, step)
        return self._again(lost)

    def _exhausted(self, lost: bool) -> bool:
        left = self.settings.max_restarts - self._restarts
        return left <= 0 and not (lost and self._losses < self.settings.max_losses)

    def _useless(self, fault: Fault, step: int | None) -> str:
        if fault.kind in _FINAL:
            return "a restart would fail in the same way"
        same = (fault.line, fault.traceback, step) == self._before
        return "the same failure at the same step twice in a row is a mistake in the code" if same else ""

    def _again(self, lost: bool) -> Restart:
        settings = self.settings
        before = self._restarts + self._losses
        pause_s = min(_MAX_BACKOFF_S, 2.0 ** min(32, before - 1)) if before else 0.0
        if lost and self._losses < settings.max_losses:
            self._losses += 1
            return Restart(pause_s, f"loss {self._losses} of {settings.max_losses}")
        self._restarts += 1
        return Restart(pause_s, f"restart {self._restarts} of {settings.max_restarts}")


def _lost(end: AttemptEnd) -> bool:
    """Return whether the reason is a lost or preempted host or worker, and not the training code."""
    return end.notice is not None or (end.fault is not None and end.fault.kind in LOSSES)
