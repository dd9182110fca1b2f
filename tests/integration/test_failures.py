"""Every way a run can fail, with real processes: the command ends soon, names the cause, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PATIENCE_S, Cli, Finished, Running

GRACE_S = 600.0  # longer than a test waits for a command: none may use it

WORKLOAD = """
import os, signal, sys, time
import torch

if os.environ.get("FAULT_AT_IMPORT") == os.environ["RANK"]:
    print("importing", flush=True)
    raise RuntimeError("boom at import")


def worker_pid():
    return int(open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()[1])


def fail(fault):
    print("the last words", end="")
    if fault == "raise":
        raise ValueError("boom")
    if fault == "os_exit":
        os._exit(0)
    victim, number = {
        "kill": (os.getpid(), signal.SIGKILL),
        "segv": (os.getpid(), signal.SIGSEGV),
        "server": (os.getppid(), signal.SIGKILL),
        "worker": (worker_pid(), signal.SIGKILL),
    }[fault]
    os.kill(victim, number)
    time.sleep(60)


def main(ctx, fault, rank=1):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(2000):
        optimizer.zero_grad()
        model(torch.ones(8, 4)).pow(2).mean().backward()
        optimizer.step()
        if step == 2 and ctx.rank == rank and fault != "none":
            fail(fault)
        if step == 2:
            print("under way", flush=True)
        time.sleep(0.05)
"""


class Bench:
    """A folder with the faulty workload, and what a run of it has left."""

    def __init__(self, folder: Path, cli: Cli) -> None:
        self.folder, self.cli = folder, cli
        self.there: set[int] = set()
        self.there.update(self.pids())
        (folder / "faulty.py").write_text(WORKLOAD)
        self.use({"ranks": 2})

    def use(self, cluster: dict[str, object]) -> None:
        """Train there; without an address on a cluster of its own."""
        content = {"name": "faulty", "workload": "faulty:main", "cluster": cluster}
        content["failure"] = {"grace_s": GRACE_S}
        (self.folder / "run.yaml").write_text(json.dumps(content))

    def start(self, fault: str, *more: str) -> Running:
        return self.cli.start("train", "run.yaml", "--set", f"params.fault={fault}", *more)

    def run(self, fault: str, *more: str) -> Finished:
        """Run into the fault; the command must end soon after it."""
        return self.start(fault, *more).finish()

    @property
    def run_dir(self) -> Path:
        (folder,) = (self.folder / "runs").iterdir()
        return folder

    @property
    def record(self) -> dict[str, Any]:
        record: dict[str, Any] = json.loads((self.run_dir / "run.json").read_text())
        return record

    def log(self, rank: int) -> str:
        return (self.run_dir / "logs" / f"rank-{rank}.log").read_text()

    def pids(self) -> list[int]:
        """Processes of the run that live on (zombies are none), and its cluster's unless it was there before."""
        mark = os.environ["DDPTRAIN_TESTS"]
        return [pid for pid in _all_pids() if pid not in self.there and _belongs(pid, mark)]

    def left(self) -> list[int]:
        """The same, once they had their time to end."""
        deadline = time.monotonic() + PATIENCE_S
        while (pids := self.pids()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return pids


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def _belongs(pid: int, mark: str) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"ddptrain" in command and mark.encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


@pytest.fixture
def bench(tmp_path: Path, run_cli: Cli) -> Iterator[Bench]:
    there = Bench(tmp_path, run_cli)
    yield there
    assert not there.left(), "a process is left long after the end"


@pytest.fixture
def on_warm(warm_cluster: str, bench: Bench) -> Bench:
    """On a cluster that is up, and that stays."""
    bench.use({"ranks": 2, "address": warm_cluster})
    return bench


def assert_failed(bench: Bench, ended: Finished, *, code: int, rank: int, kind: str, words: str) -> None:
    """The exit code, the one line on stderr, run.json, and the tidy run directory."""
    assert ended.rc == code, ended.stderr
    record = bench.record
    assert (record["status"], record["exit_code"]) == ("failed", code)
    failure = record["failure"]
    assert (failure["rank"], failure["kind"]) == (rank, kind)
    assert words in failure["message"]
    log = bench.run_dir / "logs" / f"rank-{rank}.log"
    assert failure["log"] == str(log)
    assert record["attempts"][0]["ranks"][rank]["host"]
    (line,) = [line for line in ended.stderr.splitlines() if " failed first: " in line]
    assert re.search(rf"rank {rank} on \S+ failed first: ", line)
    assert words in line
    assert str(log) in line
    assert not (bench.run_dir / ".scratch").exists()
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("fault", "kind", "words", "exit_status"),
    [
        ("raise", "exception", "boom", 1),
        ("os_exit", "exit", "exit code 0 in the middle", 0),
        ("segv", "signal", "killed by SIGSEGV", -11),
    ],
)
def test_fault_of_one_rank_ends_the_run_and_is_named(
    on_warm: Bench, fault: str, kind: str, words: str, exit_status: int
) -> None:
    ended = on_warm.run(fault)
    assert_failed(on_warm, ended, code=1, rank=1, kind=kind, words=words)
    assert on_warm.record["attempts"][0]["ranks"][1]["exit"] == exit_status
    assert "the last words" in on_warm.log(1)
    assert "[rank 1] the last words" in ended.stdout


def test_fault_of_rank_0_is_not_blamed_on_the_others(on_warm: Bench) -> None:
    ended = on_warm.run("kill", "--set", "params.rank=0", "--ranks", "3")
    assert_failed(on_warm, ended, code=1, rank=0, kind="signal", words="killed by SIGKILL")


def test_fault_before_the_process_group_is_up(on_warm: Bench) -> None:
    ended = on_warm.run("none", "--set", "env.FAULT_AT_IMPORT='1'")
    assert_failed(on_warm, ended, code=1, rank=1, kind="exception", words="boom at import")
    assert "before the process group was up" in ended.stderr
    assert "importing" in on_warm.log(1)


def test_killed_dask_worker_is_a_cluster_failure(bench: Bench) -> None:
    ended = bench.run("worker")
    assert_failed(bench, ended, code=4, rank=0, kind="worker_lost", words="killed by SIGKILL")
    assert "the last words" in bench.log(1)


def test_killed_rank_server_is_a_cluster_failure(bench: Bench) -> None:
    ended = bench.run("server")
    assert_failed(bench, ended, code=4, rank=0, kind="infrastructure", words="rank server")


def test_ctrl_c_during_the_start_cancels_the_run(bench: Bench) -> None:
    running = bench.start("none")
    running.wait_for("starting 2 ranks on a local cluster")
    running.popen.send_signal(signal.SIGINT)
    assert running.finish().rc == 130
    assert bench.record["status"] == "cancelled"


def test_killed_driver_takes_everything_along_and_shows_as_failed(bench: Bench) -> None:
    running = bench.start("none")
    running.wait_for("[rank 1] under way")
    running.popen.kill()
    running.popen.wait()
    assert not bench.left()
    assert "under way" in bench.log(1)
    assert not (bench.run_dir / ".scratch").exists()
    shown = bench.cli("results", "show", "latest", "--json")
    assert json.loads(shown.stdout)["status"] == "failed"


def test_torch_that_does_not_import_is_a_cluster_failure_with_its_reason(bench: Bench) -> None:
    (bench.folder / "broken").mkdir()
    (bench.folder / "broken" / "torch.py").write_text("raise ImportError('libcudart.so: cannot open')\n")
    path = str(bench.folder / "broken")
    ended = bench.cli("train", "run.yaml", "--set", "params.fault=none", env={"PYTHONPATH": path})
    assert ended.rc == 4
    assert "could not start: ImportError: libcudart.so: cannot open" in ended.stderr
