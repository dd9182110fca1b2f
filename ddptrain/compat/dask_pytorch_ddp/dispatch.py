"""`dispatch.run`: a function on every slot of a Dask cluster, as the ranks of one process group.

Each call is a run of the driver (driver/run.py) in a thread of the notebook, over the client that the user has, with
its run directory in a temporary folder. The ranks save their results as artifacts; the futures are set at the end.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
from distributed import Client, Future

from ddptrain.clusters.backends.run_cluster import AttachedCluster
from ddptrain.clusters.resolve import Target
from ddptrain.compat.dask_pytorch_ddp.rank_entrypoint import ANSWERS, JOB, WORKLOAD, RankFailed
from ddptrain.compat.dask_pytorch_ddp.results import FOLDER, JOBS, VARIABLE
from ddptrain.config.load import load_mapping
from ddptrain.driver.cluster_session import SharedRun
from ddptrain.driver.connect import Session
from ddptrain.driver.control.signals import ThreadSignals
from ddptrain.driver.display import Display
from ddptrain.driver.inbox import Inbox
from ddptrain.driver.observers import OPENED
from ddptrain.driver.run import LaunchOptions, train
from ddptrain.driver.workers import ClusterNews
from ddptrain.errors import ClusterError, UsageError
from ddptrain.log import own_context
from ddptrain.protocol.news import describe_status
from ddptrain.results.layout import INCOMING, new_run_id
from ddptrain.results.run import Run
from ddptrain.results.run_record import RunRecord, root_cause

if TYPE_CHECKING:
    from dask_pytorch_ddp.dispatch import dispatch_with_ddp


__all__ = ["dispatch_with_ddp", "run"]

_START_S, _WAIT_S = 60.0, 300.0  # time for the first worker to appear, and for slots that other runs use
_GRACE_S = 10.0  # from SIGTERM to SIGKILL
_TAIL_BYTES = 2000


def run(
    client: Client,
    pytorch_function: Callable[..., Any],
    *args: Any,
    backend: str | None = None,
    pass_local_rank: bool = False,
    **kwargs: Any,
) -> list[Future[Any]]:
    """Run `pytorch_function(*args, **kwargs)` on every slot of the cluster; return one future per rank, in rank order.

    A worker that ddptrain has not started is one slot. Each rank is a separate process, in which the process group is
    initialized (`backend`: by default nccl if every slot has a GPU, else gloo). The future of a rank has the return
    value or the exception of the function; after an exception the other ranks are stopped. With `pass_local_rank` the
    function also gets `local_rank`: 0 with a GPU, because the rank sees only its own GPU; on the CPU the number of the
    rank on its host. Arguments that are futures are replaced by their values.

    Raises:
        ClusterError: there are no free slots, or workers lack a package.
        UsageError: the client is asynchronous, or the function can't be pickled.
    """
    if client.asynchronous:
        raise UsageError("dispatch.run needs a client that was not made with asynchronous=True")
    values, named = client.gather((list(args), kwargs))
    try:
        pickled = cloudpickle.dumps((pytorch_function, tuple(values), named))
    except Exception as error:  # pickling runs user code, which may raise anything
        raise UsageError(f"{pytorch_function!r} or its arguments can't be pickled for the workers: {error}") from error
    return Job(client, pickled, {"pass_local_rank": pass_local_rank}, backend or "auto").start()


class Job:
    """One call of run(): a run in a thread. `ended` is set when all its futures are done, and its files are there."""

    def __init__(self, client: Client, pickled: bytes, params: Mapping[str, Any], backend: str) -> None:
        self.client, self.run_id = client, new_run_id("dispatch")
        scheduler: Any = client.scheduler
        self.address = str(scheduler.address)
        self.ended = threading.Event()
        self._began = threading.Event()  # the number of ranks is known, or the run has ended
        self._folder = tempfile.mkdtemp(prefix="ddptrain-dispatch-")
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self.root = Path(self._folder, self.run_id)  # the run directory
        self._inputs, self._params, self._backend = {JOB: pickled}, params, backend
        self._unwanted = False
        self._keys: list[str] = []
        self._futures: list[Future[Any]] = []  # until the caller has them
        self._display: Display | None = None
        self._record = RunRecord()
        self._error: BaseException | None = None

    def start(self) -> list[Future[Any]]:
        """Start the run, and return its futures when its slots are reserved. Raises ClusterError, UsageError."""
        threading.Thread(target=self._main, name=self.run_id, daemon=True).start()
        try:
            self._began.wait()
        except BaseException:  # Ctrl-C, while the run waits for slots
            self._unwanted = True
            raise
        if not self._futures:
            raise self._error or ClusterError(root_cause(self._record.failure))
        futures, self._futures = self._futures, []
        return futures

    @property
    def cause(self) -> BaseException | None:
        """The error of the rank that failed first; None if the run has succeeded."""
        failure = self._record.failure
        if failure is None:
            return self._error
        return self._error_of(failure.rank) if failure.rank is not None else RankFailed(root_cause(failure))

    def collect(self, key: str, prefix: Path) -> None:
        """Move the results with this key that have arrived below the folder `prefix`. Raises OSError."""
        folder = self.root / "artifacts" / FOLDER / key
        for path in [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(INCOMING)]:
            target = prefix / path.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            incoming = target.with_name(f"{INCOMING}{target.name}")
            taken = Path(self._folder, "taken")
            os.replace(path, taken)  # first: the rank may submit a file of this name again
            shutil.move(taken, incoming)
            os.replace(incoming, target)

    def _main(self) -> None:
        with own_context():
            try:
                train(
                    self._config(),
                    LaunchOptions(self.run_id, observers=[self], inputs=self._inputs, shared=self._shared()),
                )
            except BaseException as error:  # the caller of start(), or the futures, get it
                self._error = error
        for rank, key in enumerate(self._keys):
            self._set(rank, key)
        self.ended.set()
        self._began.set()

    def _config(self) -> Any:
        # The modules of the function are beside the client's script, or in its working directory.
        folder = Path(sys.path[0] if sys.path else "").absolute()
        config = {
            "workload": WORKLOAD,
            "params": self._params,
            "env": {VARIABLE: FOLDER},
            "cluster": {"address": self.address, "start_timeout_s": _START_S, "wait_s": _WAIT_S},
            "dist": {"backend": self._backend},
            "failure": {"grace_s": _GRACE_S, "hang_timeout_s": None, "nan": "ignore"},
            "results": {"dir": self._folder},
        }
        return load_mapping(config, folder, source="dispatch.run")

    def _shared(self) -> SharedRun:
        session = Session(self.client, Target(self.address), ClusterNews(self.client))
        return SharedRun(_JobCluster(self), session, self._signals_to, threading.Lock())

    def _signals_to(self, inbox: Inbox) -> ThreadSignals:
        self._signals = ThreadSignals(inbox)
        return self._signals

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Show the output of the ranks, and make the futures when their number is known."""
        if event["event"] == OPENED:
            self._display = Display("plain", self.root / "logs", self.run_id, stdout=sys.stderr)
        elif event["event"] == "run_started":
            self._keys = [f"{self.run_id}/{rank}" for rank in range(event["world_size"])]
            self._futures = [Future(key, self.client) for key in self._keys]
            JOBS.update(dict.fromkeys(self._futures, self))
            self._began.set()
        if self._display is not None:
            self._display.on_event(event)

    def on_end(self, run: Run) -> None:
        """Note how the run has ended."""
        self._record = run.record
        if self._display is not None:
            self._display.on_end(run)

    def stop_if_unwanted(self) -> None:
        """Stop the run if the user has deleted all futures, as Dask does with its own tasks."""
        is_unwanted = self._unwanted or (self._keys and not any(key in self.client.futures for key in self._keys))
        if is_unwanted and not self._signals.taken:
            self._signals.send(signal.SIGTERM)

    def _set(self, rank: int, key: str) -> None:
        """Set the future of a rank, unless the user has deleted it."""
        if (state := self.client.futures.get(key)) is None:
            return
        error: BaseException | None = None
        try:
            if (value := self._answer(rank, "value")).is_file():
                self.client.scatter({key: pickle.loads(value.read_bytes())}, hash=False)  # noqa: S301  # of its rank
            elif self._status(rank) == 0:  # the function called sys.exit(0)
                self.client.scatter({key: None}, hash=False)
            else:
                error = self._error_of(rank)
        except Exception as problem:  # unpickling runs user code; the cluster may have ended
            error = RankFailed(f"the return value of rank {rank} can't be read: {problem!r}")
        if error is not None:
            loop: Any = self.client.loop
            loop.add_callback(state.set_error, error, None)

    def _answer(self, rank: int, kind: str) -> Path:
        return self.root / "artifacts" / ANSWERS / f"{rank}.{kind}"

    def _status(self, rank: int) -> int | None:
        """Return the exit status of a rank; None if it is not known."""
        attempts = self._record.attempts
        return attempts[-1].ranks[rank].exit if attempts and attempts[-1].ranks else None

    def _error_of(self, rank: int) -> BaseException:
        """Return the exception of a rank, or else how it has ended, with its last output."""
        path, status, failure = self._answer(rank, "error"), self._status(rank), self._record.failure
        with suppress(Exception):  # unpickling runs user code
            if path.is_file():
                error: BaseException = pickle.loads(path.read_bytes())  # noqa: S301  # written by its rank
                return error
        if status is None or (failure is not None and failure.rank == rank):
            return self._error or RankFailed(root_cause(failure))
        host = self._record.attempts[-1].ranks[rank].host
        with (self.root / "logs" / f"rank-{rank}.log").open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            tail = file.read().decode("utf-8", "replace").strip()
        return RankFailed(
            f"rank {rank} on {host}: {describe_status(status)}" + (f"; its last output:\n{tail}" if tail else "")
        )


class _JobCluster(AttachedCluster):
    """The cluster of the user's client."""

    def __init__(self, job: Job) -> None:
        self.job = job

    @property
    def description(self) -> str:
        """What it is, for messages."""
        return self.job.address

    def last_words(self) -> str:
        """Return nothing: the cluster is the user's."""
        return ""

    def worker_fault(self) -> str | None:
        """Return None. The run asks at intervals: is it still wanted?"""
        self.job.stop_if_unwanted()
        return None


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        # Imported on first use, because it imports torch.
        if name == "dispatch_with_ddp":
            from dask_pytorch_ddp.dispatch import dispatch_with_ddp

            return dispatch_with_ddp
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
