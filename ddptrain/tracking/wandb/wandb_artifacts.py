"""Artifacts of a run: checkpoints without copies, and the state of each upload."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import wandb

from ddptrain.tracking import items
from ddptrain.tracking.temp_files import link_or_copy
from ddptrain.tracking.wandb import internals
from ddptrain.tracking.wandb.credentials import without_credentials
from ddptrain.tracking.wandb.media import artifact_name
from ddptrain.tracking.wandb.wandb_folders import CHECKPOINT_TYPE, checkpoint_folder


@dataclass(slots=True)
class Upload:
    """An artifact that wandb has accepted.

    `artifact` is None once the server has answered; `refused` is its error message. `replaced` means that the files
    were deleted in favour of newer ones before they were sent.
    """

    artifact: wandb.Artifact | None
    replaced: bool = False
    refused: str = ""

    @property
    def is_lost(self) -> bool:
        """Whether the server lacks the artifact for good."""
        return bool(self.refused) or (self.replaced and self.artifact is not None)


class Uploads:
    """The uploads of a run. wandb sends one after the other, in the background."""

    def __init__(self) -> None:
        self._uploads: list[Upload] = []

    def watch(self, artifact: wandb.Artifact, handle: Any) -> None:
        """Record what becomes of an artifact that wandb has accepted; see internals.skip_server_requests."""
        upload = Upload(artifact)
        self._uploads.append(upload)

        def answered(error: str) -> None:
            upload.refused = without_credentials(error)
            upload.artifact = None

        internals.when_answered(handle, answered)

    def pending(self, artifact: wandb.Artifact) -> Upload | None:
        """Return the upload of an artifact; None once the server has answered, or if wandb has not accepted it."""
        return next((upload for upload in self._uploads if upload.artifact is artifact), None)

    @property
    def problem(self) -> str:
        """What the server lacks, in one line, or ""."""
        lost = [upload for upload in self._uploads if upload.is_lost]
        missing = []
        if replaced := sum(upload.replaced for upload in lost):
            missing.append(f"checkpoints ({replaced}) that were replaced by newer ones before they were sent")
        if refused := [upload.refused for upload in lost if not upload.replaced]:
            missing.append(f"{len(refused)} of {len(self._uploads)} artifacts; the last error: {refused[-1]}")
        return f"W&B lacks {' and '.join(missing)}" if missing else ""


class CheckpointArtifacts:
    """Creates artifacts of checkpoints without copying the files: the copies of a long run would fill the disk.

    Online, a checkpoint that waits for its upload has hard links below `sending`. As many checkpoints wait as the run
    directory keeps, plus the one that is being sent; a slow server gets only some of all checkpoints. Offline, the
    artifact contains the paths of the files in the run directory (`run_dir`), for a later upload.
    """

    def __init__(self, sending: Path, run_dir: Path, run_id: str, keep: int, uploads: Uploads) -> None:
        self._sending, self._run_dir, self._run_id = sending, run_dir, run_id
        self._keep = keep
        self._uploads = uploads
        self._waiting: list[tuple[wandb.Artifact, Path]] = []
        self.close()  # deletes the links of a rank that was killed

    def create(self, item: items.Checkpoint, *, offline: bool) -> wandb.Artifact:
        """Create the artifact with the files of a checkpoint. Raises OSError."""
        name = artifact_name(f"checkpoint_{self._run_id}")
        artifact = wandb.Artifact(name, type=CHECKPOINT_TYPE, metadata={"step": item.step, **item.metrics})
        folder = item.folder if offline else self._keep_until_sent(item, artifact)
        for path in sorted(folder.iterdir()):
            entry = artifact.add_file(str(path), name=path.name, policy="immutable", skip_cache=True)
            if offline:
                entry.local_path = str(checkpoint_folder(self._run_dir, item.step) / path.name)
        return artifact

    def _keep_until_sent(self, item: items.Checkpoint, artifact: wandb.Artifact) -> Path:
        self._make_room()
        folder = checkpoint_folder(self._sending, item.step)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for path in item.folder.iterdir():
            link_or_copy(path, folder / path.name)
        self._waiting.append((artifact, folder))
        return folder

    def _make_room(self) -> None:
        """Delete the links of sent checkpoints, and of the oldest waiting ones, except the one that is being sent."""
        waiting = []
        for artifact, folder in self._waiting:
            if self._uploads.pending(artifact) is None:
                shutil.rmtree(folder, ignore_errors=True)
            else:
                waiting.append((artifact, folder))
        while len(waiting) > self._keep:
            artifact, folder = waiting.pop(1 if self._keep else 0)
            if upload := self._uploads.pending(artifact):
                upload.replaced = True
            shutil.rmtree(folder, ignore_errors=True)
        self._waiting = waiting

    def close(self) -> None:
        """Delete all links."""
        shutil.rmtree(self._sending, ignore_errors=True)
