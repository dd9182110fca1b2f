"""Adds checkpoints to the checkpoints folder of a run, and decides which stay and which is the best.

A checkpoint there is complete and verified, or absent, and its files are not changed any more: a step that is saved
again gets a folder of its own, step-100.2, and the folder before is deleted.
"""

from __future__ import annotations

import json
import math
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from ddptrain.config.wording import shorten
from ddptrain.file_ops import publish, sync_folder
from ddptrain.protocol.events import CheckpointSaved, StagedFile
from ddptrain.results.checkpoints.verification import VerifiedCheckpoint, is_plain_name
from ddptrain.results.errors import CheckpointDamaged, results_errors
from ddptrain.results.layout import BEST, INCOMING, LATEST, MANIFEST, step_name, step_of
from ddptrain.results.run_record import BestRecord, as_json_data
from ddptrain.results.secure_files import write_file
from ddptrain.results.staged_files import StagedMove, move_in

_MANIFEST_SCHEMA = 1
_OLD = ".old-"


class RunCheckpoints:
    """The checkpoints of the run that this process writes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._saved: dict[int, Saved] = {}  # by step, in the order of saving
        self.best: BestRecord | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The checkpoints' folder names, newest first."""
        return tuple(each.name for each in reversed(self._saved.values()))

    def adopt(
        self,
        event: CheckpointSaved,
        source: Path,
        policy: CheckpointPolicy,
        *,
        world_size: int,
        versions: Mapping[str, str],
        parts: Sequence[Path] = (),
        moved: Callable[[], None] = lambda: None,
    ) -> Path:
        """Add a staged checkpoint, update `latest` and `best`, and delete old checkpoints. The staged files stay.

        If a step is saved again, metrics that the new event does not have are kept: the last checkpoint of a run often
        has none. source: the staging folder of `event.files`; parts: the staging folder of each of `event.parts`;
        moved: called after each part of a file.

        Raises CheckpointDamaged (nothing visible has changed), ResultsError.
        """
        before = self._saved[event.step].metrics if event.step in self._saved else {}
        metrics = {**before, **event.metrics}
        event = replace(event, metrics=metrics, finite=event.finite and are_finite(metrics, policy))
        staged = _staged(event, (source, *parts))
        incoming = self._folder / f"{INCOMING}{step_name(event.step)}-{secrets.token_hex(4)}"
        try:
            _check_names(event, staged)
            with results_errors(incoming):
                incoming.mkdir(mode=0o755, parents=True)
            moves = [StagedMove(at / f.name, incoming / f.name, f.size_bytes, f.sha256) for at, f in staged]
            move_in(moves, CheckpointDamaged, moved)
            write_file(incoming / MANIFEST, _manifest(event, [file for _, file in staged], world_size, versions))
            with results_errors(incoming):
                sync_folder(incoming)
                others = [path for path in self._folder.iterdir() if step_of(path.name) == event.step]
                final = self._free_folder(event.step)
                publish(incoming, final)
                sync_folder(self._folder)
        except BaseException:
            shutil.rmtree(incoming, ignore_errors=True)
            raise
        self._saved.pop(event.step, None)
        self._saved[event.step] = Saved(event.step, metrics, event.finite, final.name)
        self._update_pointers(policy)
        dropped = superseded([*self._saved.values()], self.best, policy)
        for folder in (*others, *(self._folder / self._saved.pop(step).name for step in dropped)):
            _remove(folder)
        return final

    def restore(self, checkpoints: Iterable[VerifiedCheckpoint], policy: CheckpointPolicy) -> None:
        """Register existing checkpoints, oldest first.

        A checkpoint in the folder that is not registered stays until its step is saved again.
        """
        self._saved = {each.step: Saved(each.step, each.metrics, each.finite, each.folder.name) for each in checkpoints}
        self._update_pointers(policy)

    def _free_folder(self, step: int) -> Path:
        number = 1
        while (folder := self._folder / step_name(step, number)).exists():
            number += 1
        return folder

    def _update_pointers(self, policy: CheckpointPolicy) -> None:
        """Update the attribute `best`, and the pointer files `latest` and `best`."""
        self.best = best_checkpoint([*self._saved.values()], policy)
        steps = {LATEST: next(reversed(self._saved), None), BEST: self.best.step if self.best else None}
        for name, step in steps.items():
            pointer = self._folder / name
            if step is not None:
                write_file(pointer, f"{self._saved[step].name}\n".encode())
            else:
                with results_errors(pointer):
                    pointer.unlink(missing_ok=True)


def discard_staged(event: CheckpointSaved, sources: Sequence[Path]) -> None:
    """Delete the staged files of a checkpoint that has been added."""
    for folder, file in _staged(event, sources):
        with suppress(OSError):
            (folder / file.name).unlink()
    for folder in sources:
        with suppress(OSError):
            folder.rmdir()


def _staged(event: CheckpointSaved, sources: Sequence[Path]) -> list[tuple[Path, StagedFile]]:
    """Return each file of a checkpoint with its staging folder."""
    parts = (event.files, *(part.files for part in event.parts))
    return [(folder, file) for folder, files in zip(sources, parts, strict=True) for file in files]


def _check_names(event: CheckpointSaved, staged: Sequence[tuple[Path, StagedFile]]) -> None:
    """Raise CheckpointDamaged if a file name is not plain, or is listed twice."""
    names = [file.name for _, file in staged]
    for name in names:
        if not is_plain_name(name):
            raise CheckpointDamaged(
                f'the checkpoint of step {event.step} lists "{shorten(name)}", which is not a plain file name'
            )
    if not names or len(set(names)) < len(names):
        raise CheckpointDamaged(f"the checkpoint of step {event.step} lists {'a file twice' if names else 'no files'}")


def _manifest(
    event: CheckpointSaved, files: Sequence[StagedFile], world_size: int, versions: Mapping[str, str]
) -> bytes:
    manifest = {
        "schema": _MANIFEST_SCHEMA,
        "step": event.step,
        "epoch": event.epoch,
        "metrics": event.metrics,
        "finite": event.finite,
        "world_size": world_size,
        "versions": versions,
        "files": [asdict(file) for file in files],
    }
    return (json.dumps(as_json_data(manifest), indent=2, allow_nan=False) + "\n").encode()


def _remove(folder: Path) -> None:
    """Delete a checkpoint. The folder is renamed first, so that no reader sees an incomplete checkpoint."""
    renamed = folder.with_name(f"{_OLD}{folder.name}-{secrets.token_hex(4)}")
    with suppress(OSError):
        publish(folder, renamed)
        shutil.rmtree(renamed, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """How many checkpoints are kept besides the best one; the metric that decides which is best, and its direction.

    ignore_nan: metrics may be NaN or infinite; only the weights must be finite.
    """

    keep: int = 3
    metric: str | None = "val/loss"
    mode: Literal["min", "max"] = "min"
    ignore_nan: bool = False


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint to choose from: step, metrics, whether it is finite (see `are_finite`), and its folder's name."""

    step: int
    metrics: Mapping[str, float]
    finite: bool = True
    name: str = ""


def are_finite(metrics: Mapping[str, float], policy: CheckpointPolicy) -> bool:
    """Return whether the metrics of a checkpoint show a model that has not diverged.

    If the policy's metric is among them, that one and the losses count: another one may be NaN for a good reason, such
    as the AUC of an epoch without positive samples. Otherwise all count.
    """
    if policy.ignore_nan:
        return True
    all_count = policy.metric not in metrics
    counted = (value for name, value in metrics.items() if all_count or name == policy.metric or "loss" in name)
    return all(map(math.isfinite, counted))


def best_checkpoint(saved: Sequence[Saved], policy: CheckpointPolicy) -> BestRecord | None:
    """Return the best checkpoint, of equal ones the last; None if none has a finite value of the policy's metric.

    saved: in the order of saving. A checkpoint that is not finite is chosen only if no other one has the metric.
    """
    if policy.metric is None:
        return None
    values = [(each, value) for each in saved if math.isfinite(value := each.metrics.get(policy.metric, math.nan))]
    finite = [pair for pair in values if pair[0].finite] or values
    if not finite:
        return None
    # Of equal values, max() and min() return the first one.
    best, value = (max if policy.mode == "max" else min)(reversed(finite), key=lambda pair: pair[1])
    return BestRecord(policy.metric, policy.mode, value, best.step)


def superseded(saved: Sequence[Saved], best: BestRecord | None, policy: CheckpointPolicy) -> list[int]:
    """Return the steps of the checkpoints that are deleted, oldest first: neither new, nor the best or last finite one.

    saved: in the order of saving.
    """
    kept = {each.step for each in saved[-policy.keep :]} | {best.step if best is not None else None}
    kept.add(next((each.step for each in reversed(saved) if each.finite), None))
    return [each.step for each in saved if each.step not in kept]
