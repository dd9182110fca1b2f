"""Checkpoints and tables as artifacts of an online run: they are sent one after the other, in a thread."""

from __future__ import annotations

import shutil
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import wandb

from ddptrain.tracking import items
from ddptrain.tracking.items import link_or_copy
from ddptrain.tracking.wandb.media import artifact_name
from ddptrain.tracking.wandb.wandb_folders import CHECKPOINT_TYPE
from ddptrain.tracking.wandb.wandb_run import reason_of


def checkpoint_artifact(run_id: str, step: int, metrics: dict[str, float], files: Sequence[Path]) -> wandb.Artifact:
    """Return the artifact of a checkpoint. The files are not copied: they must exist until they are sent."""
    name = artifact_name(f"checkpoint_{run_id}")
    artifact = wandb.Artifact(name, type=CHECKPOINT_TYPE, metadata={"step": step, **metrics})
    for path in files:
        artifact.add_file(str(path), name=path.name, policy="immutable", skip_cache=True)
    return artifact


def checkpoint_aliases(step: int) -> list[str]:
    """Return the aliases of the artifact of a checkpoint."""
    return ["latest", f"step-{step}"]


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
        artifact = checkpoint_artifact(self._run_id, item.step, dict(item.metrics), sorted(folder.iterdir()))
        self._add(_Upload(artifact, checkpoint_aliases(item.step), folder))

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
