"""Whoever is told to go, the driver, a worker or a rank: the step is finished, saved, and gone on from."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
from safetensors.numpy import load_file

from tests.conftest import Cli, Finished, Running
from tests.servers.dask_cluster import DaskCluster, up_cluster

__all__ = ["up_cluster"]

T = TypeVar("T")

WORKLOAD = '''
import os, time
import torch
from torch.utils.data import DataLoader


def steps(ctx, n=40, pause_s=0.02, held_s=1.0, saves=True):
    """Takes n steps, each a mean over all ranks; from step 10 of a run's first attempt on, it takes them slowly."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters())
    resumed = ctx.resume(model=model, optimizer=optimizer)
    first = resumed.step if resumed else 0
    print("begins after step", first, "with", ctx.world_size, flush=True)
    model = torch.nn.parallel.DistributedDataParallel(model)
    batches = iter(DataLoader(list(range(10_000)), num_workers=1))
    for step in range(first + 1, n + 1):
        next(batches)
        optimizer.zero_grad()
        loss = model(torch.full((8, 4), float(step))).pow(2).mean() + torch.rand(()) * 0
        loss.backward()
        optimizer.step()
        ctx.log({"train/loss": loss.detach()}, step=step)
        if step == 10:
            print("under way", flush=True)
        if saves:
            ctx.checkpoint(model=model, optimizer=optimizer, step=step, last=step == n)
        time.sleep(pause_s if step < 10 or resumed else held_s)
'''


class Trainer:
    """A folder with the workload, and the runs that come of it; without an address they have a cluster of their own."""

    def __init__(self, cli: Cli, address: str | None = None) -> None:
        self.cli = cli
        self.cluster = {"address": address} if address else {}
        (cli.folder / "work.py").write_text(WORKLOAD)

    def config(self, ranks: object = 2, every_steps: int = 1000, failure: Any = (), **params: object) -> Path:
        path = self.cli.folder / "steps.yaml"
        content = {
            "workload": "work:steps",
            "params": params,
            "cluster": {"ranks": ranks, **self.cluster},
            "checkpoint": {"metric": None, "every_epochs": None, "every_steps": every_steps},
            "failure": {"grace_s": 30.0, **dict(failure)},
        }
        path.write_text(json.dumps(content))
        return path

    def train(self, *args: str, **settings: Any) -> Finished:
        return self.cli("train", self.config(**settings), *args)

    def start(self, *args: str, **settings: Any) -> Running:
        return self.cli.start("train", self.config(**settings), *args)

    def record(self, run: str) -> dict[str, Any]:
        record: dict[str, Any] = json.loads((self.cli.folder / "runs" / run / "run.json").read_text())
        return record

    def weights(self, run: str, step: int = 40) -> dict[str, bytes]:
        file = self.cli.folder / "runs" / run / "checkpoints" / f"step-{step}" / "model.safetensors"
        return {name: value.tobytes() for name, value in load_file(file).items()}


@pytest.fixture
def trainer(run_cli: Cli) -> Trainer:
    return Trainer(run_cli)


@pytest.fixture
def on_warm(run_cli: Cli, warm_cluster: str) -> Trainer:
    return Trainer(run_cli, warm_cluster)


def descendants(running: Running, name: str) -> list[psutil.Process]:
    found = psutil.Process(running.popen.pid).children(recursive=True)
    return [process for process in found if asked(process.name, "").startswith(name[:15])]


def worker_of(running: Running) -> psutil.Process:
    """The Dask worker of a run on a cluster of its own."""
    children = psutil.Process(running.popen.pid).children()
    (worker,) = [child for child in children if "ddptrain.worker" in asked(child.cmdline, [])]
    return worker


def asked(question: Callable[[], T], else_: T) -> T:
    """What a process answers; else something for one that has ended meanwhile."""
    with contextlib.suppress(psutil.Error):
        return question()
    return else_


def test_driver_that_is_told_to_go_saves_and_ends_with_75_and_is_resumed(on_warm: Trainer) -> None:
    assert on_warm.train("--run-id", "undisturbed", pause_s=0.0, held_s=0.0).rc == 0
    running = on_warm.start("--run-id", "night")
    running.wait_for("ddptrain: training")
    running.wait_for("under way")
    os.kill(running.popen.pid, signal.SIGTERM)
    ended = running.finish()
    assert ended.rc == 75, ended.stderr
    record = on_warm.record("night")
    assert (record["status"], record["exit_code"], record["failure"]["kind"]) == ("preempted", 75, "preempted")
    (saved,) = record["checkpoints"]
    assert f"checkpoint {saved} is saved, continue with --resume night" in ended.stderr
    resumed = on_warm.train("--resume", "auto")
    assert resumed.rc == 0, resumed.stderr
    assert f"begins after step {saved.removeprefix('step-')} with 2" in resumed.stdout
    assert on_warm.weights("night") == on_warm.weights("undisturbed")
    whole, first_s = on_warm.record("night"), record["duration_s"]
    assert whole["earlier_s"] == first_s and whole["duration_s"] > first_s > 0
    last_s = whole["duration_s"] - first_s
    assert f"succeeded after {whole['duration_s']:.1f} s ({last_s:.1f} s since it was resumed)" in resumed.stdout


def test_worker_that_is_told_to_go_with_all_its_processes_costs_no_step(trainer: Trainer) -> None:
    running = trainer.start("--run-id", "spot", failure={"max_losses": 1})
    running.wait_for("under way")
    # As a batch system does it: the worker, its rank server, the ranks, and the workers of their DataLoaders.
    worker = worker_of(running)
    for process in [*descendants(running, "ddptrain-rank0"), *descendants(running, "ddptrain-rank1")]:
        for child in process.children():
            asked(partial(child.send_signal, signal.SIGTERM), None)
        process.send_signal(signal.SIGTERM)
    worker.send_signal(signal.SIGTERM)
    ended = running.finish()
    assert ended.rc == 0, ended.stderr
    assert "was sent SIGTERM" in ended.stderr and "(loss 1 of 1)" in ended.stderr
    first, second = trainer.record("spot")["attempts"]
    assert (first["outcome"], second["outcome"]) == ("preempted", "succeeded")
    assert [rank["exit"] for rank in first["ranks"]] == [75, 75]


@pytest.fixture
def two_workers(up_cluster: DaskCluster) -> DaskCluster:
    for _ in range(2):
        up_cluster.add_worker(slots=1)
    up_cluster.wait_for_workers(2)
    return up_cluster


def test_gang_is_formed_again_with_what_is_left_after_a_loss(trainer: Trainer, two_workers: DaskCluster) -> None:
    settings = {"ranks": {"min": 1, "max": 2}, "every_steps": 2, "failure": {"max_losses": 1, "lost_after_s": 10.0}}
    running = trainer.start("--run-id", "fewer", "--cluster", two_workers.address, **settings)
    running.wait_for("under way")
    two_workers.processes[-1].kill()
    ended = running.finish()
    assert ended.rc == 0, ended.stderr
    assert "with 2" in ended.stdout and "with 1" in ended.stdout
    assert [attempt["world_size"] for attempt in trainer.record("fewer")["attempts"]] == [2, 1]


POLLS = '''
import os, signal, sys, time
import torch


def polls(ctx, then, every=5, pause_s=0.02):
    """Asks in each step whether it is to end; ends then as `then` says. A run that goes on takes ten steps more."""
    model = torch.nn.Linear(1, 1)
    resumed = ctx.resume(model=model)
    first = resumed.step if resumed else 0
    print("begins after step", first, flush=True)
    for step in range(first + 1, first + 11 if resumed else 100_000):
        told = ctx.mean(float(ctx.preempted)) > 0  # all ranks come to the same answer
        if told and then == "return":
            return {"step": step}
        if every and step % every == 0:
            ctx.checkpoint(model=model, step=step)
        if step == 10:
            print("under way", flush=True)
        time.sleep(pause_s)


def leaves(ctx):
    """One rank ends by itself, and nobody has asked for it; the other one counts on it."""
    if ctx.rank == 0:
        raise SystemExit(75)
    ctx.mean(1.0)
'''


class Poller(Trainer):
    def __init__(self, cli: Cli, address: str) -> None:
        super().__init__(cli, address)
        (cli.folder / "polling.py").write_text(POLLS)

    def config(self, function: str = "polls", **settings: Any) -> Path:  # type: ignore[override]
        path = super().config(**{"every_steps": 1, **settings})
        path.write_text(json.dumps({**json.loads(path.read_text()), "workload": f"polling:{function}"}))
        return path

    def told_to_go(self, run: str, **settings: Any) -> tuple[Finished, dict[str, Any]]:
        """The run, sent SIGTERM when both ranks are under way; and its record."""
        running = self.start("--run-id", run, **settings)
        running.wait_for("ddptrain: training")  # a line of a rank may be shown before the driver knows that it trains
        for rank in range(2):
            running.wait_for(f"[rank {rank}] under way")
        os.kill(running.popen.pid, signal.SIGTERM)
        return running.finish(), self.record(run)


@pytest.fixture
def poller(run_cli: Cli, warm_cluster: str) -> Poller:
    return Poller(run_cli, warm_cluster)


def test_function_that_returns_because_it_is_to_end_is_preempted_and_goes_on(poller: Poller) -> None:
    ended, record = poller.told_to_go("polled", then="return")
    assert ended.rc == 75, ended.stderr
    assert (record["status"], record["failure"]["kind"]) == ("preempted", "preempted")
    assert "result" not in record or record["result"] is None
    saved = record["checkpoints"][0]
    assert re.search(rf"{saved} is (saved|\d.* older), continue with --resume polled", ended.stderr), ended.stderr
    resumed = poller.train("--resume", "auto", then="return")
    assert resumed.rc == 0, resumed.stderr
    assert f"begins after step {saved.removeprefix('step-')}" in resumed.stdout
    assert poller.record("polled")["status"] == "succeeded"


def test_function_that_returns_with_nothing_saved_has_been_cancelled_and_says_so(poller: Poller) -> None:
    ended, record = poller.told_to_go("unsaved", then="return", every=0)
    assert (ended.rc, record["status"]) == (143, "cancelled"), ended.stderr
    advice = "ctx.checkpoint; if it has saved its state itself, raise SystemExit(75)"
    assert f"has saved no checkpoint with {advice}" in ended.stderr


def test_rank_that_exits_with_75_alone_is_named_as_the_cause(poller: Poller) -> None:
    ended = poller.train("--run-id", "alone", function="leaves")
    assert ended.rc == 1, ended.stderr
    assert "rank 0 on " in ended.stderr and "failed first: sys.exit(75)" in ended.stderr
