"""`ddptrain train` on Dask clusters that others have started: used as they are, and left as they were found."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from glob import glob
from pathlib import Path
from typing import Any

import psutil
import pytest
from distributed import Scheduler, Security, Worker
from safetensors.numpy import load_file

from tests.conftest import Cli, Finished, Running
from tests.servers.dask_cluster import DaskCluster
from tests.support.command import wait_until
from tests.support.environments import make_environment

WORKLOAD = '''
import os, pathlib, time
import torch
import torch.distributed as dist


def steps(ctx, until=""):
    """One step, and all that a run can leave behind; goes on until a file appears."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(8, 4)).pow(2).mean().backward()
    optimizer.step()
    ctx.checkpoint(model=model, optimizer=optimizer, step=1, epoch=1, metrics={"val/loss": 1.0})
    ctx.save_file(f"samples/rank-{ctx.rank}.txt", f"of rank {ctx.rank}")
    total = torch.tensor([ctx.rank + 1.0])
    dist.all_reduce(total)
    nannys = {"PYTHONHASHSEED", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"} & os.environ.keys()
    assert os.environ["MINE"] == "mine" and not nannys, "the user's environment, and not the nanny's"
    print("rank", ctx.rank, "local", ctx.local_rank, "sum", int(total), flush=True)
    while until and not os.path.exists(until):
        time.sleep(0.02)
'''


class Others:
    """A Dask cluster as `dask scheduler` and `dask worker` start it, and the command that trains on it."""

    def __init__(self, cli: Cli, env: dict[str, str]) -> None:
        self.cli, self.env, self.folder = cli, env, cli.folder
        self.cluster: DaskCluster
        (self.folder / "work.py").write_text(WORKLOAD)

    def start(self, *tls: str, workers: int = 0) -> DaskCluster:
        """Start the scheduler, which may want a certificate, and workers."""
        self.cluster = DaskCluster(self.folder / "cluster", *tls, env=self.env)
        for number in range(workers):
            self.cluster.add_dask_worker(f"worker-{number}", *tls, MINE="mine")
        return self.cluster

    def config(self, cluster: dict[str, object], **params: object) -> Path:
        """A configuration of two ranks."""
        path = self.folder / "steps.yaml"
        path.write_text(json.dumps({"workload": "work:steps", "params": params, "cluster": {"ranks": 2, **cluster}}))
        return path

    def train(self, cluster: dict[str, object], *args: str, env: dict[str, str] | None = None) -> Finished:
        """Train to the end."""
        return self.cli("train", self.config(cluster), *args, env=env)

    @property
    def run_dir(self) -> Path:
        """The folder of the only run."""
        (folder,) = (self.folder / "runs").iterdir()
        return folder

    def record(self) -> dict[str, Any]:
        """What run.json says of the only run."""
        record: dict[str, Any] = json.loads((self.run_dir / "run.json").read_text())
        return record

    def state(self, workers: int = 2) -> dict[str, Any]:
        """All of the cluster's processes that a run could have changed, and what runs and lies beside them."""
        with self.cluster.client() as client:
            wait_until(lambda: len(client.nthreads()) == workers, f"{workers} workers")
            told = {"scheduler": client.run_on_scheduler(_state_of_scheduler()), **client.run(_state_of_worker())}
        temporary = self.env["TMPDIR"]
        return told | {"ours": _ranks_and_servers(temporary), "files": sorted(os.listdir(temporary))}

    def wait_for_state(self, wanted: dict[str, Any]) -> None:
        """Return once the cluster is as it was."""
        last: dict[str, Any] = {}

        def is_again() -> bool:
            last.update(self.state())
            return last == wanted

        try:
            wait_until(is_again, "the cluster is as it was found")
        except AssertionError:
            for part in wanted:
                assert last[part] == wanted[part], part


# Functions in functions, for these travel by value; multiprocessing's resource tracker is Dask's own.


def _state_of_scheduler() -> Any:
    def state(dask_scheduler: Scheduler) -> dict[str, Any]:
        import dask

        topics = dask_scheduler._broker._topics
        return {
            "plugins": sorted(dask_scheduler.plugins),
            "extensions": sorted(dask_scheduler.extensions),
            "config": json.dumps(dask.config.config, sort_keys=True, default=str),
            "tasks": sorted(map(str, dask_scheduler.tasks)),
            "topics": sorted(topic for topic in topics if topic.startswith("ddptrain")),
            "resources": {worker: dict(held.resources) for worker, held in dask_scheduler.workers.items()},
            "environ": dict(os.environ),
        }

    return state


def _state_of_worker() -> Any:
    def is_tracker(child: psutil.Process) -> bool:
        try:
            return "tracker" in " ".join(child.cmdline())
        except psutil.Error:  # it has ended, and nobody has waited for it
            return False

    def state(dask_worker: Worker) -> dict[str, Any]:
        import dask

        return {
            "plugins": sorted(dask_worker.plugins),
            "metrics": sorted(dask_worker.metrics),
            "config": json.dumps(dask.config.config, sort_keys=True, default=str),
            "tasks": sorted(map(str, dask_worker.state.tasks)),
            "environ": dict(os.environ),
            "path": list(sys.path),
            "cwd": os.getcwd(),
            # Not rglob, which raises where a folder goes while it is read.
            "files": sorted(glob(f"{dask_worker.local_directory}/**", recursive=True, include_hidden=True)),
            "children": [child.pid for child in psutil.Process().children() if not is_tracker(child)],
        }

    return state


def _ranks_and_servers(temporary: str) -> list[str]:
    """Our processes on the cluster, known by its folder for temporary files."""
    found = []
    for process in psutil.process_iter():
        try:
            command = " ".join(process.cmdline())
            if ("ddptrain rank" in command or "ddptrain.rank" in command) and process.environ().get(
                "TMPDIR"
            ) == temporary:
                found.append(f"{process.pid} {command}")
        except (psutil.Error, OSError):
            continue
    return found


@pytest.fixture
def others(tmp_path: Path, run_cli: Cli) -> Iterator[Others]:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "cluster").mkdir()
    # PyTorch makes its cache wherever it is imported: that is not ours.
    made = Others(run_cli, {"TMPDIR": str(tmp_path / "tmp"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")})
    yield made
    made.cluster.close()


# --- trained on, and left alone ---


@pytest.mark.timeout(240)
def test_run_brings_all_home_and_leaves_nothing_and_so_does_a_killed_driver(others: Others) -> None:
    others.start(workers=2)
    before = others.state()
    ended = others.train({}, "--cluster", str(others.cluster.file))
    assert ended.rc == 0, ended.stderr
    assert "Warning" not in ended.stderr
    assert "[rank 1] rank 1 local 1 sum 3" in ended.stdout

    (attempt,) = others.record()["attempts"]
    assert [(rank["rank"], rank["local_rank"]) for rank in attempt["ranks"]] == [(0, 0), (1, 1)]
    for rank in range(2):
        assert (others.run_dir / f"logs/rank-{rank}.log").read_text() == f"rank {rank} local {rank} sum 3\n"
        assert (others.run_dir / f"artifacts/samples/rank-{rank}.txt").read_text() == f"of rank {rank}"
    assert set(load_file(others.run_dir / "checkpoints/step-1/model.safetensors")) == {"weight", "bias"}
    others.wait_for_state(before)

    running = start_and_wait(others)
    assert len(others.state()["ours"]) >= 3, "two ranks and their server"
    running.popen.send_signal(signal.SIGKILL)
    running.popen.wait()
    others.wait_for_state(before)


def test_worker_with_a_resource_has_as_many_slots(others: Others) -> None:
    cluster = others.start()
    cluster.add_dask_worker("slots", "--resources", "slot=2", "--nthreads", "8", MINE="mine")
    ended = others.train({}, "--cluster", cluster.address)
    assert ended.rc == 0, ended.stderr
    assert "[rank 1] rank 1 local 1 sum 3" in ended.stdout
    refused = others.train({}, "--cluster", cluster.address, "--ranks", "3", "--set", "cluster.start_timeout_s=3")
    assert refused.rc == 4 and "3 slots are needed, but only 2 joined" in refused.stderr, refused.stderr


def start_and_wait(others: Others) -> Running:
    """A run that would go on for ever, once both ranks train."""
    config = others.config({"address": str(others.cluster.file)}, until=str(others.folder / "never"))
    running = others.cli.start("train", config)
    for rank in range(2):
        running.wait_for(f"rank {rank} local {rank} sum 3")
    return running


# --- what does not fit ---


def test_worker_without_ddptrain_ends_with_4_and_the_table(others: Others) -> None:
    cluster = others.start(workers=1)
    python = make_environment(others.folder / "env", without="ddptrain")
    where = ("--scheduler-file", str(cluster.file), "--local-directory", str(others.folder / "bare"))
    worker = ("-E", "-P", "-m", "distributed.cli.dask_worker", *where, "--no-dashboard", "--nthreads", "1")
    cluster.start(str(python), *worker)
    before = others.state()
    ended = others.train({}, "--cluster", cluster.address)
    assert ended.rc == 4, ended.stderr
    lines = ended.stderr.splitlines()
    (header,) = [line for line in lines if line.split()[1:4] == ["python", "ddptrain", "torch"]]
    (row,) = [line for line in lines if "missing !" in line]
    assert row[header.rindex("ddptrain") :].startswith("missing !") and row.count(" !") == 1
    assert "To do: install what is marked there (pip install ddptrain==" in ended.stderr
    assert others.record()["status"] == "failed"
    others.wait_for_state(before)


# --- TLS ---


class Keys:
    """The files of a certificate authority and of one who may use the cluster, as an administrator hands them out."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        made = Security.temporary()
        self.ca, self.cert, self.key = (folder / name for name in ("ca.pem", "cert.pem", "key.pem"))
        self.ca.write_text(made.tls_ca_file)
        self.cert.write_text(made.tls_client_cert)
        self.key.write_text(made.tls_client_key)

    @property
    def options(self) -> tuple[str, ...]:
        """For `dask scheduler` and `dask worker`."""
        return ("--tls-ca-file", str(self.ca), "--tls-cert", str(self.cert), "--tls-key", str(self.key))

    def env(self, **other: Path) -> dict[str, str]:
        """Dask's configuration of a client, as variables."""
        files = {"CA_FILE": self.ca, "CLIENT__CERT": self.cert, "CLIENT__KEY": self.key, **other}
        return {f"DASK_DISTRIBUTED__COMM__TLS__{name}": str(path) for name, path in files.items()}


def test_cluster_with_tls_is_trained_on_with_its_certificate(others: Others) -> None:
    keys = Keys(others.folder / "keys")
    cluster = others.start("--protocol", "tls", *keys.options)
    for name in ("one", "two"):
        cluster.add_dask_worker(name, *keys.options, MINE="mine")
    assert cluster.address.startswith("tls://")
    ended = others.train({"address": cluster.address}, env=keys.env())
    assert ended.rc == 0, ended.stderr
    assert "[rank 1] rank 1 local 1 sum 3" in ended.stdout


def test_cluster_with_tls_refuses_who_has_no_certificate_of_it(others: Others) -> None:
    keys, wrong = Keys(others.folder / "keys"), Keys(others.folder / "wrong")
    address = others.start("--protocol", "tls", *keys.options).address
    stranger = keys.env(CLIENT__CERT=wrong.cert, CLIENT__KEY=wrong.key)
    refusals = [
        (address, {}, "wants a certificate, and none was given: set distributed.comm.tls"),
        (address, wrong.env(), "no TLS connection to"),
        (address, stranger, "no TLS connection to"),
        (address.replace("tls", "tcp"), {}, f"If it uses TLS, write {address}"),
        (address, keys.env(CLIENT__KEY=others.folder / "none.pem"), "none.pem): [Errno 2] No such file"),
    ]
    for where, env, reason in refusals:
        ended = others.train({"address": where}, env=env)
        assert (ended.rc, reason in ended.stderr) == (4, True), f"{where} {env}: {ended.stderr}"
        assert "Traceback" not in ended.stderr
