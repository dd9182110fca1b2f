"""`ddptrain.Run`: a running or finished run, read from its run directory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ddptrain.errors import (
    SIGNALLED,
    ClusterError,
    DdptrainError,
    ExitCode,
    HangDetected,
    Interrupted,
    RunLocked,
    RunNotFound,
    RunPreempted,
    TrainingFailed,
    UsageError,
)

if TYPE_CHECKING:
    from ddptrain.driver.control.stop import StopTarget
    from ddptrain.results.run import Run as RecordedRun
    from ddptrain.results.run_record import FailureRecord

_POLL_S = 0.1
_STORE_POLL_S = 2.0
STOP_TIMEOUT_S = 120.0  # for a driver that is stopping: the grace period, and the transfer of results
_ERRORS: dict[int, type[DdptrainError]] = {
    kind.exit_code: kind for kind in (TrainingFailed, UsageError, ClusterError, HangDetected, RunLocked, RunPreempted)
}


def error_of(exit_code: int, cause: str) -> DdptrainError:
    """Return the error for the exit code of a driver."""
    if exit_code in SIGNALLED:
        return Interrupted(exit_code - 128)
    if exit_code < 0:
        return ClusterError(f"the driver was killed by {signal.Signals(-exit_code).name}")
    return _ERRORS.get(exit_code, DdptrainError)(cause)


class Run:
    """A run; each property reads the run directory again."""

    def __init__(self, run_id: str, run_dir: str, process: subprocess.Popen[bytes] | None = None) -> None:
        """Call `launch` or `find` instead. `run_dir` is a folder, or the URL of a run in an object store."""
        from ddptrain.results.runs import LocalRuns, open_runs_dir

        self.id = run_id
        self.where = run_dir
        self._process = process  # the driver, if this process has started it
        runs_dir = run_dir.rstrip("/").rpartition("/")[0] if "://" in run_dir else str(Path(run_dir).parent)
        self._runs = open_runs_dir(runs_dir)
        self._is_stored = not isinstance(self._runs, LocalRuns)
        self._folder = self._runs.folder / run_id if self._is_stored else Path(run_dir).absolute()
        self._settled: Callable[[], RecordedRun] | None = None

    @classmethod
    def find(cls, run: str = "latest", runs_dir: str | os.PathLike[str] = "runs") -> Self:
        """Find a run by its id, a prefix of it, `latest`, or its directory. Raises RunNotFound."""
        from ddptrain.results.runs import open_runs_dir, split_run

        folder, name = split_run(run, os.fspath(runs_dir))
        view = open_runs_dir(folder).find(name)
        return cls(view.run_id, view.where)

    def __repr__(self) -> str:
        return f"<ddptrain.Run {self.id}: {self.status}>"

    def _repr_html_(self) -> str:
        """Show the run as a table in notebooks."""
        from ddptrain.results.show.live_table import run_table_html

        return run_table_html(self._view())

    # --- state ---

    @property
    def dir(self) -> Path:
        """The run directory; for a run in an object store, a copy of the requested files."""
        return self._view().fetch("run.json", "config.yaml").root

    @property
    def status(self) -> str:
        """queued (its job waits, or starts again), running, succeeded, failed, preempted or cancelled."""
        return str(self._view().status)

    @property
    def exit_code(self) -> int | None:
        """The exit code of the command; None while the run is running or queued."""
        return None if (view := self._view()).goes_on else view.record.exit_code

    @property
    def failure(self) -> FailureRecord | None:
        """The first failure: .rank, .host, .type, .message, .traceback, .log; None if there is none."""
        return self._view().record.failure

    @property
    def result(self) -> Any:
        """The return value of the function on rank 0 as JSON data; None if there is none yet."""
        return json.loads(self._view().read("run.json")).get("result")

    def metrics(self) -> list[dict[str, Any]]:
        """Return all logged lines, without those that a later attempt replaced, in a form for pandas.

        A line is {"time_s", "step", "epoch", "rank", "attempt", name: number, ...}.
        """
        from ddptrain.results.metrics import MetricsReader, drop_replaced

        lines = drop_replaced(MetricsReader(self._view().metrics_jsonl).read())
        return [
            {
                "time_s": line.time_s,
                "step": _int_if_whole(line.step),
                "epoch": line.epoch,
                "rank": line.rank,
                "attempt": line.attempt,
                **line.values,
            }
            for line in lines
        ]

    @property
    def checkpoints(self) -> list[Path]:
        """The folders of the run's checkpoints, the newest first. Those of a run in an object store are downloaded."""
        return self._view().checkpoints()

    @property
    def best(self) -> Path | None:
        """The folder of the best checkpoint (the newest if there is no metric); None if there is none."""
        try:
            return self._view().checkpoint("best")
        except RunNotFound:
            return None

    def logs(self, rank: int = 0) -> str:
        """Return the output of a rank so far; "" if there is none."""
        log = self._view().log(rank)
        return log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""

    # --- actions ---

    def wait(self, timeout_s: float | None = None) -> Self:
        """Wait until the run has succeeded; an exception during the wait does not stop the run.

        Raises:
            TimeoutError: the run is still running after `timeout_s` seconds.
            TrainingFailed, HangDetected, ClusterError, RunPreempted, Interrupted: the run did not succeed.
        """
        for _ in self._until_end(timeout_s, _STORE_POLL_S if self._is_stored and self._process is None else _POLL_S):
            pass
        self._raise()
        return self

    def watch(self, timeout_s: float | None = None) -> Self:
        """Show the run until it has succeeded: in Jupyter a table that is updated in place, elsewhere rank 0's output.

        An exception during the wait, such as Ctrl-C, does not stop the run. Raises the errors of `wait`.
        """
        from ddptrain.results.log_tail import LogTail
        from ddptrain.results.show.live_table import in_notebook

        log = LogTail(self._view().log(0), lines=10)

        def lines() -> Iterator[str]:
            if self._is_stored:
                self._view().log(0)
            return log.texts()

        every_s = _STORE_POLL_S if self._is_stored else 1.0
        self._show(lines, print, every_s, live=in_notebook(), limit_s=timeout_s)
        return self

    def stop(self, *, now: bool = False) -> Self:
        """Stop the run and wait for its end. The run saves a checkpoint first, unless `now`.

        Raises ClusterError if the run does not end in time.
        """
        from ddptrain.driver.control.stop import stop_run

        stop_run(self._stop_target(), now=now, by="ddptrain.Run.stop", tell=lambda _: None)
        if self._process is not None:
            self._process.wait(STOP_TIMEOUT_S)
        return self

    # --- implementation ---

    def _view(self) -> RecordedRun:
        from ddptrain.results.run import Run as RecordedRun
        from ddptrain.results.run_record import RunStatus

        view = self._runs.find(self.id) if self._is_stored else RecordedRun(self._folder)
        if view.status != RunStatus.QUEUED:
            return view
        if self._settled is None:
            from ddptrain.driver.submit import settling

            self._settled = settling(lambda: RecordedRun(self._folder))  # runs in stores are never queued
        return self._settled()

    def _stop_target(self) -> StopTarget:
        from ddptrain.driver.control.stop import StopTarget
        from ddptrain.results.run import Run as RecordedRun

        look = {"look_every_s": _STORE_POLL_S} if self._is_stored else {}
        return StopTarget(RecordedRun(self._folder), self._view, **look)

    def _is_running(self) -> bool:
        return self._view().goes_on if self._process is None else self._process.poll() is None

    def _raise(self) -> None:
        from ddptrain.results.run_record import root_cause

        record = self._view().record
        code = self._process.returncode if self._process is not None else record.exit_code
        if code == ExitCode.SUCCEEDED:
            return
        failure = record.failure
        if failure is None:
            raise error_of(ExitCode.CLUSTER if code is None else code, f"run {self.id} ended with exit code {code}")
        log = f"; log: {failure.log}" if failure.log else ""
        again = f"; continue with resume={self.id!r}" if code == ExitCode.PREEMPTED else ""
        raise error_of(ExitCode.CLUSTER if code is None else code, f"run {self.id}: {root_cause(failure)}{log}{again}")

    def _until_end(self, timeout_s: float | None, every_s: float) -> Iterator[None]:
        """Yield every `every_s` seconds while the run is running. Raises TimeoutError."""
        deadline = time.monotonic() + (float("inf") if timeout_s is None else timeout_s)
        while self._is_running():
            yield
            if (left_s := deadline - time.monotonic()) <= 0:
                raise TimeoutError(f"run {self.id} is still running after {timeout_s:g} s")
            time.sleep(min(left_s, every_s))

    def _show(
        self,
        lines: Callable[[], Iterable[str]],
        write: Callable[[str], object],
        every_s: float,
        *,
        live: bool = False,
        limit_s: float | None = None,
    ) -> None:
        """Write new lines until the run ends, if `live` below a table that is updated in place. Raises as `wait`."""
        from ddptrain.results.show.live_table import LiveTable

        refresh_s = _STORE_POLL_S if self._is_stored else 1.0
        table = LiveTable(self._view, refresh_s) if live else None

        def show(*, now: bool = False) -> None:
            for line in lines():
                (table.write if table else write)(line)
            if table:
                table.refresh(now=now)

        for _ in self._until_end(limit_s, every_s):
            show()
        show(now=True)
        self._raise()


def _int_if_whole(step: float | None) -> float | None:
    return int(step) if step is not None and step.is_integer() else step
