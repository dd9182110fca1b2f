"""Faults of ranks: their texts, and whether a run is restarted."""

from __future__ import annotations

from typing import Any

import pytest

from ddptrain.config.run_config import FailureConfig
from ddptrain.driver import fault as failure_fault
from ddptrain.driver.fault import Fault, FaultKind
from ddptrain.driver.ranks import AttemptEnd
from ddptrain.driver.run_end import Restart, RestartPolicy
from ddptrain.errors import ClusterError, ExitCode
from ddptrain.protocol import events
from ddptrain.protocol.news import RankExit

# --- The first cause is told from its victims ---


def fault(
    rank: int, time_ns: int, *, victim: bool = False, kind: FaultKind = FaultKind.EXCEPTION, message: str = ""
) -> Fault:
    return Fault(rank, kind, time_ns, message or f"rank {rank}", victim=victim)


def test_line_is_one_line_with_the_type_and_the_phase() -> None:
    failure = events.Failure(1, "ValueError", "boom\nand more", "", phase="setup")
    assert failure_fault.from_failure(2, failure).line == "ValueError: boom (before the process group was up)"


def test_a_checkpoint_that_cannot_be_written_is_no_failure_of_the_code() -> None:
    failure = events.Failure(1, "CheckpointNotWritten", "No space left on device", "", unwritable=True)
    found = failure_fault.from_failure(0, failure)
    assert (found.kind, found.exit_code) == (FaultKind.RESULTS, ExitCode.CLUSTER)


def test_rank_that_could_not_write_its_failure_names_the_reason_and_is_not_tried_again() -> None:
    text = "its events or log have reached the limit on the size of files, 4,096 bytes: ulimit -f"
    found = failure_fault.from_exit(1, RankExit(1, 1, 1, reason=text))
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


# --- Whether another attempt follows: two budgets, and the failures that it can't help ---


def restarts(**settings: Any) -> RestartPolicy:
    return RestartPolicy(FailureConfig.model_validate(settings))


def failed(kind: FaultKind = FaultKind.EXCEPTION, message: str = "boom", **more: Any) -> AttemptEnd:
    return AttemptEnd([], Fault(0, kind, 0, message, **more), None)


def after(policy: RestartPolicy, outcome: AttemptEnd, step: int | None = None, there: bool = True) -> Restart | str:
    return policy.after(outcome, step, scheduler_is_there=there)


def test_success_and_signals_are_the_end() -> None:
    policy = restarts(max_restarts=9, max_losses=9)
    assert after(policy, AttemptEnd([], None, None)) == ""
    assert after(policy, AttemptEnd([], None, 15, "the driver was sent SIGTERM")) == ""


def test_first_restart_is_at_once_and_pauses_double_until_the_budget_is_spent() -> None:
    policy = restarts(max_restarts=3)
    assert after(policy, failed(), 1) == Restart(0.0, "restart 1 of 3")
    assert after(policy, failed(), 2) == Restart(1.0, "restart 2 of 3")
    assert after(policy, failed(), 3) == Restart(2.0, "restart 3 of 3")
    assert after(policy, failed(), 4) == ""


@pytest.mark.parametrize(
    "outcome", [failed(FaultKind.WORKER_LOST), AttemptEnd([], None, None, "rank 1 was sent SIGTERM")]
)
def test_losses_have_a_budget_of_their_own_and_then_take_of_the_other(outcome: AttemptEnd) -> None:
    policy = restarts(max_restarts=1, max_losses=1)
    assert after(policy, outcome) == Restart(0.0, "loss 1 of 1")
    assert after(policy, outcome) == Restart(1.0, "restart 1 of 1")
    assert after(policy, outcome) == ""


def test_full_disk_and_a_lost_scheduler_are_final() -> None:
    policy = restarts(max_restarts=1, max_losses=1)
    for kind in (FaultKind.REFUSED, FaultKind.RESULTS):
        assert after(policy, failed(kind)) == "a restart would fail in the same way"
    assert after(policy, failed(FaultKind.WORKER_LOST), there=False) == "the Dask scheduler has ended"


def test_lost_results_end_the_run_even_with_a_fault_and_a_notice() -> None:
    policy = restarts(max_restarts=9, max_losses=9)
    lost = ClusterError("another driver has the run")
    fault = Fault(0, FaultKind.WORKER_LOST, 0, "gone")
    assert after(policy, AttemptEnd([], fault, None, "a host goes", lost)) == ""
    assert after(policy, AttemptEnd([], fault, None, "a host goes")) == Restart(0.0, "loss 1 of 9")


@pytest.mark.parametrize(
    ("second", "step", "is_same"),
    [
        ({"traceback": "at line 7"}, 5, True),
        ({"traceback": "at line 8"}, 5, False),  # the same words from another place
        ({"traceback": "at line 7"}, 6, False),
        ({"traceback": "at line 7", "message": "bang"}, 5, False),
        ({"traceback": "at line 7", "type": "KeyError"}, 5, False),
    ],
)
def test_failure_is_the_same_if_line_traceback_and_step_are(second: dict[str, Any], step: int, is_same: bool) -> None:
    policy = restarts(max_restarts=9)
    assert after(policy, failed(traceback="at line 7", message="boom"), 5) == Restart(0.0, "restart 1 of 9")
    answer = after(policy, failed(**{"message": "boom", **second}), step)
    reason = "the same failure at the same step twice in a row is a mistake in the code"
    assert answer == (reason if is_same else Restart(1.0, "restart 2 of 9"))


def test_loss_between_two_equal_failures_does_not_make_them_different() -> None:
    policy = restarts(max_restarts=9, max_losses=9)
    assert isinstance(after(policy, failed(), 5), Restart)
    assert isinstance(after(policy, failed(FaultKind.WORKER_LOST), 5), Restart)
    assert isinstance(after(policy, failed(), 5), str)
