"""Checkpoints and tables as artifacts of an online run: they are sent one after the other, in a thread."""

from __future__ import annotations

import re
import shutil
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image  # noqa: F401  # wandb would import it later, maybe while the process forks
import wandb

from ddptrain.tracking import items
from ddptrain.tracking.items import link_or_copy
from ddptrain.tracking.wandb.wandb_run import reason_of

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class _Upload:
    artifact: wandb.Artifact
    aliases: Sequence[str] = ()
    folder: Path | None = None  # the files of a checkpoint, which are deleted once they are sent


class ArtifactUploads:
    """Sends artifacts, and records which ones W&B lacks.

    A checkpoint has hard links below `folder` until it is sent. If the next checkpoint comes while one still waits
    for an earlier upload, it replaces the waiting one, so that a slow server does not fill the disk.
    """

    def __init__(self, run: wandb.Run, run_id: str, folder: Path) -> None:
        self._run, self._run_id, self._folder = run, run_id, folder
        self._waiting: deque[_Upload] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._count = self._replaced = 0
        self._errors: list[str] = []
        shutil.rmtree(folder, ignore_errors=True)  # the links of a rank that was killed
        self._thread = threading.Thread(target=self._send_all, name="ddptrain-wandb-artifacts", daemon=True)
        self._thread.start()

    def put(self, artifact: wandb.Artifact, aliases: Sequence[str] = ()) -> None:
        """Send an artifact later."""
        self._add(_Upload(artifact, aliases))

    def put_checkpoint(self, item: items.Checkpoint) -> None:
        """Send a checkpoint later; its files may be deleted when this method has returned. Raises OSError."""
        folder = self._folder / f"step-{item.step}-{self._count}"
        folder.mkdir(parents=True)
        for path in item.folder.iterdir():
            link_or_copy(path, folder / path.name)
        name = artifact_name(f"checkpoint_{self._run_id}")
        artifact = wandb.Artifact(name, type="model", metadata={"step": item.step, **item.metrics})
        for path in sorted(folder.iterdir()):  # not copied: they must exist until they are sent
            artifact.add_file(str(path), name=path.name, policy="immutable", skip_cache=True)
        self._add(_Upload(artifact, ["latest", f"step-{item.step}"], folder))

    def _add(self, upload: _Upload) -> None:
        with self._changed:
            self._count += 1
            for other in [each for each in self._waiting if each.folder and upload.folder]:
                self._waiting.remove(other)
                self._replaced += 1
                _delete(other)
            self._waiting.append(upload)
            self._changed.notify()

    def _send_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                upload = self._waiting.popleft()
            try:
                # Artifact.wait alone reports that the server has refused an artifact.
                self._run.log_artifact(upload.artifact, aliases=[*upload.aliases]).wait()
            except Exception as error:  # whatever wandb raises
                self._errors.append(reason_of(error))
            _delete(upload)

    def finish(self, timeout_s: float) -> bool:
        """Wait until everything is sent. Return whether it was, within the time."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def delete_files(self) -> None:
        """Delete all links."""
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def problem(self) -> str:
        """What the server lacks for good, in one line, or ""."""
        missing = []
        if self._replaced:
            missing.append(f"checkpoints ({self._replaced}) that were replaced by newer ones before they were sent")
        if self._errors:
            missing.append(f"{len(self._errors)} of {self._count} artifacts; the last error: {self._errors[-1]}")
        return f"W&B lacks {' and '.join(missing)}" if missing else ""


def _delete(upload: _Upload) -> None:
    if upload.folder is not None:
        shutil.rmtree(upload.folder, ignore_errors=True)


def to_image(item: items.Image) -> wandb.Image:
    """Return the image; wandb copies its file when it is logged."""
    return wandb.Image(str(item.path), caption=item.caption or None)


def to_table(item: items.Table, max_rows: int) -> wandb.Table:
    """Return the first rows of a table, with their images."""
    rows = [[_cell(value) for value in row] for row in item.rows[:max_rows]]
    return wandb.Table(columns=list(item.columns), data=rows)


def _cell(value: Any) -> Any:
    if isinstance(value, items.Image):
        return to_image(value)
    return value.item() if isinstance(value, np.generic) else value


def to_table_artifact(item: items.Table, max_rows: int, run_id: str, rank: int) -> wandb.Artifact:
    """Return an artifact `<table>_<run>` with a copy of the table; `<table>_<run>_rank_<rank>` if it is not rank 0's.

    An artifact that shares the logged table would refer to another artifact, which the server may not have yet.
    """
    suffix = f"_rank_{rank}" if rank else ""
    artifact = wandb.Artifact(
        artifact_name(f"{item.name}_{run_id}{suffix}"), type=artifact_name(item.name), metadata={"step": item.step}
    )
    artifact.add(to_table(item, max_rows), artifact_name(item.name))
    return artifact


def artifact_name(text: str) -> str:
    """Return the text as a valid name of W&B, with "_" in place of other characters, at most 128 characters."""
    return _NOT_IN_NAMES.sub("_", text)[:128]
