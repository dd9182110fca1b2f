"""Hangs: the stacks that are collected, and the rank that is the cause."""

from __future__ import annotations

from typing import Any

import pytest

from ddptrain.driver.fault import Fault, FaultKind
from ddptrain.driver.hang import diagnose
from ddptrain.driver.ranks import Rank, Signs
from ddptrain.protocol import events
from ddptrain.protocol.events import users_frame, waits_in
from tests.unit.driver.attempt.ranks import running

# --- The rank that a worker group waits for is told from those that wait ---


TORCH = "/venv/lib/python3.11/site-packages/torch"
C10D = f"{TORCH}/distributed/distributed_c10d.py"
ALL_REDUCE = (
    f"{C10D}:3100 all_reduce",
    f"{TORCH}/distributed/c10d_logger.py:83 wrapper",
    "/home/u/train.py:50 step",
    "/home/u/train.py:9 main",
)
BACKWARD = (
    f"{TORCH}/autograd/graph.py:841 _engine_run_backward",
    f"{TORCH}/autograd/__init__.py:2 backward",
    "/u/train.py:7 main",
)
LOADING = ("/home/u/train.py:41 load_batch", "/home/u/train.py:9 main")


def silent(rank: int, idle_s: float = 10.0, *, timed_out: bool = False, started: bool = True, **more: Any) -> Rank:
    """A rank that has not answered. Fields of Signs are those of the rank's signs."""
    signs = {name: more.pop(name) for name in ("silent_s", "uses", "works") if name in more}
    fault = Fault(rank, FaultKind.EXCEPTION, 1, "timed out", victim=True, timed_out=True) if timed_out else None
    known = {"started": events.Started(1, 7, "h") if started else None, "entered": True, **more}
    return running(rank, fault=fault, signs=Signs(idle_s=idle_s, **signs), **known)


def report(rank: int, frames: tuple[str, ...] = (), sequence: int | None = None, **more: Any) -> Rank:
    """A rank with this stack."""
    about = {name: more.pop(name) for name in ("state", "pending", "handles") if name in more}
    return silent(rank, stacks=events.Stacks(1, frames, sequence, **about), **more)


def missing(ranks: list[Rank], limit_s: float | None, time_ns: int) -> Fault:
    """The fault of ranks that do no work."""
    fault = diagnose(ranks, limit_s, time_ns)
    assert fault is not None
    return fault


@pytest.mark.parametrize(
    ("frames", "operation"),
    [
        (ALL_REDUCE, "all_reduce"),
        (BACKWARD, "backward"),
        (LOADING, ""),
        ((), ""),
        ((f"{TORCH}/cuda/__init__.py:1039 synchronize", *LOADING), "synchronize"),
        (
            (f"{TORCH}/nn/parallel/distributed.py:1 _pre_forward", f"{TORCH}/nn/parallel/distributed.py:2 forward"),
            "forward",
        ),
        ((f"{TORCH}/nn/modules/linear.py:1 forward", f"{TORCH}/nn/parallel/distributed.py:2 forward"), ""),
        (
            (f"{TORCH}/distributed/rendezvous.py:1 _create_c10d_store", f"{C10D}:2 init_process_group"),
            "init_process_group",
        ),
        (("/u/hook.py:1 forward", *ALL_REDUCE), ""),
        (("no frame at all",), ""),
    ],
)
def test_wait_is_known_by_its_innermost_frames(frames: tuple[str, ...], operation: str) -> None:
    assert waits_in(frames) == operation


def test_a_rank_that_hangs_in_its_clean_up_is_named_with_the_exception_before() -> None:
    waiting = report(0, ALL_REDUCE)
    cleaning = report(1, LOADING, handles="ValueError: sample 4711")
    found = missing([waiting, cleaning], 60.0, 1)
    assert (found.rank, found.kind) == (1, FaultKind.HANG)
    assert "in all_reduce; it is in an except or finally block after ValueError: sample 4711 (stacks: " in found.message


def test_rank_that_waits_for_its_loader_says_so() -> None:
    loader = tuple(f"{TORCH}/utils/data/dataloader.py:{line}" for line in ("1293 _try_get_data", "1466 _get_data"))
    fault = missing([report(0, (*loader, *LOADING)), report(1, ALL_REDUCE)], 8, 1)
    assert "it waits for a worker of its DataLoader at train.py:41 in load_batch while rank 1 waits" in fault.message


def test_place_is_the_innermost_frame_of_the_users_code() -> None:
    assert users_frame(ALL_REDUCE) == "train.py:50 in step"
    assert users_frame((f"{C10D}:3 all_reduce",)) == "distributed_c10d.py:3 in all_reduce"
    assert users_frame(()) == ""


def test_rank_with_the_fewest_collectives_is_missing_and_told_in_full() -> None:
    fault = missing([report(0, ALL_REDUCE, 7), report(1, LOADING, 6), report(2, ALL_REDUCE, 7)], 600.0, 5)
    assert (fault.rank, fault.kind, int(fault.exit_code)) == (1, FaultKind.HANG, 5)
    assert fault.message == (
        "no progress for 600 s, it is in train.py:41 in load_batch while rank 0, 2 wait for it in all_reduce "
        "(stacks: artifacts/stacks/)"
    )


def test_stopped_process_comes_before_every_other_sign() -> None:
    fault = missing([report(0, LOADING, 1), report(1, ALL_REDUCE, 7, state="stopped")], 2.0, 5)
    assert fault.rank == 1
    assert "its process is stopped (SIGSTOP)" in fault.message


def test_rank_that_says_nothing_at_all_is_missing() -> None:
    fault = missing([report(0, ALL_REDUCE, 3), silent(1, 5.0), report(2, ALL_REDUCE, 3)], 2.0, 5)
    assert fault.rank == 1
    assert "its place in the code is not known while rank 0, 2 wait for it" in fault.message


def test_rank_that_did_not_start_comes_before_one_that_did() -> None:
    fault = missing([report(0, LOADING, entered=False), silent(1, 9.0, started=False, entered=False)], 60.0, 5)
    assert fault.rank == 1
    assert fault.message.startswith("did not start within 60 s")


def test_rank_that_has_waited_in_vain_is_not_the_missing_one() -> None:
    late = report(0, LOADING, 6, timed_out=True)
    fault = missing([late, report(1, LOADING, 6)], None, 5)
    assert fault.rank == 1
    assert "a collective operation timed out, it is in train.py:41 in load_batch while rank 0 waits" in fault.message


PENDING = events.Stacks(1, LOADING, 7, pending="all_reduce")


def test_rank_that_waited_in_vain_is_not_missing_although_the_others_wait_as_well() -> None:
    ended = silent(0, 99.0, timed_out=True)
    assert missing([ended, report(1, ALL_REDUCE, 7), report(2, ALL_REDUCE, 6)], None, 5).rank == 2
    assert missing([ended, report(1, ALL_REDUCE, 7)], None, 5).rank == 1


STACKS = {frames: events.Stacks(1, frames, 7) for frames in (ALL_REDUCE, LOADING, BACKWARD)}


@pytest.mark.parametrize(
    ("reports", "before", "hangs"),
    [
        # All idle: a hang, wherever they are.
        ([report(0, ALL_REDUCE, 7), report(1, LOADING, 6)], {}, 1),
        ([report(0, ALL_REDUCE, 7), report(1, ALL_REDUCE, 7)], {}, 0),
        # The rank that the others wait for works, or evaluates by itself: no hang.
        ([report(0, LOADING, 6, works=True), report(1, ALL_REDUCE, 7)], {}, None),
        ([report(0, LOADING, 6, works=True), report(1, LOADING, 6, works=True)], {}, None),
        # It does not, while the one that waits spins, as with NCCL.
        ([report(0, ALL_REDUCE, 7, works=True), report(1, LOADING, 6)], {}, 1),
        ([report(0, LOADING, 7, works=True), report(1, LOADING, 6)], {}, 1),
        # All spin in collective operations: a hang once they have not gone on between two looks.
        ([report(0, ALL_REDUCE, 7, works=True), report(1, BACKWARD, 7, works=True)], {}, None),
        (
            [report(0, ALL_REDUCE, 7, works=True), report(1, ALL_REDUCE, 7, works=True)],
            {0: STACKS[ALL_REDUCE], 1: STACKS[ALL_REDUCE]},
            0,
        ),
        (
            [report(0, ALL_REDUCE, 9, works=True), report(1, ALL_REDUCE, 9, works=True)],
            {0: STACKS[ALL_REDUCE], 1: STACKS[ALL_REDUCE]},
            None,
        ),
        ([report(0, LOADING, 7, works=True), report(1, ALL_REDUCE, 7)], {0: STACKS[LOADING]}, None),
        # All wait for their GPU in loss.item(), and the GPU for a collective operation.
        ([report(0, LOADING, 7, works=True, pending="all_reduce")], {0: events.Stacks(1, LOADING, 7)}, None),
        ([report(0, LOADING, 7, works=True, pending="all_reduce")], {0: PENDING}, 0),
        ([report(0, LOADING, 8, works=True, pending="all_reduce")], {0: PENDING}, None),
        ([report(0, LOADING, 7, works=True)], {0: PENDING}, None),  # it has ended: a silent validation
        # A stopped process does not work, whatever was measured before.
        ([report(0, LOADING, 7, works=True, state="stopped"), report(1, LOADING, 7, works=True)], {}, 0),
        # It works, and did not answer: compiled code.
        ([silent(0, 1.0, works=True), report(1, ALL_REDUCE, 7)], {}, None),
    ],
)
def test_rank_that_others_wait_for_is_judged_by_whether_it_works(
    reports: list[Rank], before: dict[int, events.Stacks], hangs: int | None
) -> None:
    for rank, stacks in before.items():
        reports[rank].stacks_before = stacks
    fault = diagnose(reports, 600.0, 5)
    assert (fault.rank if fault is not None else None) == hangs


def test_message_has_one_number_and_says_that_a_rank_without_progress_uses_the_cpu() -> None:
    fault = missing([report(0, ALL_REDUCE, 7), report(1, LOADING, 6, silent_s=3604.0, uses="CPU")], 600.0, 5)
    assert fault.message == (
        "no progress for 3604 s, although it uses the CPU, it is in train.py:41 in load_batch while rank 0 waits for "
        "it in all_reduce (stacks: artifacts/stacks/)"
    )


def test_rank_that_has_returned_is_missing_where_all_others_wait() -> None:
    fault = missing([report(0, ALL_REDUCE, 7), silent(1, 0.0, finished=True, lost=True)], 2.0, 5)
    assert (fault.rank, fault.kind, int(fault.exit_code)) == (1, FaultKind.EXIT, 1)
    assert "returned from the workload while rank 0 waited for it" in fault.message


def test_rank_that_does_not_end_is_named_with_what_it_still_does() -> None:
    fault = missing([silent(0, 0.0, finished=True, lost=True), report(1, LOADING, finished=True)], 2.0, 5)
    assert fault.rank == 1
    assert "after the end of its work" in fault.message


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        (
            ("/py/threading.py:1590 _shutdown",),
            "it waits for a non-daemon thread that it has started to end",
        ),
        (
            ("/py/multiprocessing/popen_fork.py:27 poll", "/py/multiprocessing/util.py:357 _exit_function"),
            "it waits for a process that it has started with multiprocessing to end",
        ),
        (("/me/train.py:7 clean_up", "/ddptrain/rank/lifecycle.py:98 _run_exit_handlers"), "train.py:7 in clean_up"),
    ],
)
def test_rank_that_cannot_exit_says_what_it_waits_for(frames: tuple[str, ...], text: str) -> None:
    found = missing([report(0, frames, finished=True)], 30.0, 1)
    assert f"after the end of its work, {text}" in found.message or f"it is in {text}" in found.message


def test_exception_of_a_thread_is_told_with_its_traceback() -> None:
    ended = events.ThreadFailure(1, "reader", "ValueError", "bad shard\nmore", "Traceback ...")
    fault = missing([report(0, ALL_REDUCE, 7), report(1, LOADING, 6, thread_failure=ended)], 2.0, 5)
    assert "its thread reader has ended with ValueError: bad shard (stacks" in fault.message
    assert fault.traceback == "Traceback ..."


@pytest.mark.parametrize(
    ("limit_s", "stage", "text"),
    [
        (None, {}, "a collective operation timed out"),
        (None, {"started": False}, "a collective operation timed out"),
        (2.5, {"started": False, "entered": False}, "did not start within 2.5 s"),
        (2.5, {"entered": False}, "did not reach the rendezvous within 2.5 s"),
        (3.0, {"silent_s": 2.0}, "no progress for 3 s"),
        (3.0, {"finished": True}, "no progress for 3 s, after the end of its work"),
    ],
)
def test_message_says_which_limit_has_passed(limit_s: float | None, stage: dict[str, Any], text: str) -> None:
    found = missing([silent(0, 1.0, lost=True, **stage)], limit_s, 1)
    assert found.message == f"{text} (stacks: artifacts/stacks/)"


# --- One inquiry after another: when it ends, and what it keeps for the next ---
