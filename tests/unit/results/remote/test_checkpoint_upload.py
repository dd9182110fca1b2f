"""Which checkpoint is uploaded, pointed at and deleted next; the store is in memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddptrain.results.layout import RunLayout
from ddptrain.results.remote.checkpoint_upload import StoredCheckpoints, parse_stored, stored_name, without_stored_as
from ddptrain.storage.store import StoreError
from tests.unit.results.stores import watched_store


def manifest_of(step: int, files: list[dict[str, Any]]) -> dict[str, Any]:
    return {"step": step, "epoch": None, "metrics": {}, "world_size": 1, "files": files}


class Bench:
    """A working folder with checkpoints, and the store that follows it."""

    def __init__(self, folder: Path) -> None:
        self.layout = RunLayout(folder)
        self.layout.checkpoints_dir.mkdir(parents=True)
        self.store, self.fs = watched_store()
        self.sent = 0
        self.synced = StoredCheckpoints(self.store, self.layout)

    def save(self, step: int, **files: str) -> None:
        folder = self.layout.checkpoints_dir / f"step-{step}"
        folder.mkdir(exist_ok=True)
        listed = []
        for name, text in files.items():
            (folder / name).write_text(text)
            digest = hashlib.sha256(text.encode()).hexdigest()
            listed.append({"name": name, "size_bytes": len(text), "sha256": digest})
        (folder / "checkpoint.json").write_text(json.dumps(manifest_of(step, listed)))

    def point(self, **steps: int | None) -> None:
        for name, step in steps.items():
            path = self.layout.checkpoints_dir / name
            path.unlink(missing_ok=True) if step is None else path.write_text(f"step-{step}\n")

    def drop(self, step: int) -> None:
        folder = self.layout.checkpoints_dir / f"step-{step}"
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()

    def sync(self, times: int = 1) -> list[str]:
        """What the store is written by the next calls; `-` is a deletion."""
        self.fs.writes.clear()
        for _ in range(times):
            self.synced.sync(self._begins)
        return [write.replace("checkpoints/", "", 1) for write in self.fs.writes]

    def _begins(self) -> None:
        self.sent += 1

    def is_synced(self) -> bool:
        return self.synced.is_synced

    def text(self, path: str) -> str:
        return (self.store.read(f"checkpoints/{path}") or b"").decode()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "run")


def test_newest_checkpoint_is_first_and_its_manifest_last(bench: Bench) -> None:
    for step in (9, 10):
        bench.save(step, a="x", b="yy")
    bench.point(latest=10, best=9)
    assert not bench.is_synced()
    assert bench.sync() == ["step-10/a", "step-10/b", "step-10/checkpoint.json", "latest"]
    assert not bench.is_synced()
    assert bench.sync() == ["step-9/a", "step-9/b", "step-9/checkpoint.json", "best"] and bench.is_synced()
    assert bench.sync() == [] and bench.sent == 2
    assert bench.text("latest") == "step-10\n" and json.loads(bench.text("step-9/checkpoint.json"))["step"] == 9


def test_best_checkpoint_has_every_second_turn(bench: Bench) -> None:
    for step in (1, 2, 3, 4):
        bench.save(step, a="x")
    bench.point(best=1)
    assert [bench.sync()[0].partition("/")[0] for _ in range(4)] == ["step-4", "step-1", "step-3", "step-2"]


def test_what_a_store_has_already_is_not_sent_again(bench: Bench, tmp_path: Path) -> None:
    bench.save(1, a="x")
    bench.point(latest=1)
    bench.sync()
    bench.synced = StoredCheckpoints(bench.store, bench.layout)
    assert bench.sync() == ["latest", "-best"] and bench.sent == 1 and bench.is_synced()


def test_checkpoint_in_the_store_that_lacks_a_file_is_sent_again(bench: Bench) -> None:
    bench.save(1, a="x", b="y")
    bench.sync()
    bench.store.remove("checkpoints/step-1/b")
    bench.synced = StoredCheckpoints(bench.store, bench.layout)
    assert bench.sync()[:3] == ["step-1/a", "step-1/b", "step-1/checkpoint.json"]
    assert bench.text("step-1/b") == "y" and bench.sent == 2


def test_object_that_a_manifest_names_is_never_overwritten(bench: Bench) -> None:
    bench.save(1, a="x", b="same")
    bench.sync()
    bench.save(1, a="new", b="same")
    special = f"a.{hashlib.sha256(b'new').hexdigest()[:8]}"
    assert bench.sync() == [f"step-1/{special}", "step-1/checkpoint.json", "-step-1/a"]
    stored = json.loads(bench.text("step-1/checkpoint.json"))
    assert stored["stored_as"] == {"a": special} and bench.text(f"step-1/{special}") == "new"
    assert stored_name(stored, "a") == special and stored_name(stored, "b") == "b"
    assert "stored_as" not in without_stored_as(stored) and bench.is_synced()
    bench.save(1, a="x", b="same")  # back again: the plain name is free
    assert bench.sync() == ["step-1/a", "step-1/checkpoint.json", f"-step-1/{special}"]
    assert "stored_as" not in json.loads(bench.text("step-1/checkpoint.json"))


def test_deleted_checkpoint_goes_manifest_first_once_another_is_there(bench: Bench) -> None:
    for step in (1, 2):
        bench.save(step, a="x")
    bench.point(latest=2, best=1)
    bench.sync(2)
    bench.drop(1)
    assert bench.sync() == [], "best still points at it"
    bench.point(best=2)
    assert bench.sync() == ["best", "-step-1/checkpoint.json", "-step-1/a"]
    assert not any("step-1" in path for path in bench.store.files("checkpoints"))


def test_last_checkpoint_of_a_store_stays_until_there_is_another(bench: Bench) -> None:
    bench.save(1, a="x")
    bench.sync()
    bench.drop(1)
    bench.save(2, a="x")
    bench.fs.fails = lambda path: StoreError("no") if "step-2" in path else None
    with pytest.raises(StoreError):
        bench.sync()
    assert bench.text("step-1/a") == "x"
    bench.fs.fails = lambda path: None
    assert "-step-1/checkpoint.json" in bench.sync()


def test_pointer_waits_for_its_checkpoint_and_is_deleted_with_the_local_one(bench: Bench) -> None:
    for step in (1, 2):
        bench.save(step, a="x")
    bench.point(latest=2, best=1)
    assert "best" not in bench.sync() and not bench.is_synced()
    bench.sync()
    bench.point(best=None)
    assert bench.sync() == ["-best"] and bench.sync() == [] and bench.is_synced()


def test_object_of_another_size_is_an_error_and_no_checkpoint(bench: Bench) -> None:
    bench.save(1, a="four")
    (bench.layout.checkpoints_dir / "step-1/a").write_text("five5")
    with pytest.raises(StoreError, match=r"checkpoints/step-1/a has 5 bytes, not 4 after it was written$"):
        bench.sync()
    assert bench.text("step-1/checkpoint.json") == ""


def test_checkpoint_that_is_deleted_before_its_upload_is_passed_over(bench: Bench) -> None:
    bench.save(1, a="x")
    bench.synced.sync(lambda: bench.drop(1))
    assert bench.store.files("checkpoints") == {} and not (bench.layout.root / ".outgoing/step-1").exists()


@pytest.mark.parametrize(
    ("change", "valid"),
    [
        (lambda manifest: None, True),
        (lambda manifest: manifest.update(stored_as={"a": "a.1"}), True),
        (lambda manifest: manifest.update(stored_as={"a": "../a"}), False),
        (lambda manifest: manifest.update(stored_as=["a"]), False),
        (lambda manifest: manifest.pop("files"), False),
    ],
)
def test_manifest_of_a_store_is_checked(change: Callable[[dict[str, Any]], None], valid: bool) -> None:
    manifest = manifest_of(1, [{"name": "a", "size_bytes": 1, "sha256": "0" * 64}])
    change(manifest)
    assert (parse_stored(json.dumps(manifest).encode()) == manifest) is valid


def test_files_without_a_manifest_are_deleted_with_their_checkpoint(bench: Bench) -> None:
    bench.store.write("checkpoints/step-5/half", b"x")
    bench.store.write("checkpoints/odd/file", b"x")
    bench.save(9, a="x")
    assert "-step-5/half" in bench.sync()
    assert {path.split("/")[1] for path in bench.store.files("checkpoints")} == {"step-9", "odd"}


def test_checkpoint_that_has_changed_since_is_sent_again_under_other_names(bench: Bench) -> None:
    bench.save(1, a="x")
    bench.sync()
    bench.save(1, a="x", b="more")
    assert not bench.is_synced()
    assert bench.sync() == ["step-1/b", "step-1/checkpoint.json"] and bench.is_synced()
    bench.save(1, b="more")
    assert bench.sync() == ["step-1/checkpoint.json", "-step-1/a"]
    assert json.loads(bench.text("step-1/checkpoint.json"))["files"][0]["name"] == "b"


def test_folder_without_a_manifest_is_no_checkpoint(bench: Bench) -> None:
    (bench.layout.checkpoints_dir / "step-3").mkdir()
    bench.save(1, a="x")
    bench.point(latest=1, best=1)
    assert bench.sync() == ["step-1/a", "step-1/checkpoint.json", "latest", "best"] and bench.is_synced()
