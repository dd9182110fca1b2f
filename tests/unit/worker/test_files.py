"""Files of a worker: code, spools, and stacks."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ddptrain.protocol import events
from ddptrain.worker import stack_reports
from ddptrain.worker.spool import RankSpool
from tests.unit.specs import make_spec

# --- Why a rank's files take nothing more ---


@pytest.fixture
def spool(tmp_path: Path) -> RankSpool:
    made = RankSpool(tmp_path / "rank-0")
    made.create()
    return made


def test_events_at_the_limit_on_the_size_of_files_are_the_reason(
    spool: RankSpool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool.events.write_bytes(b"x" * 4096)
    limits = {"now": resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits["now"], -1))
    assert spool.why_unwritable() == ""
    limits["now"] = 4097
    assert spool.why_unwritable() == ""
    limits["now"] = 4096
    assert spool.why_unwritable() == (
        "its events or log have reached the limit on the size of files, 4,096 bytes; raise it: ulimit -f"
    )


def test_full_disk_is_the_reason(spool: RankSpool, monkeypatch: pytest.MonkeyPatch) -> None:
    now = list(os.statvfs(spool.folder))
    now[4] = 0  # f_bavail
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(now))
    assert spool.why_unwritable() == f"the disk of {spool.folder} is full"


# --- What a worker reports for a rank that cannot report itself ---


@pytest.fixture
def spool_stack_reports(tmp_path: Path) -> RankSpool:
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


def told(spool_stack_reports: RankSpool, count: int) -> list[events.Event]:
    deadline = time.monotonic() + 60.0
    while len(lines := spool_stack_reports.events.read_bytes().splitlines()) < count and time.monotonic() < deadline:
        time.sleep(0.02)
    return [events.decode(line) for line in lines]


def test_stopped_process_is_reported_at_once_with_a_file(
    spool_stack_reports: RankSpool, sleeper: subprocess.Popen[bytes]
) -> None:
    sleeper.send_signal(signal.SIGSTOP)
    while psutil.Process(sleeper.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    stack_reports.report_stacks(spool_stack_reports, sleeper.pid, 2, 1)
    file, stacks = told(spool_stack_reports, 2)
    assert isinstance(stacks, events.Stacks)
    assert stacks.state == "stopped"
    assert isinstance(file, events.FileSaved)
    assert file.path == "stacks/rank-1.attempt-2.txt"
    assert "SIGSTOP" in (spool_stack_reports.staging / file.staging).read_text()


def test_process_that_would_die_of_the_signal_is_not_sent_it(
    spool_stack_reports: RankSpool, sleeper: subprocess.Popen[bytes]
) -> None:
    stack_reports.report_stacks(spool_stack_reports, sleeper.pid, 1, 1)
    _, stacks = told(spool_stack_reports, 2)
    assert isinstance(stacks, events.Stacks)
    assert (stacks.state, stacks.main) == ("busy", ())
    assert sleeper.poll() is None


WRITES = """
import os, sys, threading, time
from pathlib import Path
from types import SimpleNamespace
from ddptrain.rank.failure import StackWriter

def wait():
    print("up", flush=True)
    time.sleep(600)

writer = StackWriter(SimpleNamespace(host=SimpleNamespace(staging=sys.argv[1])))
threading.Thread(target=lambda: (sys.stdin.readline(), writer.write())).start()
wait()
"""


def test_rank_writes_its_stacks_without_a_signal(spool_stack_reports: RankSpool) -> None:
    command = [sys.executable, "-c", WRITES, str(spool_stack_reports.staging)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        stack_reports.report_stacks(spool_stack_reports, process.pid, 1, 1)
        process.stdin.write(b"now\n")
        process.stdin.flush()
        file, stacks = told(spool_stack_reports, 2)
        process.kill()
    assert isinstance(stacks, events.Stacks) and isinstance(file, events.FileSaved)
    assert (stacks.state, stacks.sequence, stacks.pending, stacks.handles) == ("", None, "", "")
    assert [frame.rpartition(" ")[2] for frame in stacks.main] == ["wait", "<module>"]
    assert " in write\n" in (spool_stack_reports.staging / file.staging).read_text()  # of the other threads, too


def test_flight_record_is_announced_if_there_is_one(spool_stack_reports: RankSpool) -> None:
    spec = make_spec(rank=1)
    stack_reports.announce_flight_record(spool_stack_reports, spec)
    assert told(spool_stack_reports, 0) == []
    (spool_stack_reports.staging / "flight-record-1").write_bytes(b"pickle")
    stack_reports.announce_flight_record(spool_stack_reports, spec)
    (file,) = told(spool_stack_reports, 1)
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
    spool_stack_reports: RankSpool, log: str, timed_out: bool, lost_peer: bool
) -> None:
    spool_stack_reports.log.write_text(log)
    assert stack_reports.waited_for_peer(spool_stack_reports) == (timed_out, lost_peer)


def test_reason_of_an_abort_is_found_in_the_log(spool_stack_reports: RankSpool) -> None:
    assert stack_reports.why_aborted(spool_stack_reports) == ""
    spool_stack_reports.log.write_text(
        THROWN.format("gloo::EnforceNotMet", "op.preamble.length <= op.nbytes. 1000 vs 4")
    )
    assert (
        stack_reports.why_aborted(spool_stack_reports)
        == "gloo::EnforceNotMet: op.preamble.length <= op.nbytes. 1000 vs 4"
    )
    spool_stack_reports.log.write_text(THROWN.format("gloo::EnforceNotMet", "x" * 2_000))
    assert len(stack_reports.why_aborted(spool_stack_reports)) == 1_000
    spool_stack_reports.log.write_text(f"{ABORTING}error - nccl hit async error: unhandled cuda error\n")
    assert stack_reports.why_aborted(spool_stack_reports) == "error - nccl hit async error: unhandled cuda error"


def test_users_innermost_frame_of_a_crash_is_found_in_the_log(spool_stack_reports: RankSpool, tmp_path: Path) -> None:
    assert stack_reports.crash_place(spool_stack_reports) == ""
    script = tmp_path / "train.py"
    script.write_text("import ctypes\ndef load():\n    ctypes.string_at(0)\ndef main():\n    load()\nmain()\n")
    with spool_stack_reports.log.open("wb") as log:
        log.write(b"step 1\n")
        log.flush()
        subprocess.run([sys.executable, "-X", "faulthandler", script], stderr=log, check=False)
    assert stack_reports.crash_place(spool_stack_reports) == "train.py:3 in load"


def test_other_threads_frames_are_not_those_of_the_crash(spool_stack_reports: RankSpool) -> None:
    head = "1\nFatal Python error: Aborted\n\n"
    other = 'Thread 0x2 (most recent call first):\n  File "/home/a.py", line 1 in other\n'
    crashed = 'Current thread 0x3 (most recent call first):\n  File "/home/b.py", line 2 in crashed\n'
    spool_stack_reports.log.write_text(f"{head}{other}\n{crashed}\n{other}")
    assert stack_reports.crash_place(spool_stack_reports) == "b.py:2 in crashed"
    spool_stack_reports.log.write_text(f"{head}{other}\n{other}")  # a thread that Python has not started
    assert stack_reports.crash_place(spool_stack_reports) == ""
