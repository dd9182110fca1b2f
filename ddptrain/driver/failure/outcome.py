"""How a run ended: status, exit code and first cause, as run.json and the last lines tell it."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddptrain.driver.failure.fault import Kind, ranks_in_words
from ddptrain.errors import DdptrainError, ExitCode, Interrupted
from ddptrain.results.layout import RunLayout
from ddptrain.results.record import FailureRecord, RunStatus

if TYPE_CHECKING:
    from ddptrain.driver.failure.fault import Fault
    from ddptrain.driver.rank_state import Outcome, RankWatch
    from ddptrain.results.writer import RunWriter


@dataclass(frozen=True, slots=True)
class Verdict:
    """The run's end; `cause` is the one line that tells what failed first, empty for a success."""

    status: RunStatus
    exit_code: int
    cause: str = ""
    failure: FailureRecord | None = None


def of_outcome(outcome: Outcome, writer: RunWriter) -> Verdict:
    """The verdict on an attempt that was watched to its end."""
    if outcome.finished and not outcome.fault:
        failed = [watch.tracker_fault for watch in outcome.ranks if watch.tracker_fault is not None]
        if failed:
            return _untracked(outcome, min(failed, key=lambda fault: fault.time_ns), writer.layout)
        return Verdict(RunStatus.SUCCEEDED, ExitCode.SUCCEEDED)
    if outcome.loss is not None:
        return of_error(outcome.loss, writer)
    if outcome.notice is not None and writer.record.checkpoints:
        return _preempted(outcome.notice, writer)
    if outcome.saved_itself and outcome.signum in (None, signal.SIGTERM) and outcome.fault is None:
        return _saved_itself(outcome.notice or "the script ended with exit code 75")
    if outcome.signum is not None:
        return _interrupted(outcome.signum)
    if outcome.fault is None or (outcome.notice is not None and outcome.fault.victim):
        return _gone(outcome.notice or "the ranks ended before their work was done")
    return _failed(outcome, outcome.fault, writer.layout)


def _preempted(notice: str, writer: RunWriter) -> Verdict:
    """The run was told to go, and can go on from what it has saved."""
    newest = writer.record.checkpoints[0]
    failure = FailureRecord(kind="preempted", message=notice)
    cause = f"{notice}; checkpoint {newest} is saved, go on with --resume {writer.run_id}"
    return Verdict(RunStatus.PREEMPTED, ExitCode.PREEMPTED, cause, failure)


def _saved_itself(notice: str) -> Verdict:
    failure = FailureRecord(kind="preempted", message=notice)
    return Verdict(RunStatus.PREEMPTED, ExitCode.PREEMPTED, f"{notice}; it has saved, run it again to go on", failure)


def _gone(notice: str) -> Verdict:
    failure = FailureRecord(kind="worker_lost", message=notice)
    return Verdict(RunStatus.FAILED, ExitCode.CLUSTER, f"{notice}; there is no checkpoint to go on from", failure)


def _untracked(outcome: Outcome, fault: Fault, layout: RunLayout) -> Verdict:
    """The training has succeeded, and a tracker has not, which the configuration is strict about."""
    host = outcome.ranks[fault.rank].record().host
    log = layout.told(layout.log(fault.rank))
    failure = FailureRecord(rank=fault.rank, host=host, kind=fault.kind, message=fault.message, log=log)
    cause = f"the training has succeeded, but on rank {fault.rank} {fault.line} (tracking.strict is true)"
    return Verdict(RunStatus.FAILED, fault.exit_code, cause, failure)


def _failed(outcome: Outcome, fault: Fault, layout: RunLayout) -> Verdict:
    watch = outcome.ranks[fault.rank]
    log = layout.told(layout.log(fault.rank))
    failure = FailureRecord(
        rank=fault.rank,
        host=watch.record().host,
        kind=fault.kind,
        type=fault.type,
        message=fault.message,
        traceback=fault.traceback,
        log=log,
    )
    place = f"rank {fault.rank} on {failure.host}"
    what = "hung" if fault.kind is Kind.HANG else "failed first"
    cause = f"{place} {what}: {fault.line}{_others(outcome.ranks, fault.rank)}; log: {log}"
    return Verdict(RunStatus.FAILED, fault.exit_code, cause, failure)


def _others(ranks: Sequence[RankWatch], first: int) -> str:
    """Who failed in the same way by itself (one mistake in the code fails on every rank), and who only lost a peer."""
    first_fault = ranks[first].fault
    others = [(watch.spec.rank, watch.fault) for watch in ranks if watch.spec.rank != first and watch.fault is not None]
    victims = [rank for rank, fault in others if fault.victim]
    same = [rank for rank, fault in others if not fault.victim and first_fault and fault.line == first_fault.line]
    parts = [f"likewise rank {ranks_in_words(same)}"] if same else []
    parts += [f"only victims: rank {ranks_in_words(victims)}"] if victims else []
    return f" ({'; '.join(parts)})" if parts else ""


def of_error(error: BaseException, writer: RunWriter) -> Verdict:
    """The verdict on a run that an error of the driver or the cluster ended."""
    if isinstance(error, Interrupted):
        if error.signum == signal.SIGTERM and writer.record.checkpoints:
            return _preempted(was_sent(error.signum), writer)
        return _interrupted(error.signum)
    if isinstance(error, DdptrainError):
        failure = FailureRecord(kind="infrastructure", type=type(error).__name__, message=str(error))
        return Verdict(RunStatus.FAILED, error.exit_code, str(error), failure)
    text = "".join(traceback.format_exception(error))
    failure = FailureRecord(kind="driver", type=type(error).__name__, message=str(error), traceback=text)
    return Verdict(RunStatus.FAILED, ExitCode.INTERNAL, f"a bug in ddptrain: {error!r}", failure)


def was_sent(signum: int) -> str:
    """Why ranks are stopped, or told to save and end, where the driver was sent a signal."""
    return f"the driver was sent {signal.Signals(signum).name}"


def asked(verdict: Verdict) -> Verdict:
    """The verdict where `ddptrain stop` had the signal sent: it says that instead, if the signal ended the run."""
    failure = verdict.failure
    if failure is None or failure.message not in (was_sent(signal.SIGINT), was_sent(signal.SIGTERM)):
        return verdict
    words = "ended by ddptrain stop"
    cause = words if failure.kind == "interrupted" else verdict.cause.replace(failure.message, words, 1)
    return replace(verdict, cause=cause, failure=replace(failure, message=words))


def _interrupted(signum: int) -> Verdict:
    name = signal.Signals(signum).name
    failure = FailureRecord(kind="interrupted", type=name, message=was_sent(signum))
    return Verdict(RunStatus.CANCELLED, 128 + signum, f"interrupted by {name}", failure)
