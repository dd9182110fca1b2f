"""The first cause is told from its victims."""

from __future__ import annotations

import pytest

from ddptrain.driver.failure import fault as failure_fault
from ddptrain.driver.failure.fault import Fault, FaultKind, find_root_cause
from ddptrain.errors import ExitCode
from ddptrain.protocol import events
from ddptrain.protocol.worker_notices import RankExit


def fault(
    rank: int, time_ns: int, *, victim: bool = False, kind: FaultKind = FaultKind.EXCEPTION, message: str = ""
) -> Fault:
    return Fault(rank, kind, time_ns, message or f"rank {rank}", victim=victim)


def test_earliest_fault_is_the_cause() -> None:
    assert find_root_cause([fault(0, 5), fault(1, 3)]).rank == 1


def test_victim_is_never_the_cause_however_early() -> None:
    assert find_root_cause([fault(0, 1, victim=True), fault(1, 3)]).rank == 1


def test_earliest_victim_is_named_where_there_is_nobody_else() -> None:
    assert find_root_cause([fault(0, 2, victim=True), fault(1, 1, victim=True)]).rank == 1


def test_lost_worker_is_told_of_its_first_rank() -> None:
    lost = [fault(rank, 10 - rank, kind=FaultKind.WORKER_LOST, message="the worker was lost") for rank in range(3)]
    assert find_root_cause(lost).rank == 0


def test_lost_worker_does_not_hide_an_earlier_exception() -> None:
    faults = [fault(1, 1), fault(0, 5, kind=FaultKind.WORKER_LOST), fault(1, 6, kind=FaultKind.WORKER_LOST)]
    assert find_root_cause(faults).kind == FaultKind.EXCEPTION


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (FaultKind.EXCEPTION, ExitCode.TRAINING_FAILED),
        (FaultKind.EXIT, ExitCode.TRAINING_FAILED),
        (FaultKind.SIGNAL, ExitCode.TRAINING_FAILED),
        (FaultKind.REFUSED, ExitCode.TRAINING_FAILED),
        (FaultKind.WORKER_LOST, ExitCode.CLUSTER),
        (FaultKind.INFRASTRUCTURE, ExitCode.CLUSTER),
        (FaultKind.RESULTS, ExitCode.CLUSTER),
        (FaultKind.HANG, ExitCode.HANG),
    ],
)
def test_exit_code_follows_the_kind_of_fault(kind: FaultKind, code: ExitCode) -> None:
    assert fault(0, 1, kind=kind).exit_code == code


def test_line_is_one_line_with_the_type_and_the_phase() -> None:
    failure = events.Failure(1, "ValueError", "boom\nand more", "", phase="setup")
    assert failure_fault.from_failure(2, failure).line == "ValueError: boom (before the process group was up)"


def test_type_whose_name_has_several_lines_is_one_line() -> None:
    failure = events.Failure(1, "Bad\nname", "boom", "", phase="train")
    assert failure_fault.from_failure(2, failure).line == "Bad: boom"


def test_exception_without_a_message_is_its_type_alone() -> None:
    failure = events.Failure(1, "AssertionError", "", "", phase="train")
    assert failure_fault.from_failure(2, failure).line == "AssertionError"


def test_a_checkpoint_that_cannot_be_written_is_no_failure_of_the_code() -> None:
    failure = events.Failure(1, "CheckpointNotWritten", "No space left on device", "", unwritable=True)
    found = failure_fault.from_failure(0, failure)
    assert (found.kind, found.exit_code) == (FaultKind.RESULTS, ExitCode.CLUSTER)


def test_sys_exit_is_told_as_it_was_called() -> None:
    failure = events.Failure(1, "SystemExit", "sys.exit(42)", "", exit_code=42)
    assert (failure_fault.from_failure(0, failure).kind, failure_fault.from_failure(0, failure).line) == (
        FaultKind.EXIT,
        "sys.exit(42)",
    )


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        (-9, FaultKind.SIGNAL, "killed by SIGKILL"),
        (0, FaultKind.EXIT, "exit code 0 in the middle"),
        (7, FaultKind.EXIT, "exit code 7"),
    ],
)
def test_silent_end_is_told_by_its_status(status: int, kind: FaultKind, words: str) -> None:
    found = failure_fault.from_exit(RankExit(1, 1, 100, status, 1, 0, 0))
    assert found.kind == kind
    assert words in found.line


def test_rank_that_returned_is_the_cause_where_all_others_only_lost_it() -> None:
    first = find_root_cause([fault(0, 5, victim=True), fault(2, 6, victim=True)], finished=[1])
    assert (first.rank, first.kind, first.exit_code) == (1, FaultKind.EXIT, ExitCode.TRAINING_FAILED)
    assert first.line == "returned from the workload while rank 0, 2 waited for it in a collective operation"


def test_rank_that_returned_is_not_the_cause_of_an_error_of_another() -> None:
    assert find_root_cause([fault(0, 5)], finished=[1]).rank == 0


def test_time_out_in_a_collective_is_a_victims() -> None:
    found = failure_fault.from_failure(0, events.Failure(1, "RuntimeError", "Timed out waiting", "", timed_out=True))
    assert (found.victim, found.timed_out) == (True, True)
    ended = failure_fault.from_exit(RankExit(1, 0, 1, -6, 1, 0, 0, timed_out=True))
    assert (ended.victim, ended.timed_out) == (True, True)


def test_kill_for_want_of_memory_is_told() -> None:
    text = "out of memory (the memory limit of 2.0 GiB of its control group)"
    found = failure_fault.from_exit(RankExit(1, 1, 1, -9, 1, 0, 0, reason=text))
    assert found.line == f"killed by SIGKILL: {text}"


def test_rank_that_could_not_write_its_failure_names_the_reason_and_is_not_tried_again() -> None:
    text = "its events or log have reached the limit on the size of files, 4,096 bytes: ulimit -f"
    found = failure_fault.from_exit(RankExit(1, 1, 1, 1, 1, 0, 4096, reason=text))
    assert (found.kind, found.exit_code) == (FaultKind.RESULTS, ExitCode.CLUSTER)
    assert found.line == (
        f"the process ended with exit code 1 in the middle of the workload, and could not report why: {text}"
    )


def test_exception_of_a_thread_before_is_told_with_a_fault() -> None:
    ended = events.ThreadFailure(1, "producer", "ValueError", "no such shard", "Traceback of the thread")
    failed = Fault(1, FaultKind.EXCEPTION, 5, "no batch came", type="TimeoutError", traceback="Traceback of the rank\n")
    told = failure_fault.add_thread_failure(failed, ended)
    assert told.line == "TimeoutError: no batch came (its thread producer had ended with ValueError: no such shard)"
    assert told.traceback.index("of the rank") < told.traceback.index("of the thread")
    assert failure_fault.add_thread_failure(fault(1, 0), ended) == fault(1, 0)  # it was earlier
    assert failure_fault.add_thread_failure(failed, None) is failed


def test_missing_network_interface_is_named_with_its_variable() -> None:
    message = "[enforce fail at device.cc:84] ifa != nullptr. Unable to find address for: eth77"
    fault = Fault(0, FaultKind.EXCEPTION, 0, message, type="RuntimeError", phase="rendezvous")
    assert fault.line.endswith(
        "the host has no network interface eth77: change GLOO_SOCKET_IFNAME (`ip link` lists them)"
    )
    nccl = Fault(0, FaultKind.EXCEPTION, 0, "Bootstrap : no socket interface found", type="DistBackendError")
    assert "change NCCL_SOCKET_IFNAME" in nccl.line
