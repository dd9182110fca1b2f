"""The end of a run: its status, exit code and root cause, for run.json and the last lines of the command."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddptrain.driver.failure.fault import FaultKind, format_ranks
from ddptrain.errors import DdptrainError, ExitCode, Interrupted, limit_error
from ddptrain.results.run_record import FailureRecord, RunStatus

if TYPE_CHECKING:
    from ddptrain.driver.attempt.rank_state import AttemptEnd, RankState
    from ddptrain.driver.failure.fault import Fault
    from ddptrain.results.layout import RunLayout
    from ddptrain.results.run_writer import RunWriter


@dataclass(frozen=True, slots=True)
class RunEnd:
    """The end of a run; `cause` is the root cause in one line, "" for a success."""

    status: RunStatus
    exit_code: int
    cause: str = ""
    failure: FailureRecord | None = None


def judge_attempt(end: AttemptEnd, writer: RunWriter) -> RunEnd:
    """Return the end of a run after its last attempt."""
    if end.finished and not end.fault:
        failed = [rank.tracker_fault for rank in end.ranks if rank.tracker_fault is not None]
        if failed:
            return _tracker_failed(end, min(failed, key=lambda fault: (fault.time_ns, fault.rank)), writer.layout)
        return RunEnd(RunStatus.SUCCEEDED, ExitCode.SUCCEEDED)
    if end.loss is not None:
        return judge_error(end.loss, writer)
    if end.notice is not None and writer.record.checkpoints:
        return _preempted(end.notice, writer)
    if end.saved_itself and end.signum in (None, signal.SIGTERM) and end.fault is None:
        return _saved_itself(end.notice or "the script ended with exit code 75")
    if end.signum is not None:
        return _interrupted(end.signum)
    if end.fault is None or (end.notice is not None and end.fault.victim):
        return _gone(end.notice or "the ranks ended before their work was done")
    return _failed(end, end.fault, writer.layout)


def _preempted(notice: str, writer: RunWriter) -> RunEnd:
    """Return the end of a run that was told to end, and can continue from its newest checkpoint."""
    newest = writer.record.checkpoints[0]
    failure = FailureRecord(kind="preempted", message=notice)
    cause = f"{notice}; checkpoint {newest} is saved, continue with --resume {writer.run_id}"
    return RunEnd(RunStatus.PREEMPTED, ExitCode.PREEMPTED, cause, failure)


def _saved_itself(notice: str) -> RunEnd:
    failure = FailureRecord(kind="preempted", message=notice)
    return RunEnd(
        RunStatus.PREEMPTED, ExitCode.PREEMPTED, f"{notice}; it has saved its state: run it again to continue", failure
    )


def _gone(notice: str) -> RunEnd:
    failure = FailureRecord(kind="worker_lost", message=notice)
    return RunEnd(RunStatus.FAILED, ExitCode.CLUSTER, f"{notice}; there is no checkpoint to continue from", failure)


def _tracker_failed(end: AttemptEnd, fault: Fault, layout: RunLayout) -> RunEnd:
    """Return the end of a run whose training has succeeded, but with a failed tracker and tracking.strict true."""
    cause = f"the training has succeeded, but on rank {fault.rank} {fault.line} (tracking.strict is true)"
    return RunEnd(RunStatus.FAILED, fault.exit_code, cause, _record(end, fault, layout))


def _failed(end: AttemptEnd, fault: Fault, layout: RunLayout) -> RunEnd:
    failure = _record(end, fault, layout)
    what = "hung" if fault.kind is FaultKind.HANG else "failed first"
    cause = f"rank {fault.rank} on {failure.host} {what}: {fault.line}{_others(end.ranks, fault.rank)}"
    return RunEnd(RunStatus.FAILED, fault.exit_code, f"{cause}; log: {failure.log}", failure)


def _record(end: AttemptEnd, fault: Fault, layout: RunLayout) -> FailureRecord:
    return fault.record(end.ranks[fault.rank].record().host, layout.shown_path(layout.log(fault.rank)))


def _others(ranks: Sequence[RankState], first: int) -> str:
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
            return _preempted(was_sent(error.signum), writer)
        return _interrupted(error.signum)
    error = limit_error(error) or error
    kind, text = type(error).__name__, str(error)
    if isinstance(error, DdptrainError):
        failure = FailureRecord(kind="infrastructure", type=kind, message=text)
        return RunEnd(RunStatus.FAILED, error.exit_code, text, failure)
    trace = "".join(traceback.format_exception(error))
    failure = FailureRecord(kind="driver", type=kind, message=text, traceback=trace)
    return RunEnd(RunStatus.FAILED, ExitCode.INTERNAL, f"a bug in ddptrain: {error!r}", failure)


def was_sent(signum: int) -> str:
    """Return the text for a signal to the driver, as the reason why ranks are stopped or told to save and end."""
    return f"the driver was sent {signal.Signals(signum).name}"


def name_stop_command(end: RunEnd) -> RunEnd:
    """Return the end of a run that `ddptrain stop` has ended, with the command in place of the signal."""
    failure = end.failure
    if failure is None or failure.message not in (was_sent(signal.SIGINT), was_sent(signal.SIGTERM)):
        return end
    by_command = "ended by ddptrain stop"
    cause = by_command if failure.kind == "interrupted" else end.cause.replace(failure.message, by_command, 1)
    return replace(end, cause=cause, failure=replace(failure, message=by_command))


def _interrupted(signum: int) -> RunEnd:
    name = signal.Signals(signum).name
    failure = FailureRecord(kind="interrupted", type=name, message=was_sent(signum))
    return RunEnd(RunStatus.CANCELLED, 128 + signum, f"interrupted by {name}", failure)
