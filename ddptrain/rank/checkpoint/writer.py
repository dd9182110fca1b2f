"""Writes checkpoints in a thread while training continues, one after the other. A failed write ends the run."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddptrain.errors import CheckpointNotWritten
from ddptrain.protocol import events
from ddptrain.protocol.events import StagedFile
from ddptrain.protocol.rank_spec import RankSpec
from ddptrain.rank.agreement import WorkerGroupStore
from ddptrain.rank.checkpoint import files as checkpoint_files
from ddptrain.rank.checkpoint import snapshot
from ddptrain.rank.checkpoint.snapshot import Shards, Snapshot
from ddptrain.rank.output import Emitter

_POLL_S, _MAX_POLL_S = 0.01, 0.2  # longer and longer: a rank that waits must not look as if it worked
_LATE_S = 0.5  # while the worker group is being stopped, another rank may be this much later than rank 0
_NICENESS = 5  # the priority of the thread is lower than that of training steps


class _Dropped(Exception):
    """The worker group is being stopped before all ranks called ctx.checkpoint: this checkpoint is not written."""


@dataclass(frozen=True, slots=True)
class PendingCheckpoint:
    """A checkpoint to write, the `number`-th of this attempt; `rank_data`: this rank's encoded state and metrics."""

    number: int
    step: int
    epoch: float | None
    folder: Path
    snapshot: Snapshot
    rank_data: bytes


def state_key(number: int, rank: int) -> str:
    """Return the key of the store for a rank's state in the `number`-th checkpoint."""
    return f"state/{number}/{rank}"


def part_key(number: int, rank: int) -> str:
    """Return the key of the store that names the files of a rank for the `number`-th checkpoint of a sharded model."""
    return f"part/{number}/{rank}"


def done_key(rank: int) -> str:
    """Return the key of the store that is set when a rank will not call ctx.checkpoint again."""
    return f"done/{rank}"


def mean_metrics(of_ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the ranks that have it; a value that is equal on all of them is unchanged."""
    given: dict[str, list[float]] = {}
    for metrics in of_ranks:
        for name, value in metrics.items():
            given.setdefault(name, []).append(value)
    return {name: one[0] if len(set(one)) == 1 else sum(one) / len(one) for name, one in given.items()}


class CheckpointWriter:
    """Writes the checkpoints of a worker group. At most one checkpoint is being written.

    Only rank 0 writes, except for a sharded model: then each rank writes its slices, and sets a key of the store with
    the names of the files when they are durable. Rank 0 tells the driver when the files of all ranks are complete.
    """

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
        self._folder: Path | None = None  # of the last checkpoint, for error messages
        self._hurry = threading.Event()
        self._silent: set[int] = set()  # ranks that missed a checkpoint: rank 0 does not wait for them again
        self.error: BaseException | None = None
        self._late_s = _LATE_S

    def start(self, save: PendingCheckpoint) -> None:
        """Start to write a checkpoint. No other checkpoint may be in progress."""
        self._folder = save.folder.parent
        self._thread = threading.Thread(target=self._run, args=(save,), name="ddptrain-saver", daemon=True)
        self._thread.start()

    def wait(self, deadline_s: float | None = None, *, hurry: bool = False) -> bool:
        """Wait until no checkpoint is in progress; return False after `deadline_s` seconds.

        hurry: the worker group is being stopped, so do not wait long for other ranks.

        Raises CheckpointNotWritten, once, if a checkpoint could not be written.
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
            advice = "; raise the limit on the size of files: ulimit -f" if error.errno == errno.EFBIG else ""
            what = f"a checkpoint could not be written into {self._folder}: {error.strerror or error}{advice}"
            raise CheckpointNotWritten(error.errno, what) from error
        if error is not None:
            raise error

    def _run(self, save: PendingCheckpoint) -> None:
        if self._spec.checkpointing.asynchronous:
            with suppress(OSError, AttributeError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)  # on Linux: of this thread
        try:
            if save.snapshot.shards is None:
                self._write_whole(save)
            elif self._spec.rank == 0:
                self._write_first_part(save, save.snapshot.shards)
            else:
                self._write_part(save, save.snapshot.shards)
        except BaseException as error:
            shutil.rmtree(save.folder, ignore_errors=True)
            if not isinstance(error, _Dropped):
                self.error = error

    def _write_whole(self, save: PendingCheckpoint) -> None:
        ranks, metrics = self._gather_states(save)
        files = checkpoint_files.write(save.folder, save.snapshot, ranks)
        self._written(save.step, save.folder, metrics)
        self._announce(save, files, metrics, finite=snapshot.are_finite(save.snapshot.weights))

    def _write_part(self, save: PendingCheckpoint, shards: Shards) -> None:
        """Write the slices of a rank other than 0, then store the names of its files and its state."""
        rank = self._spec.rank
        files = checkpoint_files.write_shards(save.folder, shards, rank)
        part = events.CheckpointPart(rank, save.folder.name, files)
        made = {**asdict(part), "finite": snapshot.are_finite(shards.model)}
        try:
            self._store.set(part_key(save.number, rank), json.dumps(made))
            self._store.set(state_key(save.number, rank), save.rank_data)
        except RuntimeError as error:  # the store has ended, and so has the worker group
            raise _Dropped from error

    def _write_first_part(self, save: PendingCheckpoint, shards: Shards) -> None:
        """Write the slices of rank 0, wait for the other ranks, and tell the driver."""
        began = time.monotonic()
        first_files = checkpoint_files.write_shards(save.folder, shards, 0)
        self._late_s = _LATE_S + time.monotonic() - began  # other ranks write about as much
        ranks, metrics = self._gather_states(save)
        if None in ranks:  # the slices of a rank are missing; _note_missing has reported it
            raise _Dropped
        parts = [self._part_of_rank(save.number, rank) for rank in range(1, len(ranks))]
        files = *first_files, *checkpoint_files.write_state(save.folder, save.snapshot, ranks)
        finite = snapshot.are_finite(shards.model) and all(is_finite for _, is_finite in parts)
        self._announce(save, files, metrics, tuple(part for part, _ in parts if part.files), finite=finite)

    def _part_of_rank(self, number: int, rank: int) -> tuple[events.CheckpointPart, bool]:
        """Return the files of a rank, and whether its slices of the weights are finite."""
        part: dict[str, Any] = json.loads(self._store.get(part_key(number, rank)))
        self._store.delete(part_key(number, rank))
        files = tuple(StagedFile(**file) for file in part["files"])
        return events.CheckpointPart(rank, part["staging"], files), part["finite"]

    def _announce(
        self,
        save: PendingCheckpoint,
        files: tuple[StagedFile, ...],
        metrics: Mapping[str, float],
        parts: tuple[events.CheckpointPart, ...] = (),
        *,
        finite: bool,
    ) -> None:
        place = save.step, save.folder.name, files, save.epoch, metrics, parts, finite
        self._emitter.emit(events.CheckpointSaved(time.time_ns(), *place))

    def _gather_states(self, save: PendingCheckpoint) -> tuple[list[Any], dict[str, float]]:
        """Return the state of each rank, None for a rank that has not called ctx.checkpoint, and the metrics.

        Raises _Dropped.
        """
        deadline = time.monotonic() + self._spec.group.timeout_s
        others = [self._wait_for_state(rank, save, deadline) for rank in range(1, self._spec.placement.world_size)]
        ranks = [snapshot.from_bytes(save.rank_data), *others]
        metrics = mean_metrics([state.pop("metrics", {}) for state in ranks if state is not None])
        save.snapshot.state["metrics"] = metrics
        return ranks, metrics

    def _wait_for_state(self, rank: int, save: PendingCheckpoint, deadline: float) -> Any:
        key = state_key(save.number, rank)
        pause_s = _POLL_S
        while True:
            gone = rank in self._silent or self._store.has(done_key(rank))
            if self._store.has(key):  # tested last, because a rank sets its state before it sets its key "done"
                break
            if self._hurry.is_set():
                deadline = min(deadline, time.monotonic() + self._late_s)
            late = time.monotonic() > deadline
            if late and not gone and self._hurry.is_set():
                raise _Dropped
            if late or gone:
                self._note_missing(rank, save.step, sharded=save.snapshot.shards is not None)
                return None
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _MAX_POLL_S)
        state = snapshot.from_bytes(self._store.get(key))
        self._store.delete(key)
        return state

    def _note_missing(self, rank: int, step: int, *, sharded: bool) -> None:
        if rank not in self._silent:
            self._silent.add(rank)
            lost = "no checkpoint of the sharded model is saved" if sharded else "its random state is not saved"
            text = f"rank {rank} did not call ctx.checkpoint for step {step}: {lost}; all ranks must call it"
            self._emitter.emit(events.Note(time.time_ns(), text, "warning"))
