"""Checkpoints as artifacts, without copies: a long run's would fill the disk."""

from __future__ import annotations

import shutil
from pathlib import Path

import wandb

from ddptrain.protocol.wandb_parts import CHECKPOINT_TYPE, checkpoint_folder
from ddptrain.tracking import items
from ddptrain.tracking.temp_files import link_or_copy
from ddptrain.tracking.wandb.media import artifact_name
from ddptrain.tracking.wandb.uploads import Uploads


class Checkpoints:
    """Makes artifacts of checkpoints.

    On its way to the server a checkpoint keeps a second name in `sending`. There are as many as the run directory
    keeps, and the one whose turn it is: a server that is always behind gets some of them, too. One that is recorded
    offline is looked for in the run directory (`run_dir`) when it is sent.
    """

    def __init__(self, sending: Path, run_dir: Path, run_id: str, keep: int, uploads: Uploads) -> None:
        self._sending, self._run_dir, self._run_id = sending, run_dir, run_id
        self._keep = keep
        self._uploads = uploads
        self._under_way: list[tuple[wandb.Artifact, Path]] = []
        self.close()  # what a rank that was killed has left

    def artifact(self, item: items.Checkpoint, *, offline: bool) -> wandb.Artifact:
        """The checkpoint's files, as they lie in its folder. Raises OSError."""
        about = {"step": item.step, **item.metrics}
        name = artifact_name(f"checkpoint_{self._run_id}")
        artifact = wandb.Artifact(name, type=CHECKPOINT_TYPE, metadata=about)
        folder = item.folder if offline else self._sent_from(item, artifact)
        for path in sorted(folder.iterdir()):
            entry = artifact.add_file(str(path), name=path.name, policy="immutable", skip_cache=True)
            if offline:
                entry.local_path = str(checkpoint_folder(self._run_dir, item.step) / path.name)
        return artifact

    def _sent_from(self, item: items.Checkpoint, artifact: wandb.Artifact) -> Path:
        self._make_room()
        folder = checkpoint_folder(self._sending, item.step)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for path in item.folder.iterdir():
            link_or_copy(path, folder / path.name)
        self._under_way.append((artifact, folder))
        return folder

    def _make_room(self) -> None:
        """For one more; what is on its way stays behind the first, whose turn it is."""
        under_way = []
        for artifact, folder in self._under_way:
            if self._uploads.of(artifact) is not None:
                under_way.append((artifact, folder))
            else:
                shutil.rmtree(folder, ignore_errors=True)
        while len(under_way) > self._keep:
            artifact, folder = under_way.pop(1 if self._keep else 0)
            if upload := self._uploads.of(artifact):
                upload.replaced = True
            shutil.rmtree(folder, ignore_errors=True)
        self._under_way = under_way

    def close(self) -> None:
        """Nothing is under way any more."""
        shutil.rmtree(self._sending, ignore_errors=True)
