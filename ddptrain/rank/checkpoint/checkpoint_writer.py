"""Writes checkpoints in a thread while training continues, one at a time. A failed write is repeated."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddptrain.protocol import events
from ddptrain.protocol.rank_spec import RankSpec
from ddptrain.rank.checkpoint import file_format as checkpoint_files
from ddptrain.rank.checkpoint import snapshot
from ddptrain.rank.checkpoint.coordination import WorkerGroupStore
from ddptrain.rank.checkpoint.snapshot import Snapshot
from ddptrain.rank.emitter import Emitter

_POLL_S = 0.01
_LONGEST_PAUSE_S = 60.0
_STRAGGLE_S = 0.5  # how much later than rank 0 another rank may arrive while the worker group is being stopped
_NICENESS = 5  # of the thread: training steps have priority


class _Dropped(Exception):
    """The worker group is being stopped before all ranks called ctx.checkpoint: this checkpoint is not written."""


@dataclass(frozen=True, slots=True)
class PendingCheckpoint:
    """A checkpoint to write, the `number`-th of this attempt; `own` is the state of rank 0."""

    number: int
    step: int
    epoch: float | None
    metrics: Mapping[str, float]
    folder: Path
    snapshot: Snapshot
    own: bytes


def state_key(number: int, rank: int) -> str:
    """Return the key of the store under which a rank leaves its state for the `number`-th checkpoint."""
    return f"state/{number}/{rank}"


def done_key(rank: int) -> str:
    """Return the key of the store that says that a rank will not call ctx.checkpoint again."""
    return f"done/{rank}"


class CheckpointWriter:
    """Writes the checkpoints of a worker group; rank 0 has it. At most one checkpoint is being written."""

    def __init__(
        self,
        spec: RankSpec,
        emitter: Emitter,
        store: WorkerGroupStore,
        written: Callable[[int, Path, Mapping[str, float]], None] = lambda step, folder, metrics: None,
    ) -> None:
        """`written` is called with each complete checkpoint, before the driver may move it."""
        self._written = written
        self._spec = spec
        self._emitter = emitter
        self._store = store
        self._thread: threading.Thread | None = None
        self._hurry = threading.Event()
        self._silent: set[int] = set()  # ranks that missed a checkpoint: not waited for again
        self.error: BaseException | None = None
        self.gathers = False  # whether it waits for the states of other ranks

    def start(self, save: PendingCheckpoint) -> None:
        """Start to write a checkpoint; no other one may be in progress."""
        self._thread = threading.Thread(target=self._run, args=(save,), name="ddptrain-saver", daemon=True)
        self._thread.start()

    def wait(self, deadline_s: float | None = None, *, hurry: bool = False) -> bool:
        """Wait until no checkpoint is in progress; return whether that was so before the deadline.

        hurry: do not repeat a failed write.

        Raises OSError, once, if a checkpoint could not be written.
        """
        if hurry:
            self._hurry.set()
        thread = self._thread
        if thread is not None:
            thread.join(deadline_s)
            if thread.is_alive():
                return False
        self.raise_error()
        return True

    def raise_error(self) -> None:
        """Raise the error that ended a save, once."""
        error, self.error = self.error, None
        if isinstance(error, OSError):
            raise OSError(error.errno, f"a checkpoint could not be written: {error.strerror or error}") from error
        if error is not None:
            raise error

    def _run(self, save: PendingCheckpoint) -> None:
        if self._spec.checkpointing.asynchronous:
            with suppress(OSError, AttributeError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)  # on Linux: of this thread
        try:
            self._write(save, self._gathered(save))
        except _Dropped:
            pass
        except BaseException as error:
            self.error = error

    def _write(self, save: PendingCheckpoint, ranks: list[Any]) -> None:
        failures = 0
        while True:
            try:
                files = checkpoint_files.write(save.folder, save.snapshot, ranks)
                self._written(save.step, save.folder, save.metrics)
                self._emitter.emit(
                    events.CheckpointSaved(
                        time.time_ns(), save.step, save.folder.name, files, save.epoch, dict(save.metrics)
                    )
                )
                return
            except OSError as error:
                shutil.rmtree(save.folder, ignore_errors=True)
                failures += 1
                pause_s = min(2.0 ** (failures - 1), _LONGEST_PAUSE_S)
                given_up = failures >= self._spec.checkpointing.max_failures or self._hurry.is_set()
                self._report_failure(save, error, failures, given_up)
                if given_up or self._hurry.wait(pause_s):
                    raise

    def _report_failure(self, save: PendingCheckpoint, error: OSError, failures: int, given_up: bool) -> None:
        message = f"{error.strerror or error}"
        with suppress(OSError):  # the disk of the events may be full, too
            self._emitter.emit(events.CheckpointFailed(time.time_ns(), save.step, message, failures, given_up))

    def _gathered(self, save: PendingCheckpoint) -> list[Any]:
        """Return the state of each rank, or None for a rank that misses the checkpoint. Raises _Dropped."""
        deadline = time.monotonic() + self._spec.group.timeout_s
        self.gathers = True
        try:
            others = [self._awaited(rank, save, deadline) for rank in range(1, self._spec.placement.world_size)]
        finally:
            self.gathers = False
        return [snapshot.from_bytes(save.own), *others]

    def _awaited(self, rank: int, save: PendingCheckpoint, deadline: float) -> Any:
        key = state_key(save.number, rank)
        while True:
            gone = rank in self._silent or self._store.has(done_key(rank))
            if self._store.has(key):  # tested last: a rank leaves its state before it says that it is done
                break
            if self._hurry.is_set():
                deadline = min(deadline, time.monotonic() + _STRAGGLE_S)
            late = time.monotonic() > deadline
            if late and not gone and self._hurry.is_set():
                raise _Dropped
            if late or gone:
                self._miss(rank, save.step)
                return None
            time.sleep(_POLL_S)
        state = snapshot.from_bytes(self._store.get(key))
        self._store.delete(key)
        return state

    def _miss(self, rank: int, step: int) -> None:
        if rank not in self._silent:
            self._silent.add(rank)
            text = (
                f"rank {rank} did not call ctx.checkpoint for step {step}: its random state is not saved; "
                "all ranks must call it"
            )
            self._emitter.emit(events.Note(time.time_ns(), text, "warning"))
