"""The embedded cluster: a scheduler in the driver's process and one worker process, both for one run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ddptrain.clusters.machine_slots import MachineSlots
from ddptrain.clusters.provider import Cluster
from ddptrain.clusters.resolve import Target
from ddptrain.clusters.security import make_tls, own_security
from ddptrain.errors import ClusterError
from ddptrain.log import Log

if TYPE_CHECKING:
    from distributed import Scheduler

    from ddptrain.clusters.scheduler.slots import Refusal

_log = Log(__name__)
_SCHEDULER_START_S, _SCHEDULER_END_S = 30.0, 5.0
_WORKER_END_S = 6.0  # the grace period of the ranks, and the worker's own clean-up


class EmbeddedCluster(Cluster):
    """Slots on this machine: one per GPU in `gpus`, or `slots` on the CPU. All of it ends with the driver."""

    def __init__(
        self,
        slots: int,
        gpus: tuple[str, ...],
        scratch: Path,
        environ: Mapping[str, str],
        rank_python: str = "",
        present: tuple[str, ...] = (),
    ) -> None:
        """scratch: a folder in that of the run, whose name others see who wait for the slots.

        rank_python: that of an installed environment; "" if the ranks start from the driver's own Python. present: the
        GPUs from which those in use by other runs may be replaced.
        """
        self.rank_python = rank_python or sys.executable
        self.room = MachineSlots(scratch.parent.name, present or gpus)
        self.slots = slots
        self.gpus = gpus
        self.scratch = scratch
        self.environ = environ
        self._address = ""
        self._has_room = False
        self._worker: subprocess.Popen[bytes] | None = None
        self._loop = asyncio.new_event_loop()  # of the scheduler, in a thread
        self._scheduler: Scheduler | None = None

    def wait_for_room(self, priority: int) -> Refusal | None:
        """Hold slots of this machine for the run, or return why it has to wait. Raises ClusterError."""
        try:
            answer = self.room.claim(self.slots, self.gpus, priority, in_line=True)
        except OSError as error:
            raise ClusterError(f"the queue of this machine can't be used: {error}; set XDG_STATE_HOME") from error
        if not isinstance(answer, tuple):
            return answer
        self.gpus, self._has_room = answer, True
        return None

    def begin(self) -> None:
        """Start the worker process, which starts its rank server. Both import modules while the driver continues."""
        if not self._has_room:
            self._has_room = True
            try:
                gpus = self.room.claim(self.slots, self.gpus, in_line=False)
                self.gpus = gpus if isinstance(gpus, tuple) else self.gpus
            except OSError as error:  # a run that waits does not see this one
                _log.info("slots of this machine not claimed", error=error)
        self.scratch.mkdir(parents=True, exist_ok=True, mode=0o700)
        command = [sys.executable, "-P", "-m", "ddptrain.worker", "--scheduler", "-", "--slots", str(self.slots)]
        scratch = self.scratch.resolve()
        command += ["--gpus", ",".join(self.gpus), "--tls-dir", str(scratch), "--rank-python", self.rank_python]
        command += ["--scratch", str(scratch / "worker")]  # a worker deletes it when it ends: it is not that of the key
        with self.worker_log.open("ab") as log:
            self._worker = subprocess.Popen(
                command,
                env=dict(self.environ),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        _log.info("local worker started", pid=self._worker.pid, slots=self.slots, gpus=self.gpus or None)

    @property
    def description(self) -> str:
        """What it is, for messages."""
        return "a local cluster"

    @property
    def worker_log(self) -> Path:
        """The worker's own output; empty unless something goes wrong."""
        return self.scratch / "worker.log"

    def connect(self) -> Target:
        """Start the scheduler in a thread and give its address to the worker. Raises ClusterError."""
        make_tls(self.scratch)
        self._address = self._start_scheduler()
        self._introduce()
        return Target(self._address, own_security(self.scratch), foreign=False)

    def _introduce(self) -> None:
        """Send the scheduler's address to the worker."""
        assert self._worker is not None and self._worker.stdin is not None
        try:
            self._worker.stdin.write(f"{self._address}\n".encode())
            self._worker.stdin.flush()
        except OSError as error:
            raise ClusterError(f"the local Dask worker has ended: {self.worker_fault() or error}") from error

    def worker_fault(self) -> str | None:
        """Return why the worker has ended; None while it runs."""
        assert self._worker is not None
        status = self._worker.poll()
        if status is None:
            return None
        from ddptrain.protocol.news import describe_status

        words = self.worker_log.read_text(errors="replace").strip() if self.worker_log.exists() else ""
        return f"the Dask worker (pid {self._worker.pid}) ended: {describe_status(status)}" + (
            f"; the end of its log: {words[-500:]}" if words else ""
        )

    def replace_workers(self, *, leaving: bool) -> None:
        """Start another worker if the last one has ended; the scheduler stays. Raises ClusterError."""
        if leaving and self._worker is not None:
            self._end_worker(self._worker)
        if self.worker_fault() is not None:
            self.begin()
            self._introduce()

    def close(self) -> None:
        """End the worker and its ranks, then the scheduler; delete the scratch folder."""
        if self._worker is not None:
            self._end_worker(self._worker)
        if self._scheduler is not None:
            closing = asyncio.run_coroutine_threadsafe(self._scheduler.close(reason="run ended"), self._loop)
            with contextlib.suppress(Exception):  # the run has ended all the same
                closing.result(_SCHEDULER_END_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.room.release()

    def _end_worker(self, worker: subprocess.Popen[bytes]) -> None:
        assert worker.stdin is not None
        with contextlib.suppress(OSError):
            worker.stdin.close()  # at the end of stdin the worker ends its ranks and itself
        try:
            worker.wait(timeout=_WORKER_END_S)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
        _log.info("local worker ended", pid=worker.pid, status=worker.returncode)

    def _serve(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _start_scheduler(self) -> str:
        from ddptrain.clusters.scheduler.scheduler_process import new_scheduler

        logging.getLogger("distributed").setLevel(logging.CRITICAL)  # the driver reports the errors itself
        threading.Thread(target=self._serve, name="ddptrain-scheduler", daemon=True).start()
        try:
            # Its worker is a child of the driver, which sees its end: nobody has to drop the silent.
            starting = asyncio.run_coroutine_threadsafe(new_scheduler(self.scratch, self.scratch), self._loop)
            self._scheduler = starting.result(_SCHEDULER_START_S)
        except Exception as error:
            reason = str(error) or f"no answer within {_SCHEDULER_START_S:g} s"
            raise ClusterError(f"the embedded Dask scheduler could not start: {reason}") from error
        return str(self._scheduler.address)
