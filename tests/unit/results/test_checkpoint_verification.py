"""A checkpoint to go on from is what its manifest says, or it is passed over."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ddptrain.results.checkpoint_verification import newest_verified, read_manifest, verify
from ddptrain.results.checkpoints import CheckpointPolicy
from ddptrain.results.errors import CheckpointDamaged
from ddptrain.results.writer import RunWriter
from tests.unit.results.conftest import Stage


@pytest.fixture
def saved(writer: RunWriter, stage: Stage) -> Callable[[int], Path]:
    def save(step: int) -> Path:
        event, source = stage(step, {"val/loss": 1.0 / (step + 1)})
        return writer.adopt_checkpoint(0, event, source, CheckpointPolicy(keep=9))

    return save


def test_checkpoint_is_verified_with_what_its_manifest_says(saved: Callable[[int], Path]) -> None:
    folder = saved(5)
    found = verify(folder)
    assert (found.step, found.folder) == (5, folder)
    assert {"checkpoint.json"} < set(found.files) and found == read_manifest(folder)


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
    manifest = json.loads((folder / "checkpoint.json").read_text())
    manifest["files"][0]["name"] = "../../../etc/passwd"
    (folder / "checkpoint.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "damage",
    [
        change_byte,
        cut_short,
        remove_file,
        lead_elsewhere,
        lambda folder: (folder / "checkpoint.json").write_text("{"),
        lambda folder: (folder / "checkpoint.json").write_text("[]"),
        lambda folder: (folder / "checkpoint.json").write_text('{"files": []}'),
        lambda folder: (folder / "checkpoint.json").unlink(),
    ],
)
def test_damaged_newest_one_gives_way_to_the_one_before(
    writer: RunWriter, saved: Callable[[int], Path], damage: Callable[[Path], object]
) -> None:
    saved(1)
    damage(saved(2))
    told: list[str] = []
    found = newest_verified(writer.layout, told.append)
    assert found is not None and found.step == 1
    assert len(told) == 1 and told[0].startswith("checkpoint step-2 is passed over: ")
    with pytest.raises(CheckpointDamaged):
        verify(writer.layout.checkpoints_dir / "step-2")


def test_run_without_checkpoints_has_none_to_go_on_from(writer: RunWriter) -> None:
    assert newest_verified(writer.layout, pytest.fail) is None


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
