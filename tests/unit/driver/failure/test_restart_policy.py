"""Whether another attempt follows: two budgets, and the failures that it can't help."""

from __future__ import annotations

from typing import Any

import pytest

from ddptrain.config.run_config import FailureConfig
from ddptrain.driver.attempts import NoRestart, Restart, RestartPolicy
from ddptrain.driver.failure.fault import Fault, FaultKind
from ddptrain.driver.ranks import AttemptEnd
from ddptrain.errors import ClusterError


def restarts(**settings: Any) -> RestartPolicy:
    return RestartPolicy(FailureConfig.model_validate(settings))


def failed(kind: FaultKind = FaultKind.EXCEPTION, message: str = "boom", **more: Any) -> AttemptEnd:
    return AttemptEnd([], Fault(0, kind, 0, message, **more), None)


def after(
    policy: RestartPolicy, outcome: AttemptEnd, step: int | None = None, there: bool = True
) -> Restart | NoRestart:
    return policy.after(outcome, step, scheduler_is_there=there)


def test_success_and_signals_are_the_end() -> None:
    policy = restarts(max_restarts=9, max_losses=9)
    assert after(policy, AttemptEnd([], None, None)) == NoRestart()
    assert after(policy, AttemptEnd([], None, 15, "the driver was sent SIGTERM")) == NoRestart()


def test_first_restart_is_at_once_and_pauses_double_until_the_budget_is_spent() -> None:
    policy = restarts(max_restarts=3)
    assert after(policy, failed(), 1) == Restart(0.0, "restart 1 of 3")
    assert after(policy, failed(), 2) == Restart(1.0, "restart 2 of 3")
    assert after(policy, failed(), 3) == Restart(2.0, "restart 3 of 3")
    assert after(policy, failed(), 4) == NoRestart()


def test_pause_has_an_end() -> None:
    policy = restarts(max_restarts=1000)
    pauses = [after(policy, failed(), step) for step in range(1000)]
    assert pauses[-1] == Restart(60.0, "restart 1000 of 1000")


@pytest.mark.parametrize(
    "outcome", [failed(FaultKind.WORKER_LOST), AttemptEnd([], None, None, "rank 1 was sent SIGTERM")]
)
def test_losses_have_a_budget_of_their_own_and_then_take_of_the_other(outcome: AttemptEnd) -> None:
    policy = restarts(max_restarts=1, max_losses=1)
    assert after(policy, outcome) == Restart(0.0, "loss 1 of 1")
    assert after(policy, outcome) == Restart(1.0, "restart 1 of 1")
    assert after(policy, outcome) == NoRestart()


def test_failure_of_the_code_takes_nothing_of_the_budget_for_losses() -> None:
    assert after(restarts(max_losses=3), failed()) == NoRestart()


def test_same_failure_at_the_same_step_is_a_mistake() -> None:
    policy = restarts(max_restarts=9)
    assert isinstance(after(policy, failed(), 7), Restart)
    assert "twice in a row" in after(policy, failed(), 7).reason  # type: ignore[union-attr]


def test_same_failure_later_on_is_bad_luck() -> None:
    policy = restarts(max_restarts=9)
    assert isinstance(after(policy, failed(), 7), Restart)
    assert isinstance(after(policy, failed(), 8), Restart)
    assert isinstance(after(policy, failed(message="other"), 8), Restart)


def test_full_disk_and_a_lost_scheduler_are_final() -> None:
    policy = restarts(max_restarts=1, max_losses=1)
    assert after(policy, failed(FaultKind.RESULTS)) == NoRestart("a restart would fail in the same way")
    assert after(policy, failed(FaultKind.WORKER_LOST), there=False) == NoRestart("the Dask scheduler has ended")


@pytest.mark.parametrize("kind", [FaultKind.REFUSED, FaultKind.RESULTS])
def test_refused_path_and_full_disk_are_final_whatever_is_left_of_the_budget(kind: FaultKind) -> None:
    policy = restarts(max_restarts=9, max_losses=9)
    assert after(policy, failed(kind), 5) == NoRestart("a restart would fail in the same way")


def test_lost_results_end_the_run_even_with_a_fault_and_a_notice() -> None:
    policy = restarts(max_restarts=9, max_losses=9)
    lost = ClusterError("another driver has the run")
    fault = Fault(0, FaultKind.WORKER_LOST, 0, "gone")
    assert after(policy, AttemptEnd([], fault, None, "a host goes", lost)) == NoRestart()
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
    assert answer == (NoRestart(reason) if is_same else Restart(1.0, "restart 2 of 9"))


def test_loss_between_two_equal_failures_does_not_make_them_different() -> None:
    policy = restarts(max_restarts=9, max_losses=9)
    assert isinstance(after(policy, failed(), 5), Restart)
    assert isinstance(after(policy, failed(FaultKind.WORKER_LOST), 5), Restart)
    assert isinstance(after(policy, failed(), 5), NoRestart)
