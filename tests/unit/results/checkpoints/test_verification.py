"""A checkpoint to go on from is what its manifest says, or it is passed over."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ddptrain.results.checkpoints.run_checkpoints import CheckpointPolicy
from ddptrain.results.checkpoints.verification import (
    newest_verified,
    parse_manifest,
    read_manifest,
    verify,
)
from ddptrain.results.errors import CheckpointDamaged
from ddptrain.results.run_writer import RunWriter
from tests.unit.results.conftest import Stage


@pytest.fixture
def saved(writer: RunWriter, stage: Stage) -> Callable[[int], Path]:
    def save(step: int) -> Path:
        event, source = stage(step, {"val/loss": 1.0 / (step + 1)})
        return writer.adopt_checkpoint(0, event, source, CheckpointPolicy(keep=9))

    return save


def change_byte(folder: Path) -> None:
    file = next(path for path in sorted(folder.iterdir()) if path.name != "checkpoint.json")
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(data)


def cut_short(folder: Path) -> None:
    file = next(path for path in sorted(folder.iterdir()) if path.name != "checkpoint.json")
    file.write_bytes(file.read_bytes()[:-1])


def remove_file(folder: Path) -> None:
    next(path for path in sorted(folder.iterdir()) if path.name != "checkpoint.json").unlink()


def lead_elsewhere(folder: Path) -> None:
    """List a file beside the folder, which exists and has the size and hash of its entry."""
    data = b"not of this checkpoint"
    (folder.parent / "x").write_bytes(data)
    manifest = json.loads((folder / "checkpoint.json").read_text())
    manifest["files"][0] = {"name": "../x", "size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "checkpoint.json").write_text(json.dumps(manifest))


def link_to(target: str) -> Callable[[Path], object]:
    """Put a symbolic link, or with "" a FIFO, in the place of a file of a checkpoint; its manifest gives the size."""

    def replace(folder: Path) -> None:
        manifest = json.loads((folder / "checkpoint.json").read_text())
        file = folder / "model.safetensors"
        if target == "same":
            file.rename(folder.parent / "moved")
            file.symlink_to(folder.parent / "moved")
        else:
            file.unlink()
            file.symlink_to(target) if target else os.mkfifo(file)
        manifest["files"][0]["size_bytes"] = file.lstat().st_size
        (folder / "checkpoint.json").write_text(json.dumps(manifest))

    return replace


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (link_to(""), "cannot read .*model.safetensors: it is not a regular file"),
        (link_to("/dev/zero"), "cannot read .*model.safetensors: Too many levels of symbolic links"),
        (link_to("same"), "cannot read .*model.safetensors: Too many levels of symbolic links"),
        (change_byte, "the SHA-256 of model.safetensors is not the one"),
        (cut_short, "model.safetensors has 999 bytes, not 1000"),
        (remove_file, "cannot read .*model.safetensors: No such file"),
        (lead_elsewhere, "is damaged: it is not JSON, lists no files, or a field is missing or of another type"),
        (lambda folder: (folder / "checkpoint.json").write_text("{"), "is not JSON"),
        (lambda folder: (folder / "checkpoint.json").write_text("[]"), "is not JSON"),
        (lambda folder: (folder / "checkpoint.json").write_text('{"files": []}'), "lists no files"),
        (lambda folder: (folder / "checkpoint.json").unlink(), "cannot read .*checkpoint.json: No such file"),
    ],
)
def test_damaged_newest_one_gives_way_to_the_one_before(
    writer: RunWriter, saved: Callable[[int], Path], damage: Callable[[Path], object], why: str
) -> None:
    saved(1)
    damage(saved(2))
    told: list[str] = []
    found = newest_verified(writer.layout, told.append)
    assert found is not None and found.step == 1
    assert len(told) == 1 and told[0].startswith("checkpoint step-2 is skipped: ")
    with pytest.raises(CheckpointDamaged, match=why):
        verify(writer.layout.checkpoints_dir / "step-2")


@pytest.mark.parametrize(
    "changes",
    [
        {"step": -1},
        {"epoch": "1"},
        {"files": []},
        {"files": [{"name": "a", "size_bytes": -1, "sha256": ""}]},
        {"files": [{"name": "a", "size_bytes": 1, "sha256": None}]},
    ],
)
def test_manifest_with_a_field_of_another_type_is_none(changes: dict[str, object]) -> None:
    entry = {"name": "a.bin", "size_bytes": 1, "sha256": "0" * 64}
    manifest: dict[str, object] = {"step": 1, "epoch": 0.5, "world_size": 1, "metrics": {}, "files": [entry]}
    assert parse_manifest(json.dumps({**manifest, **changes}).encode()) is None


def test_reopened_run_counts_its_checkpoints_up_to_the_one_it_goes_on_from(
    writer: RunWriter, saved: Callable[[int], Path]
) -> None:
    for step in (1, 2, 3):
        saved(step)
    policy = CheckpointPolicy(keep=9)
    writer.close()
    with RunWriter.reopen(writer.layout.root, "workload: toy\n") as again:
        again.go_on_from(read_manifest(writer.layout.checkpoints_dir / "step-2"), policy)
        assert again.record.checkpoints == ("step-2", "step-1")
        assert again.record.best is not None and again.record.best.step == 2
        assert (again.layout.checkpoints_dir / "latest").read_text() == "step-2\n"
        assert (again.layout.checkpoints_dir / "step-3").exists()  # until one of its step takes its place
        again.finish(again.record.status, 0)  # type: ignore[arg-type]
