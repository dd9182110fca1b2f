"""Runs of the image workload as training leaves them, without the training; and manifests."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from ddptrain.protocol.events import CheckpointSaved
from ddptrain.rank.checkpoint.files import write, write_state
from ddptrain.rank.checkpoint.snapshot import HostBuffers
from ddptrain.results.checkpoints.run_checkpoints import CheckpointPolicy, RunCheckpoints
from ddptrain.results.run_record import RunRecord, RunStatus
from ddptrain.storage.store import Listed
from ddptrain.workloads.images.manifest import TRAIN, VAL, Manifest
from ddptrain.workloads.images.model import build, describe
from tests.unit.workloads.pictures import COLOURS, picture

__all__ = ["COLOURS", "SIZE", "description", "make_manifest", "make_run", "model_of_colours", "picture"]

SIZE = 16


def description(**changes: Any) -> dict[str, Any]:
    """A small network that tells COLOURS apart."""
    return describe("small_cnn", SIZE, list(COLOURS), mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25)) | changes


def model_of_colours(model_config: dict[str, Any]) -> torch.nn.Module:
    """Trained for a moment, on plain colours."""
    torch.manual_seed(0)
    model = build(model_config)
    colours = torch.tensor([*COLOURS.values()]).view(3, 3, 1, 1).expand(-1, -1, SIZE, SIZE) / 255
    images, labels = ((colours - 0.5) / 0.25), torch.tensor(model_config["outputs"])
    for _ in range(60):  # by hand: the first optimizer of a process takes a second
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(images + 0.1 * torch.randn_like(images)), labels).backward()
        with torch.no_grad():
            for weight in model.parameters():
                assert weight.grad is not None
                weight.sub_(0.2 * weight.grad)
    return model


def make_run(folder: Path, model_config: Any, *saved: tuple[int, float, torch.nn.Module]) -> Path:
    """A run with a checkpoint for each (step, val/loss, model); the one with the lowest loss is the best."""
    record = RunRecord(
        run_id=folder.name,
        name="colours",
        workload="images",
        status=RunStatus.SUCCEEDED,
        checkpoints=tuple(f"step-{step}" for step, _, _ in reversed(saved)),
    )
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(record.to_json())
    shelf = RunCheckpoints(folder / "checkpoints")
    for step, loss, model in saved:
        metrics = {"val/loss": loss}
        state = {"step": step, "epoch": 1.0, "metrics": metrics, "extra": {"model_config": model_config}}
        staged = folder / f"staged-{step}"
        snapshot = HostBuffers().take(model, None, state)
        files = (*write(staged, snapshot), *write_state(staged, snapshot.state))
        event = CheckpointSaved(time_ns=0, step=step, staging=staged.name, files=files, epoch=1.0, metrics=metrics)
        shelf.adopt(event, staged, CheckpointPolicy(), world_size=2, versions={})
    return folder


def make_manifest(url: str, classes: Sequence[str], keys: Sequence[str], val: Collection[int] = ()) -> Manifest:
    """A manifest of images whose folders are their classes; the indices `val` are those to validate with."""
    images = [
        (Listed(key, -1, ""), classes.index(key.partition("/")[0]), VAL if index in val else TRAIN)
        for index, key in enumerate(keys)
    ]
    return Manifest.of(url, classes, images, {})
