"""A rank that waits in a ctx method for ranks that will never call it is told from a rank that waits for slow ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddptrain.driver.failure.fault import FaultKind
from ddptrain.driver.failure.hang_diagnosis import RankReport
from ddptrain.driver.failure.missing_calls import find_uncalled
from ddptrain.protocol import events

TORCH = "/venv/lib/python3.11/site-packages/torch"
BACKWARD = (f"{TORCH}/autograd/graph.py:841 _engine_run_backward", "/u/train.py:7 main")
BARRIER = (f"{TORCH}/distributed/distributed_c10d.py:5 barrier", "/u/train.py:8 main")
LOADING = ("/u/train.py:41 load_batch", "/u/train.py:9 main")


def at(
    rank: int,
    frames: tuple[str, ...] = (),
    sequence: int | None = 7,
    waits: str = "",
    step: int | None = None,
    **calls: Any,
) -> RankReport:
    return RankReport(rank, 1.0, events.Stacks(1, frames, sequence, "", calls, waits, step))


def ended(rank: int, **calls: float) -> RankReport:
    return RankReport(rank, 0.0, finished=True, over=True, ended_calls=calls)


SAVING = at(0, waits="checkpoint", step=40, checkpoint=1)
MEAN = at(0, waits="mean", mean=3, checkpoint=2)
RESUME = at(0, waits="resume", resume=1)

CASES = [
    # Rank 0 alone saves; the other goes on to train, waits elsewhere, or has ended.
    ([SAVING, at(1, BACKWARD, 8)], "rank 0 is in ctx.checkpoint at step 40, which rank 1 has not called"),
    ([SAVING, at(1, BARRIER, 8)], "rank 0 is in ctx.checkpoint at step 40, which rank 1 has not called"),
    ([SAVING, at(1, waits="mean", mean=1)], "rank 0 is in ctx.checkpoint at step 40, which rank 1 has not called"),
    ([SAVING, ended(1)], "rank 0 is in ctx.checkpoint at step 40, which rank 1 has not called"),
    ([RESUME, at(1, BACKWARD, 8)], "rank 0 is in ctx.resume, which rank 1 has not called"),
    ([MEAN, at(1, BACKWARD, 8, mean=2, checkpoint=2)], "rank 0 is in ctx.mean, which rank 1 has not called"),
    ([MEAN, ended(1, mean=2), ended(2, mean=2)], "rank 0 is in ctx.mean, which rank 1-2 have not called"),
    ([at(0, BACKWARD, 8), at(1, waits="mean", mean=1)], "rank 1 is in ctx.mean, which rank 0 has not called"),
    # Slow ranks: they compute, or wait for others in what the waiting rank has passed.
    ([SAVING, at(1, LOADING, 7)], ""),
    ([SAVING, at(1, LOADING, 8)], ""),  # an operation that it does not wait for
    ([SAVING, at(1, BACKWARD, 7)], ""),  # the last one of this step, for which it waits for rank 2
    ([SAVING, at(1, BACKWARD, 6), at(2, LOADING, 5)], ""),
    ([SAVING, at(1, BACKWARD, 8, checkpoint=1)], ""),  # it has called it
    ([SAVING, ended(1, checkpoint=1), at(2, LOADING)], ""),
    ([MEAN, at(1, waits="mean", mean=3, checkpoint=2), at(2, LOADING, mean=2)], ""),
    ([MEAN, at(1, waits="checkpoint", mean=2, checkpoint=2), at(2, LOADING, mean=2)], ""),  # both are on their way
    ([SAVING, replace(at(1, BACKWARD, 8), over=True)], ""),  # why it has ended is known
    ([replace(SAVING, over=True), at(1, BACKWARD, 8)], ""),
    # Nothing is known of the other.
    ([SAVING, RankReport(1, 1.0)], ""),
    ([SAVING, RankReport(1, 1.0, events.Stacks(1, BACKWARD, None))], ""),
    ([SAVING, RankReport(1, 1.0, events.Stacks(1, BACKWARD, 8, "stopped"))], ""),
    ([at(0, waits="checkpoint", sequence=None, checkpoint=1), at(1, BACKWARD, 8)], ""),
    # Nobody waits.
    ([at(0, BACKWARD, 8, checkpoint=1), at(1, LOADING, 7)], ""),
]


@pytest.mark.parametrize(("reports", "message"), CASES)
def test_call_that_another_rank_will_never_make_is_told_and_a_slow_rank_is_not(
    reports: list[RankReport], message: str
) -> None:
    fault = find_uncalled(reports, {}, 5)
    assert (fault is None) == (not message), fault
    if fault is not None:
        assert fault.message == f"{message}; all ranks must call it"
        assert (fault.kind, int(fault.exit_code)) == (FaultKind.EXCEPTION, 1)


def test_rank_that_stays_where_it_was_waits_though_no_frame_says_so() -> None:
    item = at(1, LOADING, 8)
    assert item.stacks is not None
    assert find_uncalled([SAVING, item], {1: item.stacks}, 5) is not None  # NCCL: it waits for its GPU
    assert find_uncalled([SAVING, item], {1: events.Stacks(1, LOADING, 7)}, 5) is None
    assert find_uncalled([SAVING, item], {1: events.Stacks(1, BARRIER, 8)}, 5) is None
