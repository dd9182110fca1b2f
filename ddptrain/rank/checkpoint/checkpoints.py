"""ctx.checkpoint and ctx.resume: a thread writes a checkpoint while training continues. A failed write ends the run."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ddptrain.errors import CheckpointNotWritten
from ddptrain.protocol import events
from ddptrain.protocol.events import CheckpointPart, StagedFile
from ddptrain.protocol.rank_spec import RankSpec
from ddptrain.rank.agreement import Agreement
from ddptrain.rank.checkpoint import files, snapshot
from ddptrain.rank.checkpoint.snapshot import HostBuffers, Snapshot, is_sharded, plain_bytes
from ddptrain.rank.gradients import GradientSteps
from ddptrain.rank.loader import Loaders
from ddptrain.rank.output import ArtifactFiles, Emitter, numbers, optional
from ddptrain.rank.trackers import RankTrackers

_NICENESS = 5  # the priority of the thread is lower than that of training steps


@dataclass(frozen=True, slots=True)
class Resumed:
    """The checkpoint that a run continues from: its `step`, its `epoch`, and in `data` the extra state.

    world_size: the number of ranks that saved it. rank_state: that of this rank; None if the number of ranks differs.
    """

    step: int
    epoch: float | None
    data: Mapping[str, Any]
    rank_state: Any = None
    world_size: int = 0


class _Save(NamedTuple):
    """A checkpoint to write, the `number`-th of this attempt; `own`: this rank's encoded state and metrics."""

    number: int
    step: int
    epoch: float | None
    folder: Path
    snapshot: Snapshot
    own: bytes


class Checkpoints:
    """Saves and loads the checkpoints of one rank. At most one checkpoint is being written.

    Only rank 0 writes, except for a sharded model: then each rank writes its slices, and gives rank 0 the names of the
    files when they are durable. Rank 0 emits the event when the files of all ranks are complete.
    """

    def __init__(
        self,
        spec: RankSpec,
        emitter: Emitter,
        device: torch.device,
        agreement: Agreement,
        tracked: RankTrackers,
        artifacts: ArtifactFiles,
        loaders: Loaders,
        gradients: GradientSteps,
    ) -> None:
        self._spec, self._emitter, self._device = spec, emitter, device
        self._agreement, self._tracked = agreement, tracked
        self._artifacts, self._loaders, self._gradients = artifacts, loaders, gradients
        self._buffers = HostBuffers()
        self._count = 0
        self._waits = False  # whether a checkpoint is due, but the optimizer is within its window
        self._has_resumed = False
        self._compares = bool(spec.resume_from)  # until the first step is known to be right or wrong
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._hurry = threading.Event()
        self._missing: set[int] = set()  # ranks whose missing state has been reported

    def save(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        step: int,
        epoch: float | None,
        metrics: Mapping[str, Any],
        rank_state: Any,
        more: Mapping[str, Any],
        *,
        last: bool,
    ) -> tuple[bool, bool, bool]:
        """Save a checkpoint if one is due.

        Return whether it was due, whether all ranks end with this call, and whether training ends early after it.
        """
        self._compare(step)
        self._raise_error()
        epoch = optional("epoch", epoch)
        if (patience := self._agreement.patience) is not None and self._spec.rank == 0:
            patience.add("checkpoint", numbers(metrics), step, epoch)
        due, ends, early = self._agreement.call(step, epoch, last=last)
        due = due or self._waits
        self._waits = due and not last and not self._gradients.is_whole
        if not due or self._waits:
            return False, False, False
        began, rank, number = time.monotonic(), self._spec.rank, self._count + 1
        own = {"random": files.capture_random(self._device), "rank_state": rank_state, "metrics": numbers(metrics)}
        encoded, gradients = plain_bytes(own), self._gradients.state()
        self._count, self._agreement.has_saved = number, True
        if rank != 0 and not is_sharded(model):
            self._agreement.give_state(number, b"\n" + encoded)
        else:
            self.wait()  # the previous checkpoint must be written before its memory is used again
            state: dict[str, Any] = {"step": step, "epoch": epoch, "extra": dict(more)}
            state |= {"world_size": self._spec.placement.world_size, "loaders": self._loaders.state()}
            if gradients is not None:
                state["gradients"] = gradients
            if patience is not None:
                state["patience"] = patience.state()
            copied = self._buffers.take(model, optimizer, state if rank == 0 else {})
            to_write = _Save(number, step, epoch, self._artifacts.new_staging("checkpoint"), copied, encoded)
            self._thread = threading.Thread(target=self._run, args=(to_write,), name="ddptrain-saver", daemon=True)
            self._thread.start()
            self._agreement.saved()
        if not self._spec.config.checkpoint.asynchronous or ends:
            self.wait()
        if rank == 0:
            self._emitter.timed("checkpoint", time.monotonic() - began)
        return True, ends and not last, early

    def wait(self, deadline_s: float | None = None) -> bool:
        """Wait until no checkpoint is being written; return False after `deadline_s` seconds.

        Raises CheckpointNotWritten, once, if a checkpoint could not be written.
        """
        if self._thread is not None:
            self._thread.join(deadline_s)
            if self._thread.is_alive():
                return False
        self._raise_error()
        return True

    def close(self, deadline_s: float | None = None, *, failed: bool = False) -> bool:
        """Complete the checkpoint that is being written, after the last call of the workload; see `wait`.

        failed: the worker group is being stopped, so do not wait long for other ranks.
        """
        if failed:
            self._hurry.set()
        complete = self.wait(deadline_s)
        if self._spec.rank != 0 and not failed:
            with suppress(RuntimeError):
                self._agreement.give_no_more()
        return complete

    # --- the thread ---

    def _raise_error(self) -> None:
        if self._error is None:
            return
        error, self._error = self._error, None
        if isinstance(error, OSError):
            what = f"a checkpoint could not be written into {self._spec.host.staging}: {error.strerror or error}"
            raise CheckpointNotWritten(error.errno, what) from error
        raise error

    def _run(self, save: _Save) -> None:
        if self._spec.config.checkpoint.asynchronous:
            with suppress(OSError, AttributeError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)  # on Linux: of this thread
        try:
            complete = self._write(save)
        except BaseException as error:
            complete, self._error = False, error
        if not complete:
            shutil.rmtree(save.folder, ignore_errors=True)

    def _write(self, save: _Save) -> bool:
        """Write what this rank writes; rank 0 announces the checkpoint. Return False if ranks did not take part."""
        rank, is_whole = self._spec.rank, save.snapshot.places is None
        written = files.write(save.folder, save.snapshot, rank)
        finite = snapshot.are_finite(save.snapshot.weights)
        if rank != 0:
            part = {**asdict(CheckpointPart(rank, save.folder.name, written)), "finite": finite}
            try:
                self._agreement.give_state(save.number, json.dumps(part).encode() + b"\n" + save.own)
            except RuntimeError:  # the store has ended, and so has the worker group
                return False
            return True
        try:
            given = [b"\n" + save.own, *self._agreement.states(save.number, self._hurry)]
        except TimeoutError:
            return False
        missing = {number for number, state in enumerate(given) if state is None}
        lost = "its random state is not saved" if is_whole else "no checkpoint of the sharded model is saved"
        for each in missing - self._missing:
            text = f"rank {each} did not call ctx.checkpoint for step {save.step}: {lost}; all ranks must call it"
            self._emitter.note(text, "warning")
        self._missing |= missing
        if missing and not is_whole:
            return False  # the slices of a rank are missing
        heads, states = [], []
        for state in given:
            head, _, encoded = (state or b"").partition(b"\n")
            heads.append(json.loads(head or "{}"))
            states.append(snapshot.from_bytes(encoded) if encoded else None)
        metrics = mean_metrics([state.pop("metrics", {}) for state in states if state is not None])
        written = *written, *files.write_state(save.folder, {**save.snapshot.state, "metrics": metrics}, states)
        if is_whole:
            self._tracked.checkpoint(save.step, save.folder, metrics)  # before the driver may move it
        finite = finite and all(head.get("finite", True) for head in heads)
        parts = tuple(
            CheckpointPart(head["rank"], head["staging"], tuple(StagedFile(**file) for file in head["files"]))
            for head in heads
            if head.get("files")
        )
        place = save.step, save.folder.name, written, save.epoch, metrics, parts, finite
        self._emitter.emit(events.CheckpointSaved(time.time_ns(), *place))
        return True

    # --- resume ---

    def load(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, more: Mapping[str, Any]
    ) -> Resumed | None:
        """Load the checkpoint to resume from, if there is one, into the given objects, the loaders and the scaler."""
        self._agreement.saves = True
        self._agreement.meet("resume")
        if not self._spec.resume_from:
            return None
        state = files.read(Path(self._spec.resume_from), model, optimizer, self._device)
        step, epoch, extra = state["step"], state["epoch"], state["extra"]
        for name, value in more.items():
            if name in extra:
                value.load_state_dict(extra[name])
            else:
                self._note(f"the checkpoint of step {step} contains no {name!r}: it starts from the beginning")
        data = {name: value for name, value in extra.items() if name not in more}
        data = files.map_values(data, torch.Tensor, lambda tensor: tensor.to(self._device))
        ranks, world_size = state.get("ranks") or [], self._spec.placement.world_size
        own = ranks[self._spec.rank] if len(ranks) == world_size else None
        if own:
            files.restore_random(own["random"], self._device)
        elif ranks:
            self._note(
                f"the checkpoint is of {len(ranks)} ranks, this run has {world_size}: it continues where they were, "
                "with new random states"
                if len(ranks) != world_size
                else "the checkpoint lacks the random states of some ranks: those are new"
            )
            files.reseed_random(ranks[0]["random"], self._spec.rank)
        self._loaders.restore(state.get("loaders") or [], int(epoch or 0) + 1)
        self._gradients.restore(state.get("gradients"))
        if self._agreement.patience is not None:
            self._agreement.patience.restore(state.get("patience"))
        self._agreement.step, self._has_resumed = step, True
        self._note(f"continues from step {step}{'' if epoch is None else f', epoch {epoch:g}'}")
        return Resumed(step, epoch, data, own["rank_state"] if own else None, len(ranks) or world_size)

    def logged(self, step: int) -> None:
        """Compare the step of a ctx.log call, unless ctx.resume was called: the call may count something else then."""
        if not self._has_resumed:
            self._compare(step)

    def _compare(self, step: int) -> None:
        """Warn if the first step is not after that of the checkpoint: work is done again, and steps run backwards."""
        saved = self._spec.resume_step
        is_first, self._compares = self._compares, False
        if not is_first or step > saved:
            return
        text = (
            f"step {step} follows step {saved}, from which ctx.resume has loaded the state: begin at resumed.step + 1"
            if self._has_resumed
            else f"the code begins at step {step}, although the run has a checkpoint of step {saved}: it has not "
            "called ctx.resume, so that this work is done again. Add this before the first step: resumed = "
            "ctx.resume(model=model, optimizer=optimizer), and begin at resumed.step + 1 unless it is None"
        )
        self._note(text, "warning")

    def _note(self, text: str, level: str = "info") -> None:
        if self._spec.rank == 0:
            self._emitter.note(text, level)


def mean_metrics(of_ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the ranks that have it; a value that is equal on all of them is unchanged."""
    given: dict[str, list[float]] = {}
    for metrics in of_ranks:
        for name, value in metrics.items():
            given.setdefault(name, []).append(value)
    return {name: one[0] if len(set(one)) == 1 else sum(one) / len(one) for name, one in given.items()}
