from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ddptrain.protocol.events import CheckpointPart, CheckpointSaved
from ddptrain.results import staged_files
from ddptrain.results.checkpoints.run_checkpoints import CheckpointPolicy
from ddptrain.results.checkpoints.verification import newest_verified, read_manifest
from ddptrain.results.errors import CheckpointDamaged
from ddptrain.results.run import Run
from ddptrain.results.run_writer import RunWriter

Stage = Callable[..., tuple[CheckpointSaved, Path]]
POLICY = CheckpointPolicy(keep=2)


def names(writer: RunWriter) -> set[str]:
    return set(os.listdir(writer.layout.checkpoints_dir))


def pointer(writer: RunWriter, name: str) -> str:
    return (writer.layout.checkpoints_dir / name).read_text()


def save(writer: RunWriter, stage: Stage, step: int, loss: float | None, policy: CheckpointPolicy = POLICY) -> Path:
    event, folder = stage(step, {} if loss is None else {"val/loss": loss})
    return writer.adopt_checkpoint(0, event, folder, policy)


def test_a_checkpoint_comes_home_whole_with_its_manifest(writer: RunWriter, stage: Stage) -> None:
    event, folder = stage(10, {"val/loss": 1.5, "acc": math.nan})
    home = writer.adopt_checkpoint(0, event, folder, POLICY)
    assert home == writer.layout.checkpoints_dir / "step-10"
    assert (home / "model.safetensors").read_bytes() == b"w" * 1000
    manifest = json.loads((home / "checkpoint.json").read_text())
    assert (manifest["schema"], manifest["step"], manifest["epoch"]) == (1, 10, None)
    assert manifest["metrics"] == {"val/loss": 1.5, "acc": None}
    assert manifest["files"][1] == {
        "name": "state.pt",
        "size_bytes": 1,
        "sha256": hashlib.sha256(b"s").hexdigest(),
    }
    assert names(writer) == {"step-10", "latest", "best"}
    assert not folder.exists()
    assert writer.record.checkpoints == ("step-10",)


def test_the_newest_and_the_best_stay_and_older_ones_go(writer: RunWriter, stage: Stage) -> None:
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 2.5), (5, 1.5)):
        save(writer, stage, step, loss)
    assert names(writer) == {"step-2", "step-4", "step-5", "latest", "best"}
    assert (pointer(writer, "latest"), pointer(writer, "best")) == ("step-5\n", "step-2\n")
    assert writer.record.checkpoints == ("step-5", "step-4", "step-2")
    assert writer.record.best is not None and writer.record.best.value == 1.0


def test_a_step_saved_twice_is_replaced_and_judged_anew(writer: RunWriter, stage: Stage) -> None:
    save(writer, stage, 1, 2.0)
    save(writer, stage, 2, 1.0)
    event, folder = stage(2, {"val/loss": 5.0}, {"model.safetensors": b"other"})
    home = writer.adopt_checkpoint(0, event, folder, POLICY)
    assert sorted(os.listdir(home)) == ["checkpoint.json", "model.safetensors"]
    assert (home / "model.safetensors").read_bytes() == b"other"
    assert pointer(writer, "best") == "step-1\n"
    assert names(writer) == {"step-1", "step-2.2", "latest", "best"}
    assert writer.record.checkpoints == ("step-2.2", "step-1") and pointer(writer, "latest") == "step-2.2\n"
    assert Run(writer.layout.root).checkpoint("step-2") == home


def test_best_survives_a_save_without_metrics_and_a_resume(writer: RunWriter, stage: Stage) -> None:
    policy = CheckpointPolicy(keep=1)
    event, folder = stage(1, {"val/loss": 1.0, "acc": 0.5})
    writer.adopt_checkpoint(0, event, folder, policy)
    event, folder = stage(1, {"acc": 0.75})  # as a last checkpoint is saved: the same step, without the metric
    writer.adopt_checkpoint(0, event, folder, policy)
    assert read_manifest(writer.layout.checkpoints_dir / "step-1.2").metrics == {"val/loss": 1.0, "acc": 0.75}
    writer.close()
    with RunWriter.reopen(writer.layout.root, "name: petnames\n") as resumed:
        resumed.go_on_from(newest_verified(resumed.layout, pytest.fail), policy)
        save(resumed, stage, 2, 2.0, policy)
        assert pointer(resumed, "best") == "step-1.2\n"
        assert names(resumed) == {"step-1.2", "step-2", "latest", "best"}
        save(resumed, stage, 1, math.nan, policy)  # judged anew, and found to be no good
        assert pointer(resumed, "best") == "step-2\n"


def no_links(*_: object, **__: object) -> None:
    raise OSError(errno.EXDEV, "Invalid cross-device link")


def changed(event: CheckpointSaved, **fields: object) -> CheckpointSaved:
    first, *rest = event.files
    return dataclasses.replace(event, files=(dataclasses.replace(first, **fields), *rest))  # type: ignore[arg-type]


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"sha256": "0" * 64}, "SHA-256"),
        ({"size_bytes": 999}, "over 999 bytes"),
        ({"size_bytes": 1001}, "1000 bytes, not the 1001"),
        ({"name": "gone.bin"}, "No such file"),
    ],
)
def test_a_damaged_checkpoint_changes_nothing(
    writer: RunWriter,
    stage: Stage,
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, object],
    why: str,
    across: bool,
) -> None:
    save(writer, stage, 1, 1.0)
    before = writer.layout.run_json.read_bytes()
    event, folder = stage(2)
    if across:
        monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(CheckpointDamaged, match=why):
        writer.adopt_checkpoint(0, changed(event, **fields), folder, POLICY)
    assert names(writer) == {"step-1", "latest", "best"}
    assert pointer(writer, "latest") == "step-1\n"
    assert writer.layout.run_json.read_bytes() == before
    assert (folder / "model.safetensors").exists()


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/b", "", ".", "..", "checkpoint.json", "a\\b", "a\0b", "a\x1b"]
)
def test_a_file_name_that_leads_elsewhere_is_refused(writer: RunWriter, stage: Stage, name: str) -> None:
    event, folder = stage(1)
    with pytest.raises(CheckpointDamaged, match="not a plain file name"):
        writer.adopt_checkpoint(0, changed(event, name=name), folder, POLICY)
    assert names(writer) == set()


def test_a_listed_file_that_is_a_link_is_not_followed(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc/hostname")
    for name, why in (("link", "symbolic link"), ("pipe", "not a plain file")):
        if name == "pipe":
            os.mkfifo(tmp_path / name)
        with pytest.raises(CheckpointDamaged, match=why):
            staged_files.move_in([staged_files.StagedMove(tmp_path / name, tmp_path / "out", 1, "")], CheckpointDamaged)


def test_files_of_all_ranks_become_one_checkpoint(writer: RunWriter, stage: Stage) -> None:
    event, folder = stage(10, contents={"model.rank-0.safetensors": b"a", "state.pt": b"s"})
    other, there = stage(10, contents={"model.rank-1.safetensors": b"b"})
    whole = dataclasses.replace(event, parts=(CheckpointPart(1, other.staging, other.files),))
    home = writer.adopt_checkpoint(0, whole, folder, POLICY, [there])
    assert read_manifest(home).files == (
        "model.rank-0.safetensors",
        "state.pt",
        "model.rank-1.safetensors",
        "checkpoint.json",
    )
    assert (home / "model.rank-1.safetensors").read_bytes() == b"b"
    assert not folder.exists() and not there.exists()


@pytest.mark.parametrize("damage", ["missing", "changed", "named twice"])
def test_no_checkpoint_is_added_if_the_part_of_a_rank_is_damaged(writer: RunWriter, stage: Stage, damage: str) -> None:
    event, folder = stage(10, contents={"model.rank-0.safetensors": b"a", "state.pt": b"s"})
    name = "state.pt" if damage == "named twice" else "model.rank-1.safetensors"
    other, there = stage(10, contents={name: b"b"})
    if damage == "missing":
        (there / name).unlink()
    if damage == "changed":
        (there / name).write_bytes(b"c")
    whole = dataclasses.replace(event, parts=(CheckpointPart(1, other.staging, other.files),))
    with pytest.raises(CheckpointDamaged):
        writer.adopt_checkpoint(0, whole, folder, POLICY, [there])
    assert names(writer) == set()
    assert (folder / "state.pt").exists()
