"""Checkpoints as artifacts, without copies: a long run's would fill the disk."""

from __future__ import annotations

import shutil
from collections import deque
from pathlib import Path

import wandb

from ddptrain.tracking import items
from ddptrain.tracking.loans import link
from ddptrain.tracking.wandb_media import artifact_name
from ddptrain.wandbparts import CHECKPOINT_TYPE, checkpoint_folder


class Checkpoints:
    """Makes artifacts of checkpoints.

    On its way to the server a checkpoint keeps a second name in `sending`; there are as many as the run directory
    keeps. One that is recorded offline is looked for in the run directory (`run_dir`) when it is sent.
    """

    def __init__(self, sending: Path, run_dir: Path, run_id: str, keep: int) -> None:
        self._sending, self._run_dir, self._run_id = sending, run_dir, run_id
        self._keep = keep
        self._under_way: deque[Path] = deque()
        self.close()  # what a rank that was killed has left

    def artifact(self, item: items.Checkpoint, *, offline: bool) -> wandb.Artifact:
        """The checkpoint's files, as they lie in its folder. Raises OSError."""
        about = {"step": item.step, **item.metrics}
        name = artifact_name(f"checkpoint_{self._run_id}")
        artifact = wandb.Artifact(name, type=CHECKPOINT_TYPE, metadata=about)
        folder = item.folder if offline else self._sent_from(item)
        for path in sorted(folder.iterdir()):
            entry = artifact.add_file(str(path), name=path.name, policy="immutable", skip_cache=True)
            if offline:
                entry.local_path = str(checkpoint_folder(self._run_dir, item.step) / path.name)
        return artifact

    def _sent_from(self, item: items.Checkpoint) -> Path:
        folder = checkpoint_folder(self._sending, item.step)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for path in item.folder.iterdir():
            link(path, folder / path.name)
        self._under_way.append(folder)
        while len(self._under_way) > self._keep:
            shutil.rmtree(self._under_way.popleft(), ignore_errors=True)
        return folder

    def close(self) -> None:
        """Nothing is under way any more."""
        shutil.rmtree(self._sending, ignore_errors=True)
