"""`ddptrain train` with real processes: placing, logs, results, several at once, and clusters that are up."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.numpy import load_file

from tests.conftest import PATIENCE_S, Cli, Finished
from tests.servers.dask_cluster import DaskCluster, up_cluster

__all__ = ["up_cluster"]  # a fixture

WORKLOAD = '''
import os, sys, time
import torch
import torch.distributed as dist


def steps(ctx, epochs=2, pause=0.0, until=""):
    """Trains a little, and uses all of the context; in its first epoch it waits for the file `until`."""
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1).to(ctx.device))
    optimizer = torch.optim.Adam(model.parameters())
    for epoch in range(1, epochs + 1):
        optimizer.zero_grad()
        loss = model(torch.full((8, 4), float(ctx.rank))).pow(2).mean()
        loss.backward()
        optimizer.step()
        ctx.log({"train/loss": loss.detach()}, step=epoch, epoch=epoch)
        ctx.progress(epoch, epochs, unit="epochs")
        ctx.checkpoint(model=model, optimizer=optimizer, step=epoch, epoch=epoch, metrics={"val/loss": 1.0 / epoch})
        time.sleep(pause)
        if until and epoch == 1:
            print("waiting", flush=True)
            while not os.path.exists(until):
                time.sleep(0.02)
    ctx.save_file(f"samples/rank-{ctx.rank}.txt", f"of rank {ctx.rank}")
    total = torch.tensor([ctx.rank + 1.0])
    dist.all_reduce(total)
    print("sum", int(total), "of", ctx.world_size, "threads", torch.get_num_threads())
    print("pid", os.getpid(), "ppid", os.getppid(), flush=True)


def odd_output(ctx):
    print("out", flush=True)
    print("err", file=sys.stderr, flush=True)
    os.write(1, "caf\\u00e9".encode()[:4])
    time.sleep(0.1)
    os.write(1, "caf\\u00e9".encode()[4:] + b"\\n")
    for percent in range(0, 101, 10):
        sys.stdout.write(f"\\r{percent}%")
    print()
    print("x" * 10_000_000)
    for number in range(3000):
        print("line", number)
    os.system("echo from a child")
    sys.stdout.write("no newline at the end")


def burst(ctx, lines=20000):
    for number in range(lines):
        print(f"{number:06d} of rank {ctx.rank}")
'''


class Trainer:
    """A folder with workloads; trains them and reads what came out. Without an address, on clusters of their own."""

    def __init__(self, folder: Path, cli: Cli, address: str | None = None) -> None:
        self.folder, self.cli = folder, cli
        self.cluster = {"ranks": 2, **({"address": address} if address else {})}
        self.go = folder / "go"
        (folder / "work.py").write_text(WORKLOAD)

    def config(self, workload: str, **more: object) -> Path:
        path = self.folder / f"{workload}.yaml"
        path.write_text(json.dumps({"workload": f"work:{workload}", "cluster": self.cluster, **more}))
        return path

    def train(self, workload: str, *args: str, shell: dict[str, str] | None = None, **more: object) -> Finished:
        return self.cli("train", self.config(workload, **more), *args, env=shell)

    def run_dirs(self) -> list[Path]:
        return sorted((self.folder / "runs").iterdir())

    def run_dir(self) -> Path:
        (folder,) = self.run_dirs()
        return folder

    def record(self) -> dict[str, Any]:
        record: dict[str, Any] = json.loads((self.run_dir() / "run.json").read_text())
        return record

    def log(self, rank: int) -> str:
        return (self.run_dir() / "logs" / f"rank-{rank}.log").read_text()


@pytest.fixture
def trainer(tmp_path: Path, run_cli: Cli) -> Trainer:
    return Trainer(tmp_path, run_cli)


@pytest.fixture
def on_warm(tmp_path: Path, run_cli: Cli, warm_cluster: str) -> Trainer:
    return Trainer(tmp_path, run_cli, warm_cluster)


def json_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_run_prints_plain_lines_in_a_pipe_and_leaves_a_complete_run_directory(trainer: Trainer) -> None:
    ended = trainer.train("steps")
    assert ended.rc == 0, ended.stderr
    assert re.search(r"^\[rank 1\] sum 3 of 2", ended.stdout, re.MULTILINE)
    assert "\x1b" not in ended.stdout + ended.stderr
    record = trainer.record()
    assert (record["status"], record["exit_code"], record["world_size"]) == ("succeeded", 0, 2)
    assert record["failure"] is None
    ranks = record["attempts"][0]["ranks"]
    assert [(rank["rank"], rank["local_rank"], rank["exit"]) for rank in ranks] == [(0, 0, 0), (1, 1, 0)]
    assert record["best"] == {"metric": "val/loss", "mode": "min", "value": 0.5, "step": 2}
    assert record["rank_environment"]["OMP_NUM_THREADS"]["source"] == "ddptrain"
    assert "torch" in record["versions"]

    root = trainer.run_dir()
    assert {path.name for path in root.iterdir()} - {"system.jsonl"} == {  # that one after 5 s
        *("run.json", "run.lock", "config.yaml", "events.jsonl", "metrics.jsonl"),
        *("logs", "checkpoints", "artifacts"),
    }
    assert (root / "checkpoints/latest").read_text().strip() == "step-2"
    assert set(load_file(root / "checkpoints/step-2/model.safetensors")) == {"weight", "bias"}
    assert (root / "artifacts/samples/rank-1.txt").read_text() == "of rank 1"
    metrics = json_lines((root / "metrics.jsonl").read_text())
    assert {(line["rank"], line["step"]) for line in metrics} == {(r, s) for r in (0, 1) for s in (1, 2)}
    kinds = [line["event"] for line in json_lines((root / "events.jsonl").read_text())]
    assert [kind for kind in kinds if kind != "status"][:2] == ["driver_started", "run_started"]
    assert kinds[-1] == "run_finished"
    assert kinds.count("rank_started") == kinds.count("rank_ended") == 2


def test_odd_output_reaches_log_and_pipe_whole(on_warm: Trainer) -> None:
    ended = on_warm.train("odd_output", "--ranks", "1")
    assert ended.rc == 0
    raw = (on_warm.run_dir() / "logs/rank-0.log").read_bytes()
    text = raw.decode()
    assert text.startswith("out\nerr\ncafé\n")
    assert "x" * 10_000_000 in text
    assert re.findall(r"^line (\d+)$", text, re.MULTILINE) == [str(number) for number in range(3000)]
    assert text.endswith("from a child\nno newline at the end")
    shown = ended.stdout.splitlines()
    assert "[rank 0] café" in shown
    assert "[rank 0] 100%" in shown
    assert "[rank 0] no newline at the end" in shown
    assert [line for line in shown if line.startswith("[rank 0] line ")] == [f"[rank 0] line {n}" for n in range(3000)]
    assert sum(line.count("x") for line in shown) >= 10_000_000


def test_embedded_cluster_listens_on_loopback_only(trainer: Trainer) -> None:
    running = trainer.cli.start("train", trainer.config("steps", params={"until": "go"}))
    running.wait_for("ddptrain: training")
    driver = psutil.Process(running.popen.pid)
    sockets = []
    for process in (driver, *driver.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            sockets += [each for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN]
    assert len(sockets) >= 3
    assert {connection.laddr.ip for connection in sockets} == {"127.0.0.1"}
    trainer.go.touch()
    ended = running.finish()
    assert ended.rc == 0
    assert "Warning" not in ended.stderr


def test_reader_that_leaves_does_not_stop_the_training(on_warm: Trainer) -> None:
    config = on_warm.config("steps", params={"epochs": 10, "pause": 0.1})
    command = f"{sys.executable} -m ddptrain train {config} --output plain | head -1"
    shell = subprocess.run(["bash", "-c", command], cwd=on_warm.folder, capture_output=True, text=True, timeout=100)
    assert len(shell.stdout.splitlines()) == 1
    deadline = time.monotonic() + PATIENCE_S
    while on_warm.record()["status"] == "running" and time.monotonic() < deadline:
        time.sleep(0.1)
    assert on_warm.record()["status"] == "succeeded"


def test_ranks_of_two_runs_on_a_cluster_are_forked_from_one_server(on_warm: Trainer) -> None:
    for _ in range(2):
        ended = on_warm.train("steps")
        assert ended.rc == 0, ended.stderr
    logs = [(folder / "logs" / f"rank-{rank}.log").read_text() for folder in on_warm.run_dirs() for rank in range(2)]
    assert len({re.search(r"ppid (\d+)", log)[1] for log in logs}) == 1  # type: ignore[index]


@pytest.mark.long
def test_ranks_spread_over_workers_of_a_host_and_leave_nothing_there(trainer: Trainer, up_cluster: DaskCluster) -> None:
    scratch = [trainer.folder / f"worker-{number}" for number in range(2)]
    for folder in scratch:
        up_cluster.add_worker(slots=1, scratch=folder)
    ended = trainer.train("steps", "--cluster", up_cluster.address)
    assert ended.rc == 0, ended.stderr
    assert [rank["local_rank"] for rank in trainer.record()["attempts"][0]["ranks"]] == [0, 1]
    deadline = time.monotonic() + PATIENCE_S
    while left := [path for folder in scratch for path in folder.iterdir() if path.name.startswith("steps-")]:
        assert time.monotonic() < deadline, f"the run's spool stays: {left}"
        time.sleep(0.05)


def test_too_few_slots_end_with_4_and_the_numbers(on_warm: Trainer) -> None:
    ended = on_warm.train("steps", "--ranks", "7", "--set", "cluster.start_timeout_s=5")
    assert ended.rc == 4
    told = r"7 slots are needed, but only 6 joined within \d+ s \(6 on 127\.0\.0\.1\)"
    assert re.search(told, ended.stderr), ended.stderr


def test_killed_scheduler_ends_the_run_with_4_and_every_rank(trainer: Trainer, up_cluster: DaskCluster) -> None:
    up_cluster.add_worker(slots=2)
    config = trainer.config("steps", params={"pause": 300.0})
    running = trainer.cli.start("train", config, "--cluster", up_cluster.address)
    running.wait_for("ddptrain: training")
    up_cluster.processes[0].kill()
    ended = running.finish(60)
    assert ended.rc == 4, ended.stderr
    assert "the Dask scheduler has ended" in ended.stderr
    assert trainer.record()["status"] == "failed"
    up_cluster.processes[1].wait(PATIENCE_S)  # the worker ends by itself, and the leak guard looks for its ranks


def test_nobody_at_the_address_is_a_cluster_error(trainer: Trainer) -> None:
    ended = trainer.train("steps", "--cluster", "tcp://127.0.0.1:9", "--set", "cluster.start_timeout_s=2")
    assert ended.rc == 4
    assert "no Dask scheduler answers at tcp://127.0.0.1:9" in ended.stderr
    assert trainer.record()["status"] == "failed"


def _can_unshare() -> bool:
    command = ["unshare", "--mount", "true"]
    return bool(shutil.which("unshare")) and subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.skipif(os.geteuid() != 0 or not _can_unshare(), reason="needs root and mount namespaces")
def test_worker_with_another_file_system_brings_everything_home(trainer: Trainer, up_cluster: DaskCluster) -> None:
    scratch = trainer.folder / "hidden"
    scratch.mkdir()
    hide = f'mount -t tmpfs none {scratch} && exec "$@"'
    up_cluster.add_worker("unshare", "--mount", "bash", "-c", hide, "-", scratch=scratch)
    ended = trainer.train("steps", "--cluster", up_cluster.address)
    assert ended.rc == 0, ended.stderr
    assert list(scratch.iterdir()) == [], "the driver sees nothing of the worker's folder"
    root = trainer.run_dir()
    assert set(load_file(root / "checkpoints/step-2/model.safetensors")) == {"weight", "bias"}
    assert (root / "artifacts/samples/rank-1.txt").read_text() == "of rank 1"
    assert "sum 3 of 2" in trainer.log(0)

    burst = trainer.train("burst", "--cluster", up_cluster.address, "--run-id", "burst")
    for rank in range(2):
        wanted = [f"{number:06d} of rank {rank}" for number in range(20000)]
        assert (trainer.folder / f"runs/burst/logs/rank-{rank}.log").read_text().splitlines() == wanted
    assert burst.rc == 0


@pytest.mark.long
def test_worker_that_is_busy_with_other_work_is_not_waited_for_for_ever(
    trainer: Trainer, up_cluster: DaskCluster
) -> None:
    for name in ("one", "two"):
        up_cluster.add_dask_worker(name, "--no-nanny")
    up_cluster.wait_for_workers(2)
    with up_cluster.client() as client:
        done = trainer.folder / "done"
        wait = f"until [ -e {done} ]; do sleep 0.1; done"
        busy = client.submit(subprocess.check_call, ["sh", "-c", wait], pure=False)
        while not any(client.processing().values()):
            time.sleep(0.05)
        ended = trainer.train("steps", "--cluster", up_cluster.address, "--set", "cluster.start_timeout_s=10")
        assert ended.rc == 4
        told = "has not started it within 10 s (cluster.start_timeout_s): is this too short, or is the worker"
        assert told in ended.stderr, ended.stderr
        assert busy.status == "pending"  # other people's work is left alone
        done.touch()
        assert busy.result(timeout=PATIENCE_S) == 0
