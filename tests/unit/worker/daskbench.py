"""Real Dask schedulers and workers, and the part of a driver that tests of the worker need."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import psutil
from distributed import Client, Future, get_worker

from ddptrain.protocol.news import RankExit
from ddptrain.protocol.rank_spec import SLOT_RESOURCE, RankSpec, attached_plugin
from ddptrain.worker import driver_calls as worker_tasks
from ddptrain.worker import rank_task
from ddptrain.worker.rank_host import rank_host
from tests.conftest import PATIENCE_S
from tests.support.command import wait_until
from tests.unit.specs import make_spec

_END_S = 15.0


class DaskBench:
    """A scheduler, and workers that are started one by one. All end with the block."""

    def __init__(
        self,
        folder: Path,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.env = dict(env or os.environ)
        self.scheduler_file = folder / "scheduler.json"
        self.started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self.started):
            end(process)

    def start(self, name: str, *command: str, **env: str) -> subprocess.Popen[bytes]:
        """Start a process of the bench. Its output goes to `name`.log."""
        with self.log(name).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *command],
                env={**self.env, **env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def log(self, name: str) -> Path:
        """The log of a process."""
        return self.folder / f"{name}.log"

    def scheduler(self) -> subprocess.Popen[bytes]:
        """A plain Dask scheduler."""
        program = str(Path(__file__).with_name("plain_scheduler.py"))
        process = self.start("scheduler", "-P", program, str(self.scheduler_file))
        wait_until(self.scheduler_file.exists, "the scheduler's file")
        return process

    def ours(self, *options: str, name: str = "ours", **env: str) -> subprocess.Popen[bytes]:
        """A worker of ddptrain."""
        where = ("--scheduler-file", str(self.scheduler_file), "--name", name)
        return self.start(name, "-P", "-m", "ddptrain.worker", *where, *options, **env)

    def foreign(self, *options: str, name: str = "foreign", **env: str) -> subprocess.Popen[bytes]:
        """A worker as `dask worker` starts it, with a nanny."""
        where = ("--scheduler-file", str(self.scheduler_file), "--no-dashboard", "--nthreads", "1", "--name", name)
        local = ("--local-directory", str(self.folder / name))
        return self.start(name, "-m", "distributed.cli.dask_worker", *where, *local, *options, **env)

    @contextlib.contextmanager
    def driver(self, run_id: str = "r-1", workers: int = 0) -> Iterator[Driver]:
        """A driver, connected once `workers` workers have joined."""
        address = json.loads(self.scheduler_file.read_text())["address"]
        with Client(address, set_as_default=False, timeout=PATIENCE_S) as client:
            driver = Driver(client, run_id, self.env)
            wait_until(lambda: len(driver.workers) >= workers, lambda: f"{workers} workers: {self._said()}")
            yield driver

    def _said(self) -> str:
        return "\n".join(path.read_text() for path in self.folder.glob("*.log"))


class Driver:
    """Starts the ranks of one run; each runs a piece of code."""

    def __init__(self, client: Client, run_id: str, env: Mapping[str, str]) -> None:
        self.client, self.run_id = client, run_id
        self.env = {"PYTHONPATH": env["PYTHONPATH"]} if "PYTHONPATH" in env else {}
        self.news: list[dict[str, Any]] = []
        self.futures: list[Future[RankExit]] = []
        self.about: dict[str, dict[str, str]] = {}
        client.subscribe_topic(rank_task.topic(run_id), lambda event: self.news.append(event[1].get("news", {})))

    @property
    def about_workers(self) -> dict[str, dict[str, Any]]:
        """The scheduler's data on every worker, by address. `client.scheduler_info` may be older."""
        scheduler = self.client.scheduler
        assert scheduler is not None
        told = self.client.sync(scheduler.identity, n_workers=-1)
        workers: dict[str, dict[str, Any]] = told["workers"]
        return workers

    @property
    def workers(self) -> dict[str, str]:
        """Name -> address of every worker."""
        return {str(worker["name"]): address for address, worker in self.about_workers.items()}

    def call(self, function: Callable[..., Any], *args: Any, worker: str) -> Any:
        """Call a function on one worker."""
        return self.client.run(function, *args, workers=[self.workers[worker]])[self.workers[worker]]

    def attach(self, worker: str) -> dict[str, str]:
        """Make a worker a host of the run."""
        self.about[worker] = self.call(worker_tasks.describe_host, self.run_id, worker=worker)
        return self.about[worker]

    def start(self, worker: str, code: str, rank: int = 0, **spec: Any) -> Future[RankExit]:
        """Start a rank that runs `code`, or the workload that `spec` names."""
        order = make_spec(
            **{
                "run_id": self.run_id,
                "rank": rank,
                "world_size": 1,
                "local_world_size": 1,
                "params": {"code": textwrap.dedent(code)},
                "master_addr": "127.0.0.1",
                "env": self.env,
                **spec,
            }
        )
        address, about = next((at, each) for at, each in self.about_workers.items() if each["name"] == worker)
        slots = about["resources"].get(SLOT_RESOURCE)
        future = self.client.submit(
            run_rank,
            order.to_json(),
            key=order.key,
            workers=[address],
            resources={SLOT_RESOURCE: 1} if slots else None,
            pure=False,
        )
        self.futures.append(future)  # Dask would release a future without a reference, which ends its rank
        return future

    def said(self, worker: str, rank: int = 0) -> str:
        """The output of the rank."""
        log = Path(self.about[worker]["scratch"]) / self.run_id / "attempt-1" / f"rank-{rank}" / "log"
        return log.read_text() if log.exists() else ""

    def wait_for(self, worker: str, words: str, rank: int = 0) -> None:
        """Wait until the rank has printed `words`."""
        wait_until(
            lambda: words in self.said(worker, rank),
            lambda: f"rank {rank} prints {words!r}\n{self._stands(worker)}",
        )

    def _stands(self, worker: str) -> str:
        """The state of tasks, processes and logs, for the message of a failed test."""
        scratch = Path(self.about[worker]["scratch"])
        logs = [*scratch.glob("*.log"), *scratch.glob(f"{self.run_id}/attempt-1/rank-*/log")]
        said = "\n".join(f"--- {path.relative_to(scratch)}\n{path.read_text()[-2000:]}" for path in logs)
        tasks = [(future.key, future.status) for future in self.futures]
        return f"tasks: {tasks}\nnews: {self.news[-10:]}\n{_processes(int(self.about[worker]['pid']))}\n{said}"

    def remove(self, worker: str) -> None:
        """Do what the scheduler plugin does at the end of the run, or when the driver is gone."""
        name, address = attached_plugin(self.run_id), self.workers[worker]

        async def broadcast(dask_scheduler: Any) -> Any:
            return await dask_scheduler.broadcast(msg={"op": "plugin-remove", "name": name}, workers=[address])

        answer = self.client.run_on_scheduler(broadcast)
        assert answer == {address: {"status": "OK"}}, answer


def run_rank(spec_json: str) -> RankExit:
    """Run one rank on a worker until it has ended."""
    worker, spec = get_worker(), RankSpec.from_json(spec_json)
    (result,) = rank_task.RanksTask(worker, rank_host(worker, spec.run_id), [spec]).run()
    if isinstance(result, Exception):
        raise result
    return result


def _processes(pid: int) -> str:
    """A process and its descendants, one line each, with their states."""
    lines = []
    with contextlib.suppress(psutil.Error):
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        for process in family:
            with contextlib.suppress(psutil.Error):
                used = process.cpu_times()
                about = (process.pid, process.name(), process.status(), process.num_threads(), used.user, used.system)
                lines.append(" ".join(map(str, about)))
    return "\n".join(lines)


def ended(future: Future[RankExit], timeout_s: float = PATIENCE_S) -> RankExit:
    """How the rank ended."""
    return future.result(timeout=timeout_s)


def end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and SIGKILL to the process group if that does not suffice."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def until_gone(pid: int) -> None:
    """Wait until a process is gone."""
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), f"the end of process {pid}")
