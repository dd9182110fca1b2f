"""Which status, exit code and cause a run gets, for each way in which its last attempt or the driver ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddptrain.driver.fault import Fault, FaultKind
from ddptrain.driver.ranks import AttemptEnd, Rank
from ddptrain.driver.run_end import RunEnd, judge_attempt, judge_error, name_stop_command
from ddptrain.errors import ClusterError, ExitCode, Interrupted
from ddptrain.results.run_record import FailureRecord, RunStatus
from ddptrain.results.run_writer import RunWriter
from tests.unit.driver.attempt.ranks import running


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[RunWriter]:
    with RunWriter.create(tmp_path, "r-1", "name", "", "workload", world_size=4) as made:
        yield made


def fault(rank: int, message: str = "no", *, time_ns: int = 0, **more: Any) -> Fault:
    return Fault(rank, more.pop("kind", FaultKind.EXCEPTION), time_ns, message, **more)


def ranks(count: int = 2, *, faults: tuple[Fault, ...] = (), **state: Any) -> list[Rank]:
    by_rank = {one.rank: one for one in faults}
    return [running(rank, fault=by_rank.get(rank), **state) for rank in range(count)]


def ended(states: list[Rank], *, fault: Fault | None = None, signum: int | None = None, **more: Any) -> AttemptEnd:
    return AttemptEnd(states, fault, signum, **more)


def parts(end: RunEnd) -> tuple[RunStatus, int, str]:
    return end.status, end.exit_code, end.line


FAULT = fault(1, "bad batch\nmore", type="ValueError", traceback="trace")
SAVED = "the script ended with exit code 75; it has saved its state: run it again to continue"
NONE = "there is no checkpoint to continue from"


@pytest.mark.parametrize(
    ("end", "status", "exit_code", "cause", "kind"),
    [
        (ended(ranks(finished=True)), "succeeded", 0, "", None),
        # Every rank has finished, but the driver was told why ranks must end: the work is done.
        (ended(ranks(finished=True), signum=15, notice="n"), "succeeded", 0, "", None),
        (ended(ranks(finished=True), loss=ClusterError("disk full")), "succeeded", 0, "", None),
        (ended(ranks(), loss=ClusterError("disk full"), signum=2), "failed", 4, "disk full", "infrastructure"),
        (ended(ranks(preempted=True)), "preempted", 75, SAVED, "preempted"),
        (
            ended(ranks(preempted=True), signum=15),
            "preempted",
            75,
            SAVED,
            "preempted",
        ),
        (
            ended(ranks(preempted=True), notice="h1 leaves"),
            "preempted",
            75,
            "h1 leaves; it has saved its state: run it again to continue",
            "preempted",
        ),
        (ended(ranks(preempted=True), signum=2), "cancelled", 130, f"interrupted by SIGINT; {NONE}", "interrupted"),
        (ended(ranks(), signum=15), "cancelled", 143, f"interrupted by SIGTERM; {NONE}", "interrupted"),
        (
            ended(ranks()),
            "failed",
            4,
            "the ranks ended before their work was done; there is no checkpoint to continue from",
            "worker_lost",
        ),
        (
            ended(ranks(), fault=fault(0, victim=True), notice="h1 leaves"),
            "failed",
            4,
            "h1 leaves; there is no checkpoint to continue from",
            "worker_lost",
        ),
        (
            ended(ranks(faults=(FAULT,)), fault=FAULT, notice="h1 leaves"),
            "failed",
            1,
            "rank 1 on h1 failed first: ValueError: bad batch; log: {run}/logs/rank-1.log",
            "exception",
        ),
        (
            ended(ranks(), fault=fault(0, victim=True)),
            "failed",
            1,
            "rank 0 on h0 failed first: no; log: {run}/logs/rank-0.log",
            "exception",
        ),
        (
            ended(ranks(), fault=fault(0, "no step in 60 s", kind=FaultKind.HANG)),
            "failed",
            5,
            "rank 0 on h0 hung: no step in 60 s; log: {run}/logs/rank-0.log",
            "hang",
        ),
    ],
)
def test_end_of_the_last_attempt_is_the_end_of_the_run(
    writer: RunWriter, end: AttemptEnd, status: str, exit_code: int, cause: str, kind: str | None
) -> None:
    judged = judge_attempt(end, writer)
    assert parts(judged) == (status, exit_code, cause.format(run=writer.layout.where))
    assert (judged.failure.kind if judged.failure else None) == kind


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        (ended(ranks(), notice="h1 leaves", age_s=-1.0), "checkpoint step-20 is saved"),
        (ended(ranks(), notice="h1 leaves", age_s=90.0), "no checkpoint was saved after that, step-20 is 1m 30s older"),
        (
            ended(ranks(), notice="h1 leaves"),
            "no checkpoint was saved in this attempt, the newest one is step-20",
        ),
    ],
)
def test_run_that_was_asked_to_end_continues_from_its_newest_checkpoint(
    writer: RunWriter, end: AttemptEnd, cause: str
) -> None:
    writer.update(checkpoints=("step-20", "step-10"))
    judged = judge_attempt(end, writer)
    assert parts(judged) == (RunStatus.PREEMPTED, 75, f"h1 leaves; {cause}, continue with --resume r-1")
    assert judged.failure == FailureRecord(kind="preempted", message="h1 leaves", cause="h1 leaves")


def test_checkpoint_that_a_second_signal_has_not_saved_is_named(writer: RunWriter) -> None:
    judged = judge_attempt(ended(ranks(finished=True), signum=2, unsaved="checkpoint step-30"), writer)
    cause = f"interrupted by SIGINT; checkpoint step-30 was not saved, {NONE}"
    assert parts(judged) == (RunStatus.CANCELLED, 130, cause)


@pytest.mark.parametrize(
    ("others", "told"),
    [
        ((fault(2, victim=True),), "failed as a consequence: rank 2"),
        ((fault(2, victim=True), fault(3, victim=True)), "failed as a consequence: ranks 2-3"),
        ((fault(0), fault(3)), "the same error: ranks 0, 3"),
        ((fault(0),), "the same error: rank 0"),
        ((fault(0), fault(2, victim=True)), "the same error: rank 0; failed as a consequence: rank 2"),
        ((fault(0, "another"),), ""),
        ((), ""),
    ],
)
def test_ranks_with_the_same_error_and_victims_are_counted(
    writer: RunWriter, others: tuple[Fault, ...], told: str
) -> None:
    first = fault(1)
    judged = judge_attempt(ended(ranks(4, faults=(first, *others)), fault=first), writer)
    between = f" ({told})" if told else ""
    assert judged.line == f"rank 1 on h1 failed first: no{between}; log: {writer.layout.where}/logs/rank-1.log"


def test_other_exceptions_are_bugs_and_come_with_their_traceback(writer: RunWriter) -> None:
    judged = judge_error(KeyError("a"), writer)
    assert parts(judged) == (RunStatus.FAILED, ExitCode.INTERNAL, "a bug in ddptrain: KeyError('a')")
    assert judged.failure is not None and (judged.failure.kind, judged.failure.type) == ("driver", "KeyError")
    assert judged.failure.message == "'a'" and judged.failure.traceback == "KeyError: 'a'\n"


@pytest.mark.parametrize(("signum", "status"), [(15, RunStatus.PREEMPTED), (2, RunStatus.CANCELLED)])
def test_sigterm_between_attempts_leaves_a_run_that_continues(
    writer: RunWriter, signum: int, status: RunStatus
) -> None:
    writer.update(checkpoints=("step-20",))
    assert judge_error(Interrupted(signum), writer).status == status


def test_run_that_the_stop_command_has_ended_names_the_command(writer: RunWriter) -> None:
    interrupted = judge_error(Interrupted(2), writer)
    renamed = name_stop_command(interrupted)
    by_command = "ended by ddptrain stop"
    assert renamed.line == f"{by_command}; {NONE}"
    assert renamed.failure is not None and renamed.failure.message == by_command
    writer.update(checkpoints=("step-20",))
    preempted = name_stop_command(judge_error(Interrupted(15), writer))
    assert preempted.line == f"{by_command}; checkpoint step-20 is saved, continue with --resume r-1"
    assert preempted.failure == FailureRecord(kind="preempted", message=by_command, cause=by_command)
    other = judge_attempt(ended(ranks(), fault=FAULT), writer)
    assert name_stop_command(other) is other
    done = RunEnd(RunStatus.SUCCEEDED, 0)
    assert name_stop_command(done) is done
