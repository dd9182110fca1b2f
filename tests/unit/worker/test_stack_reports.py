"""What a worker reports for a rank that cannot report itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddptrain.protocol import events
from ddptrain.protocol.rank_spec import STACKS_SIGNAL
from ddptrain.worker import stack_reports
from ddptrain.worker.process_monitor import ProcessMonitor, has_handler
from ddptrain.worker.spool import RankSpool
from tests.unit.specs import make_spec


@pytest.fixture
def spool(tmp_path: Path) -> RankSpool:
    there = RankSpool(tmp_path / "rank-1")
    there.create()
    return there


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    code = "import time; print('up', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        yield process
        process.kill()


def told(spool: RankSpool, count: int) -> list[events.Event]:
    deadline = time.monotonic() + 60.0
    while len(lines := spool.events.read_bytes().splitlines()) < count and time.monotonic() < deadline:
        time.sleep(0.02)
    return [events.decode(line) for line in lines]


def test_stopped_process_is_reported_at_once_with_a_file(spool: RankSpool, sleeper: subprocess.Popen[bytes]) -> None:
    sleeper.send_signal(signal.SIGSTOP)
    while ProcessMonitor(sleeper.pid).status() != "stopped":
        time.sleep(0.01)
    stack_reports.report_if_silent(spool, sleeper.pid, 2, 1)
    stacks, file = told(spool, 2)
    assert isinstance(stacks, events.Stacks)
    assert stacks.state == "stopped"
    assert isinstance(file, events.FileSaved)
    assert file.path == "stacks/rank-1.attempt-2.txt"
    assert "SIGSTOP" in (spool.staging / file.staging).read_text()


def test_process_that_would_die_of_the_signal_is_not_sent_it(
    spool: RankSpool, sleeper: subprocess.Popen[bytes]
) -> None:
    assert not has_handler(sleeper.pid, STACKS_SIGNAL)
    stack_reports.report_if_silent(spool, sleeper.pid, 1, 1)
    stacks, _ = told(spool, 2)
    assert isinstance(stacks, events.Stacks)
    assert (stacks.state, stacks.main) == ("busy", ())
    assert sleeper.poll() is None


def test_flight_record_is_announced_if_there_is_one(spool: RankSpool) -> None:
    spec = make_spec(rank=1)
    stack_reports.announce_flight_record(spool, spec)
    assert told(spool, 0) == []
    (spool.staging / "flight-record-1").write_bytes(b"pickle")
    stack_reports.announce_flight_record(spool, spec)
    (file,) = told(spool, 1)
    assert isinstance(file, events.FileSaved)
    assert (file.path, file.staging, file.size_bytes) == ("flight-recorder/rank-1.pickle", "flight-record-1", 6)


THROWN = "terminate called after throwing an instance of '{}'\n  what():  {}\nFatal Python error: Aborted\n"
MAIN = """Fatal Python error: Aborted

{}Thread 0x2 (most recent call first):
  File "/venv/torch/{}
  File "/home/me/train.py", line 9 in main

Extension modules: torch._C
"""
ALL_REDUCE = 'distributed/distributed_c10d.py", line 4181 in all_reduce'
BACKWARD = 'autograd/graph.py", line 841 in _engine_run_backward'
ABORTING = "[TC][rank=1][name=default_pg] Aborting process on rank 1 due to "


@pytest.mark.parametrize(
    ("log", "timed_out", "lost_peer"),
    [
        ("step 3\n", False, False),
        ("[rank1]: [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)\n", True, False),
        (THROWN.format("c10::DistBackendError", "NCCL error: remote process exited or there was"), False, True),
        (THROWN.format("gloo::IoException", "Connection closed by peer [127.0.0.1]:4711"), False, True),
        (THROWN.format("std::runtime_error", "broken pipe"), False, False),  # in the user's own library
        (THROWN.format("gloo::EnforceNotMet", "op.preamble.length <= op.nbytes. 1000 vs 4"), False, False),
        (ABORTING + "timeout - timeout watchdog detected operation timeout\n", True, False),
        (ABORTING + "timeout - collective operation timed out\n", True, False),
        (ABORTING + "error - nccl hit async error: unhandled system error\n", False, True),
        (MAIN.format("", ALL_REDUCE), True, False),
        (MAIN.format("", BACKWARD), False, True),
        (MAIN.format("", 'nn/modules/linear.py", line 1 in forward'), False, False),
        (
            MAIN.format('Current thread 0x3 (most recent call first):\n  File "a.py", line 1 in f\n\n', ALL_REDUCE),
            False,
            False,
        ),
    ],
)
def test_rank_that_waited_for_a_peer_when_it_was_aborted_is_recognized(
    spool: RankSpool, log: str, timed_out: bool, lost_peer: bool
) -> None:
    spool.log.write_text(log)
    assert stack_reports.waited_for_peer(spool) == (timed_out, lost_peer)


def test_reason_of_an_abort_is_found_in_the_log(spool: RankSpool) -> None:
    assert stack_reports.why_aborted(spool) == ""
    spool.log.write_text(THROWN.format("gloo::EnforceNotMet", "op.preamble.length <= op.nbytes. 1000 vs 4"))
    assert stack_reports.why_aborted(spool) == "gloo::EnforceNotMet: op.preamble.length <= op.nbytes. 1000 vs 4"
    spool.log.write_text(THROWN.format("gloo::EnforceNotMet", "x" * 2_000))
    assert len(stack_reports.why_aborted(spool)) == 1_000
    spool.log.write_text(f"{ABORTING}error - nccl hit async error: unhandled cuda error\n")
    assert stack_reports.why_aborted(spool) == "error - nccl hit async error: unhandled cuda error"


def test_users_innermost_frame_of_a_crash_is_found_in_the_log(spool: RankSpool, tmp_path: Path) -> None:
    assert stack_reports.crash_place(spool) == ""
    script = tmp_path / "train.py"
    script.write_text("import ctypes\ndef load():\n    ctypes.string_at(0)\ndef main():\n    load()\nmain()\n")
    with spool.log.open("wb") as log:
        log.write(b"step 1\n")
        log.flush()
        subprocess.run([sys.executable, "-X", "faulthandler", script], stderr=log, check=False)
    assert stack_reports.crash_place(spool) == "train.py:3 in load"


def test_other_threads_frames_are_not_those_of_the_crash(spool: RankSpool) -> None:
    head = "1\nFatal Python error: Aborted\n\n"
    other = 'Thread 0x2 (most recent call first):\n  File "/home/a.py", line 1 in other\n'
    crashed = 'Current thread 0x3 (most recent call first):\n  File "/home/b.py", line 2 in crashed\n'
    spool.log.write_text(f"{head}{other}\n{crashed}\n{other}")
    assert stack_reports.crash_place(spool) == "b.py:2 in crashed"
    spool.log.write_text(f"{head}{other}\n{other}")  # a thread that Python has not started
    assert stack_reports.crash_place(spool) == ""


def test_cpu_time_includes_children_in_the_process_group() -> None:
    code = """
import subprocess, sys, time
subprocess.Popen([sys.executable, '-c', 'while True: pass'])
print('up', flush=True)
time.sleep(600)
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"up\n"
            monitor = ProcessMonitor(process.pid)
            before, deadline = monitor.cpu_s(), time.monotonic() + 60
            while monitor.cpu_s() - before < 0.3:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    assert ProcessMonitor(process.pid).status() == ""
