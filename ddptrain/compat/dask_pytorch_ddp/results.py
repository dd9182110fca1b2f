"""Results of running jobs: `submit_result` in a job, `process_results` in the client."""

from __future__ import annotations

import logging
import os
import uuid
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from distributed import Future, wait

from ddptrain.file_ops import sha256
from ddptrain.results.layout import safe_relative

if TYPE_CHECKING:
    from ddptrain.compat.dask_pytorch_ddp.dispatch import Job

__all__ = ["DaskResultsHandler"]

VARIABLE = "DDPTRAIN_RESULTS"  # in the ranks of a job: the folder of their results below artifacts/
FOLDER = "results"
JOBS: WeakKeyDictionary[Future[Any], Job] = WeakKeyDictionary()  # of this client, while they have a future

logger = logging.getLogger(__name__)

_POLL_S = 0.2


class DaskResultsHandler:
    """Transfers results of jobs to the client while the jobs run.

    `pub_sub_key` separates the results of different handlers; results of earlier jobs are never returned.
    """

    def __init__(self, pub_sub_key: str | None = None) -> None:
        self.pub_sub_key = uuid.uuid4().hex if pub_sub_key is None else pub_sub_key

    @property
    def _folder(self) -> str:
        return sha256(self.pub_sub_key.encode()).hexdigest()[:32]

    def submit_result(self, path: str, data: str | bytes) -> None:
        """In a job: send `data` (text as UTF-8) to the client, which writes it to the file `path` below its prefix.

        In a run of `ddptrain train` the file goes to artifacts/ of the run directory.

        Raises:
            UnsafePath: the path would leave the prefix.
            RuntimeError: this process is not a rank of a job or a run.
        """
        relative = safe_relative(path)
        if "DDPTRAIN_RUN_ID" not in os.environ:
            raise RuntimeError("submit_result is for jobs, and this process is not a rank of one")
        from ddptrain.rank.context import context

        root = os.environ.get(VARIABLE)
        where = f"{root}/{self._folder}/{relative}" if root else path
        context().save_file(where, data if isinstance(data, str) else bytes(data))

    def process_results(self, prefix: str, futures: list[Future[Any]], raise_errors: bool = True) -> None:
        """In the client: write results below the folder `prefix` as they arrive, until all futures are done.

        Each file is written atomically. Results that a job submitted before it failed are written as well.

        Raises:
            Exception: with `raise_errors`, the error of the rank that failed first; otherwise these are logged.
            OSError: a result can't be written.
        """
        root = Path(prefix)
        root.mkdir(parents=True, exist_ok=True)
        keys = {future.key for future in futures}
        jobs = {job for future, job in JOBS.items() if future.key in keys}
        running = True
        while running:
            with suppress(TimeoutError):
                wait(futures, timeout=_POLL_S)
            running = not all(future.done() for future in futures) or not all(job.ended.is_set() for job in jobs)
            for job in jobs:
                job.collect(self._folder, root)
        errors = [error for job in jobs if (error := job.cause) is not None]
        errors += [error for future in futures if (error := future.exception()) is not None]
        if errors and raise_errors:
            raise errors[0]
        for error in errors:
            logger.error("a job has failed", exc_info=error)
