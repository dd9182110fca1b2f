"""Results of running jobs: `submit_result` in a job, `process_results` in the client."""

from __future__ import annotations

import logging
import os
import secrets
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from distributed import Client, Future, get_client, get_worker, wait

from ddptrain.compat.dask_pytorch_ddp import failures, outbox
from ddptrain.driver.workers import send
from ddptrain.errors import ClusterError
from ddptrain.protocol.events import FileSaved
from ddptrain.results.errors import UnsafePath
from ddptrain.results.layout import INCOMING, safe_relative
from ddptrain.results.staged_files import adopt_file
from ddptrain.worker.spool import READ_LIMIT_BYTES

__all__ = ["DaskResultsHandler"]

logger = logging.getLogger(__name__)

_MIN_POLL_S, _MAX_POLL_S = 0.1, 1.0  # between two requests to the workers
_ANSWER_S = 120.0
_STOPPING_S = 45.0  # time for the other ranks to end after one has failed


class DaskResultsHandler:
    """Transfers results of jobs to the client while the jobs run.

    `pub_sub_key` separates the results of different handlers; results of earlier jobs are never returned.
    """

    def __init__(self, pub_sub_key: str | None = None) -> None:
        self.pub_sub_key = uuid.uuid4().hex if pub_sub_key is None else pub_sub_key

    def submit_result(self, path: str, data: str | bytes) -> None:
        """In a job: send `data` (text as UTF-8) to the client, which writes it to the file `path` below its prefix.

        In a run of `ddptrain train` the file goes to artifacts/ of the run directory.

        Raises:
            UnsafePath: the path would leave the prefix.
            RuntimeError: this process is not part of a job.
        """
        safe_relative(path)
        raw = data.encode() if isinstance(data, str) else data
        if folder := os.environ.get(outbox.VARIABLE):
            outbox.put(Path(folder), self.pub_sub_key, path, memoryview(raw).cast("B"))
        elif "DDPTRAIN_RUN_ID" in os.environ:  # a rank of a run
            from ddptrain.rank.context import context

            context().save_file(path, bytes(raw))
        else:
            outbox.put(_box_of_task(), self.pub_sub_key, path, memoryview(raw).cast("B"))

    def process_results(self, prefix: str, futures: list[Future[Any]], raise_errors: bool = True) -> None:
        """In the client: write results below the folder `prefix` as they arrive, until all futures are done.

        Each file is written atomically. Results that a job submitted before it failed are written as well.

        Raises:
            Exception: with `raise_errors`, the error of the rank that failed first, or UnsafePath; otherwise these
                are logged.
            ClusterError: a result can't be read from its worker.
        """
        if not futures:
            return
        client: Client = futures[0].client or get_client()
        collector = _Collector(client, Path(prefix), self.pub_sub_key, futures, raise_errors)
        errors = _watched(collector, list(futures), raise_errors)
        while collector.collect():
            pass
        collector.clear()
        if errors and raise_errors:
            raise failures.first_cause(errors)


def _watched(collector: _Collector, pending: list[Future[Any]], raise_errors: bool) -> list[BaseException]:
    """Collect until all futures are done, or one has failed and the others had time to end; return the errors."""
    errors: list[BaseException] = []
    pause_s, until = _MIN_POLL_S, float("inf")
    while pending and time.monotonic() < until:
        pause_s = _MIN_POLL_S if collector.collect() else min(2 * pause_s, _MAX_POLL_S)
        with suppress(TimeoutError):
            wait(pending, timeout=pause_s, return_when="FIRST_COMPLETED")
        for future in [future for future in pending if future.done()]:
            pending.remove(future)
            try:
                future.result()
            except Exception as error:  # whatever the user's function raised
                errors.append(error)
                if not raise_errors:
                    logger.exception("a job has failed", exc_info=error)
        if errors and raise_errors:
            # The ranks of a job are stopped; other tasks would continue.
            until = min(until, time.monotonic() + (_STOPPING_S if collector.is_group else 0.0))
    return errors


class _Collector:
    """Transfers the results of one handler from the workers to the folder `prefix`."""

    def __init__(
        self, client: Client, prefix: Path, key: str, futures: Sequence[Future[Any]], raise_errors: bool
    ) -> None:
        self.client, self.key, self.raise_errors = client, key, raise_errors
        prefix.mkdir(parents=True, exist_ok=True)
        self.prefix = Path(os.path.realpath(prefix))  # the user may use a symbolic link
        self.boxes = sorted({outbox.box_of(str(future.key)) for future in futures})
        self.is_group = all(str(future.key).startswith("ddptrain/") for future in futures)
        self.done: list[str] = []

    def collect(self) -> int:
        """Transfer all waiting results; return their number."""
        answers = self._ask(outbox.look, self.boxes, self.key, self.done)
        self.done = []
        waiting = [(entry, worker) for worker, answer in answers.items() for entry in answer]
        for entry, worker in sorted(waiting, key=lambda each: str(each[0]["name"]).partition("/")[2]):
            self._transfer(entry, worker)
            self.done.append(entry["name"])
        return len(waiting)

    def _transfer(self, entry: dict[str, Any], worker: str) -> None:
        event = FileSaved(time.time_ns(), entry["path"], entry["name"], entry["size_bytes"], entry["sha256"])
        try:
            safe_relative(event.path)
            incoming = self.prefix / f"{INCOMING}{secrets.token_hex(8)}"
            try:
                self._fetch(entry["name"], event.size_bytes, worker, incoming)
                adopt_file(self.prefix, event, incoming)
            finally:
                incoming.unlink(missing_ok=True)
        except UnsafePath:
            if self.raise_errors:
                raise
            logger.exception("a result was refused")

    def _fetch(self, name: str, size_bytes: int, worker: str, target: Path) -> None:
        with target.open("xb") as file:
            while (offset := file.tell()) < size_bytes:
                answer = self._ask(outbox.read, name, offset, READ_LIMIT_BYTES, workers=[worker], on_error="raise")
                if not (data := answer[worker]):
                    raise ClusterError(f"the result {name} on the worker {worker} is shorter than it was")
                file.write(data)

    def clear(self) -> None:
        """Tell the workers that no more results will be requested."""
        self._ask(outbox.look, self.boxes, self.key, self.done)
        self._ask(outbox.sweep, self.boxes)

    def _ask(
        self,
        function: Any,
        *args: Any,
        workers: list[str] | None = None,
        on_error: Literal["raise", "ignore"] = "ignore",
    ) -> dict[str, Any]:
        question = self.client.run(function, *args, workers=workers, on_error=on_error, asynchronous=True)
        try:
            answer: dict[str, Any] = send(self.client, question).result(_ANSWER_S)
        except (OSError, TimeoutError) as error:
            raise ClusterError(f"could not get results from the workers: {error}") from error
        return answer


def _box_of_task() -> Path:
    try:
        worker = get_worker()
    except ValueError as error:
        raise RuntimeError("submit_result is for jobs, and this process is neither a rank nor a Dask task") from error
    return outbox.make_box(worker, outbox.box_of(str(worker.get_current_task())))
