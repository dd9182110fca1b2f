"""The backend slurm, with a real Slurm of two nodes that the test starts."""

from __future__ import annotations

import json
import random
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Cli, Finished
from tests.servers.slurmd import Slurm, slurm
from tests.support.command import INSTALLED, PATIENCE_S, wait_until

pytestmark = pytest.mark.slow

WORKLOAD = """
import os
import torch
import torch.distributed as dist


def tell(ctx):
    total = torch.tensor([ctx.rank + 1.0])
    dist.all_reduce(total)
    print("sum", int(total), "job", "SLURM_JOB_ID" in os.environ, "value", os.environ.get("MY_VALUE"))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(tmp_path_factory.mktemp("slurm") / "site") as found:
        yield found


@pytest.fixture(autouse=True)
def cancelled(site: Slurm, leak_guard: None) -> Iterator[None]:
    """No test leaves a job to the next one."""
    yield
    site.call("scancel", "--me")


def cluster(cli: Cli, site: Slurm, *args: str, rc: int = 0) -> Finished:
    done = cli.look(*args, env=site.env) if args[0] == "status" else cli("cluster", *args, env=site.env)
    assert done.rc == rc, done
    return done


def up(cli: Cli, site: Slurm, *args: str, rc: int = 0) -> Finished:
    return cluster(cli, site, "up", "--name", "dev", "--backend", "slurm", "--json", *args, rc=rc)


def test_cluster_is_a_job_that_trains_and_is_cancelled(run_cli: Cli, site: Slurm, tmp_path: Path) -> None:
    settings = ["--set", "cluster.slurm.nodes=2", "--set", "cluster.slurm.ranks_per_node=1"]
    settings += [
        "--set",
        "cluster.slurm.setup=[export MY_VALUE=there]",
        "--set",
        f"cluster.slurm.folder={tmp_path / 'shared'}",
    ]
    said = up(run_cli, site, *settings)
    assert "the scheduler and 2 workers" in said.stderr
    told = json.loads(said.stdout)
    assert told["address"].startswith("tls://") and told["slots"] == 2
    assert sorted(worker["name"].split("-")[0] for worker in told["workers"]) == ["n1", "n2"]

    (run_cli.folder / "work.py").write_text(WORKLOAD)
    config = run_cli.folder / "tell.yaml"
    config.write_text(json.dumps({"workload": "work:tell", "cluster": {"name": "dev"}}))
    trained = run_cli("train", config, env=site.env)
    assert trained.rc == 0, trained.stderr
    assert "[rank 0] sum 3 job True value there" in trained.stdout
    assert "[rank 1] sum 3 job True value there" in trained.stdout

    logs = json.loads(cluster(run_cli, site, "logs", "dev", "--json").stdout)
    assert "scheduler" in logs and any(source.startswith("worker n1") for source in logs)

    cluster(run_cli, site, "down", "dev")
    assert site.jobs() == "" and list((tmp_path / "shared").iterdir()) == []


def test_driver_in_an_allocation_starts_its_workers_there(run_cli: Cli, site: Slurm) -> None:
    (run_cli.folder / "work.py").write_text(WORKLOAD)
    config = run_cli.folder / "tell.yaml"
    slurm_settings = {"ranks_per_node": 1, "setup": ["export MY_VALUE=there"]}
    config.write_text(json.dumps({"workload": "work:tell", "cluster": {"slurm": slurm_settings}}))
    # What the job asks for per task is not for the workers.
    job = ("salloc", "--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1", "--quiet", *INSTALLED)
    trained = run_cli("train", config, "--run-id", "inside", env=site.env, program=job)
    assert trained.rc == 0, trained.stderr
    assert "[rank 0] sum 3 job True value there" in trained.stdout
    assert "[rank 1] sum 3 job True value there" in trained.stdout
    assert site.jobs() == "" and json.loads(cluster(run_cli, site, "status", "--json").stdout) == []


TRAINING = """
import time
import torch


def train(ctx, steps=40, pause_s=0.0):
    torch.manual_seed(5)
    model = torch.nn.Linear(4, 1)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    found = ctx.resume(model=model, optimizer=optimizer)
    for step in range(found.step + 1 if found else 1, steps + 1):
        torch.manual_seed(100 * step + ctx.rank)
        optimizer.zero_grad()
        loss = ddp(torch.randn(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
        ctx.progress(step, steps)
        ctx.log({"loss": loss.item()}, step=step)
        time.sleep(pause_s)
        ctx.checkpoint(model=model, optimizer=optimizer, step=step)
    print("weights", model.weight.tolist(), flush=True)
"""


class Submitted:
    """A configuration whose runs are submitted from here, the login node."""

    def __init__(self, cli: Cli, site: Slurm, **settings: object) -> None:
        self.cli, self.env = cli, site.env
        (cli.folder / "work.py").write_text(TRAINING)
        config = {"workload": "work:train", "name": "lines", "cluster": {"slurm": {"ranks_per_node": 1, **settings}}}
        (cli.folder / "work.yaml").write_text(json.dumps(config))

    def __call__(self, *args: str, rc: int = 0) -> Finished:
        done = self.cli(*args, env=self.env)
        assert done.rc == rc, done
        return done

    def run(self) -> Any:
        """The only run, as `results list --json` has it."""
        (run,) = json.loads(self("results", "list", "--json").stdout)
        return run

    def until(self, status: str, timeout_s: float = PATIENCE_S, **wanted: object) -> Any:
        deadline = time.monotonic() + timeout_s
        while (run := self.run())["status"] != status or any(run[key] != value for key, value in wanted.items()):
            assert time.monotonic() < deadline and run["status"] not in {"succeeded", "failed", "cancelled"} - {
                status
            }, run
            time.sleep(0.2)
        return run


def test_submitted_run_goes_on_after_a_warning_until_somebody_stops_it(run_cli: Cli, site: Slurm) -> None:
    site.call("scontrol", "update", "PartitionName=main", "State=DOWN")
    login = Submitted(run_cli, site)
    said = login("train", "work.yaml", "--submit", "--set", "params={steps: 10000, pause_s: 0.1}")
    run_id, run = said.stdout.strip(), login.run()
    (job,) = run["jobs"]
    assert f"run {run_id} is queued as slurm job {job['id']}; follow it with" in said.stderr
    assert (run["run_id"], run["status"], job["state"]) == (run_id, "queued", "PENDING (PartitionDown)")
    table = login("results", "list").stdout
    assert "queued" in table and f"slurm job {job['id']} is PENDING (PartitionDown)" in table
    assert site.call("squeue", "--noheader", "--format=%j").strip() == "lines"
    watching = run_cli.start("watch", run_id, env=site.env)
    watching.wait_for("is PENDING (PartitionDown)")

    site.call("scontrol", "update", "PartitionName=main", "State=UP")
    login.until("running", waiting=False)
    watching.wait_for("training")
    while not login.run()["checkpoints"]:
        time.sleep(0.2)
    site.call("scancel", "--batch", "--signal=TERM", job["id"])  # as --signal=B:TERM@120 does
    assert login.until("queued")["exit_code"] == 75
    again = login.until("running", waiting=False)
    assert [(each["id"], each["starts"]) for each in again["jobs"]] == [(job["id"], 2)]
    assert f"{job['id']} (2 starts)" in login("results", "list").stdout
    login.until("running", exit_code=None)
    assert "stopped (saved)" in login("stop", run_id).stdout
    assert watching.finish().rc == 75
    assert login.run()["attempts"][-1]["resumed_from"] > 0
    assert site.jobs() == ""


def test_queued_run_is_stopped_with_its_job_and_one_whose_job_is_cancelled_has_failed(
    run_cli: Cli, site: Slurm
) -> None:
    login = Submitted(run_cli, site, partition="closed")
    login("train", "work.yaml", "--submit")
    assert "stopped" in login("stop", "latest").stdout
    assert site.jobs() == "" and login.run()["status"] == "cancelled"
    login("train", "work.yaml", "--submit", "--resume", "latest")
    _, second = login.run()["jobs"]
    site.call("scancel", second["id"])
    run = login.run()
    assert run["status"] == "failed" and f"slurm job {second['id']} has ended without" in run["failure"]["message"]


@pytest.mark.parametrize(
    ("cluster", "path", "rc", "words"),
    [
        ({"slurm": {"partition": "nowhere"}}, "", 4, "partition"),
        ({"slurm": {}}, "/nowhere", 4, "there is no sbatch here"),
        ({"backend": "local"}, "", 2, "--submit is for cluster.backend slurm or kubernetes"),
        ({"ssh": {"hosts": ["h"]}}, "", 2, "--submit is for cluster.backend slurm or kubernetes"),
        ({"name": "dev"}, "", 2, "--detach"),
    ],
)
def test_submit_that_is_not_possible_is_one_line_and_leaves_no_run(
    run_cli: Cli, site: Slurm, cluster: dict[str, object], path: str, rc: int, words: str
) -> None:
    login = Submitted(run_cli, site)
    (run_cli.folder / "work.yaml").write_text(json.dumps({"workload": "work:train", "cluster": cluster}))
    login.env = {**site.env, **({"PATH": path} if path else {})}
    said = login("train", "work.yaml", "--submit", rc=rc)
    assert words in said.stderr and len(said.stderr.splitlines()) == 1
    assert json.loads(login("results", "list", "--json").stdout) == [] and site.jobs() == ""


@pytest.mark.long
def test_job_that_is_cancelled_or_fails_is_not_queued_again(run_cli: Cli, site: Slurm) -> None:
    login = Submitted(run_cli, site)
    login("train", "work.yaml", "--submit", "--set", "params={steps: 10000, pause_s: 0.1}")
    while not (run := login.run())["checkpoints"]:
        time.sleep(0.2)
    site.call("scancel", run["jobs"][0]["id"])
    while (run := login.run())["status"] == "running" or site.jobs():  # Slurm ends the workers at once
        time.sleep(0.2)
    assert run["status"] in {"preempted", "cancelled", "failed"}
    (run_cli.folder / "work.py").write_text("def train(ctx, steps=1, pause_s=1.0):\n    raise ValueError('mine')\n")
    login("train", "work.yaml", "--submit", "--resume", "latest", "--allow-changes")
    failed = login.until("failed")
    assert "mine" in failed["failure"]["message"] and [job["starts"] for job in failed["jobs"]] == [1, 1]
    while site.jobs():
        time.sleep(0.2)
    assert login.run()["status"] == "failed"


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_run_of_three_time_limits_has_the_weights_of_one_without(run_cli: Cli, site: Slurm) -> None:
    login = Submitted(run_cli, site, nodes=2, time="2", directives=["--signal=B:TERM@15"])
    login("train", "work.yaml", "--submit", "--set", "params={steps: 150, pause_s: 1.0}")
    run = login.until("succeeded", 1500)
    (job,) = run["jobs"]
    assert job["starts"] >= 3 and len(run["attempts"]) == job["starts"]
    assert all(attempt["resumed_from"] for attempt in run["attempts"][1:])
    whole = login("train", "work.yaml", "--set", "cluster={backend: local, ranks: 2}", "--set", "params.steps=150")
    log = (run_cli.folder / run["run_dir"] / "logs" / "rank-0.log").read_text()
    (weights,) = {line.partition("weights")[2] for line in whole.stdout.splitlines() if "weights" in line}
    assert f"weights{weights}" in log


# pyxis is a plugin of srun: this one takes its options, and starts the worker without a container.
SRUN = """#!/bin/sh
if [ "$1" = --help ]; then echo "      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]"; exit; fi
for word do
    shift
    case $word in --container-*) echo "$word" >>"$SEEN" ;; *) set -- "$@" "$word" ;; esac
done
exec {srun} "$@"
"""


def test_workers_run_in_containers_where_srun_has_pyxis(run_cli: Cli, site: Slurm) -> None:
    (run_cli.folder / "work.py").write_text(WORKLOAD)
    settings = {"ranks_per_node": 1, "container_image": "image:1", "container_mounts": ["/data:/data:ro"]}
    settings |= {"python": sys.executable, "folder": str(run_cli.folder / "shared")}
    config = run_cli.folder / "tell.yaml"
    config.write_text(json.dumps({"workload": "work:tell", "cluster": {"slurm": settings}}))
    refused = run_cli("train", config, env=site.env)
    assert refused.rc == 4 and "needs Slurm's plugin pyxis" in refused.stderr

    program, seen = run_cli.folder / "bin" / "srun", run_cli.folder / "seen"
    program.parent.mkdir()
    program.write_text(SRUN.format(srun=shutil.which("srun", path=site.env["PATH"])))
    program.chmod(0o755)
    env = {**site.env, "PATH": f"{program.parent}:{site.env['PATH']}", "SEEN": str(seen)}
    trained = run_cli("train", config, env=env)
    assert trained.rc == 0, trained.stderr
    image, mounts = seen.read_text().splitlines()
    assert image == "--container-image=image:1"
    assert mounts.startswith(f"--container-mounts={run_cli.folder / 'shared'}/") and mounts.endswith(",/data:/data:ro")


def test_job_that_others_cancel_is_seen(run_cli: Cli, site: Slurm) -> None:
    settings = {"ranks_per_node": 1, "directives": ["--cpus-per-task=1", "--comment=mine"]}
    told = json.loads(up(run_cli, site, "--set", f"cluster.slurm={json.dumps(settings)}").stdout)
    (part,) = told["parts"]
    assert part["role"] == "job"
    site.call("scancel", part["id"].split()[1])
    wait_until(lambda: json.loads(cluster(run_cli, site, "status", "--json").stdout)[0]["state"] == "ended")
    cluster(run_cli, site, "down", "dev")
    assert json.loads(cluster(run_cli, site, "status", "--json").stdout) == []


@pytest.mark.long
@pytest.mark.timeout(600)
def test_up_that_is_killed_at_any_moment_leaves_no_job_that_down_does_not_find(run_cli: Cli, site: Slurm) -> None:
    moment = random.Random(32)
    for after_s in (0.0, *(moment.uniform(0.0, 5.0) for _ in range(5))):
        running = run_cli.start("cluster", "up", "--name", "dev", "--backend", "slurm", env=site.env)
        wait_until(site.jobs)
        time.sleep(after_s)
        running.kill_group()
        cluster(run_cli, site, "down", "dev")
        assert site.jobs() == "", f"killed after {after_s} s"


def test_job_that_waits_is_told_with_slurms_reason_and_cancelled(run_cli: Cli, site: Slurm) -> None:
    change = ["--set", "cluster.slurm={partition: closed, ranks_per_node: 1}", "--set", "cluster.start_timeout_s=4"]
    done = up(run_cli, site, *change, rc=4)
    assert "is PENDING (PartitionDown)" in done.stderr
    assert site.jobs() == ""


def test_what_sbatch_refuses_is_told_in_its_words(run_cli: Cli, site: Slurm) -> None:
    done = up(run_cli, site, "--set", "cluster.slurm={partition: nowhere}", rc=4)
    assert "invalid partition specified: nowhere" in done.stderr.lower() or "Invalid partition" in done.stderr
    assert json.loads(cluster(run_cli, site, "status", "--json").stdout) == []
