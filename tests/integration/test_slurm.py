"""The backend slurm, with a real Slurm of two nodes that the test starts."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Cli, Finished
from tests.servers.slurmd import Slurm, slurm
from tests.support.command import wait_until

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
