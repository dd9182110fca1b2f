from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ddptrain.errors import DdptrainError, RunLocked, RunNotFound
from ddptrain.protocol.events import CheckpointSaved
from ddptrain.results.checkpoints.run_checkpoints import CheckpointPolicy
from ddptrain.results.checkpoints.verification import newest_verified, verify
from ddptrain.results.errors import CheckpointDamaged
from ddptrain.results.remote.checkpoints import download_model, download_newest
from ddptrain.results.remote.uploader import Pace, Uploader
from ddptrain.results.run import Run
from ddptrain.results.run_record import RunStatus
from ddptrain.results.run_writer import RunWriter
from ddptrain.storage.object_store import ObjectStore
from ddptrain.storage.store import StoreError
from tests.support.command import wait_until
from tests.unit.results.stores import watched_store

Stage = Callable[..., tuple[CheckpointSaved, Path]]
POLICY = CheckpointPolicy(keep=1, metric="val/loss")


QUICK = Pace(every_pass=0.02, pauses=(0.02,), last_flush=60.0, close=60.0)


class Kept:
    """A run under way, its store, and what its uploads have said."""

    def __init__(self, writer: RunWriter, stage: Stage, pace: Pace = QUICK) -> None:
        self.writer, self.stage = writer, stage
        self.store, self.fs = watched_store()
        self.uploads = Uploader(self.store, writer.layout.root, "token", max_failures=2, pace=pace)
        writer.upload = self.uploads
        self.warnings: list[str] = []
        self.losses: list[DdptrainError] = []

    def begin(self) -> None:
        self.uploads.begin(self.warnings.append, self.losses.append)

    def save(self, step: int, loss: float | None = None, content: bytes = b"w" * 1000) -> Path:
        metrics = {} if loss is None else {"val/loss": loss}
        event, folder = self.stage(step, metrics, {"model.safetensors": content, "state.pt": b""})
        return self.writer.adopt_checkpoint(0, event, folder, POLICY)

    def there(self) -> set[str]:
        return set(self.store.files())

    def order(self) -> list[str]:
        return self.fs.writes


@pytest.fixture
def kept(writer: RunWriter, stage: Stage) -> Iterator[Kept]:
    made = Kept(writer, stage)
    yield made
    if writer.layout.root.exists():
        writer.finish(RunStatus.SUCCEEDED, 0)
    made.uploads.close(0.1)


def test_checkpoint_is_there_when_its_manifest_is_and_the_record_comes_last(kept: Kept) -> None:
    kept.save(1, 1.0)
    kept.writer.layout.log(0).write_text("hello\n")
    (kept.writer.layout.artifacts_dir / ".odd").write_text("kept, too")
    kept.begin()
    assert kept.uploads.flush(60) == ""
    kept.writer.finish(RunStatus.SUCCEEDED, 0)
    assert kept.uploads.flush(60) == ""
    order = kept.order()
    step = [path for path in order if "step-1" in path]
    assert step[-1] == "checkpoints/step-1/checkpoint.json" and len(step) == 3
    assert order.index("checkpoints/latest") > order.index(step[-1]) and order[-1] == "run.json"
    expected = {"run.json", "config.yaml", "events.jsonl", "metrics.jsonl", "logs/rank-0.log", "artifacts/.odd"}
    assert kept.there() == {*expected, *step, "checkpoints/latest", "checkpoints/best"}


def test_what_w_and_b_keeps_for_itself_alone_is_not_uploaded(kept: Kept) -> None:
    for name in ("run-1/run-1.wandb", "cache/obj/1", "sending-rank-0/checkpoints/step-1/model.safetensors"):
        path = kept.writer.layout.tracking_dir / "wandb" / name
        path.parent.mkdir(parents=True)
        path.write_bytes(b"1")
    kept.begin()
    assert kept.uploads.flush(60) == ""
    assert {path for path in kept.there() if path.startswith("tracking/")} == {"tracking/wandb/run-1/run-1.wandb"}


def test_end_in_the_store_is_the_end_on_the_disk_and_the_working_folder_goes(kept: Kept) -> None:
    kept.begin()
    kept.save(1)
    kept.writer.finish(RunStatus.SUCCEEDED, 0)
    assert kept.uploads.flush(60) == ""
    assert json.loads(kept.store.read("run.json") or b"")["status"] == "succeeded"
    kept.uploads.close(60)
    assert not kept.writer.layout.root.exists() and not kept.warnings


def test_old_checkpoint_goes_after_the_new_one_is_there_and_never_the_last(kept: Kept) -> None:
    kept.save(1)
    kept.begin()
    kept.uploads.flush(60)
    kept.fs.fails = lambda path: OSError("away") if "step-2/checkpoint.json" in path else None
    kept.save(2)
    wait_until(lambda: kept.losses)
    assert {path for path in kept.there() if path.endswith("checkpoint.json")} == {"checkpoints/step-1/checkpoint.json"}
    assert kept.store.read("checkpoints/latest") == b"step-1\n"
    kept.fs.fails = lambda path: None
    assert kept.uploads.flush(60) == ""
    assert {path for path in kept.there() if "step-" in path} == {
        f"checkpoints/step-2/{name}" for name in ("checkpoint.json", "model.safetensors", "state.pt")
    }
    assert kept.store.read("checkpoints/latest") == b"step-2\n"


def test_step_saved_again_never_damages_the_one_that_is_there(kept: Kept, tmp_path: Path) -> None:
    kept.save(1, content=b"old")
    kept.begin()
    kept.uploads.flush(60)
    kept.fs.fails = lambda path: OSError("away") if path.endswith("checkpoint.json") else None
    kept.save(1, content=b"new")
    wait_until(lambda: kept.losses)
    assert (download(kept.store, tmp_path / "other") / "model.safetensors").read_bytes() == b"old"
    kept.fs.fails = lambda path: None
    assert kept.uploads.flush(60) == ""
    assert (download(kept.store, tmp_path / "another") / "model.safetensors").read_bytes() == b"new"
    assert {path.split("/")[1] for path in kept.there() if path.endswith("tensors")} == {"step-1.2"}


def test_checkpoint_that_is_dropped_while_it_is_uploaded_comes_whole(kept: Kept) -> None:
    dropped = kept.save(1)

    def drop(path: str) -> None:
        if path.endswith("step-1/model.safetensors"):
            shutil.rmtree(dropped, ignore_errors=True)

    kept.fs.fails = drop
    kept.begin()
    wait_until(lambda: kept.store.read("checkpoints/step-1/checkpoint.json"))
    kept.uploads.flush(0.2)
    assert "checkpoints/step-1/state.pt" in kept.there()  # nothing newer is there: it stays


def test_failure_is_a_warning_and_the_last_one_that_is_allowed_ends_the_run(kept: Kept) -> None:
    kept.begin()
    kept.uploads.flush(60)
    kept.fs.fails = lambda path: OSError("the store is away")
    kept.save(1)
    wait_until(lambda: kept.losses)
    wait_until(lambda: len(kept.warnings) == 2)
    assert "the store is away (failure 1 of 2; again in 0.02 s)" in kept.warnings[0]
    (loss,) = kept.losses
    assert isinstance(loss, StoreError) and loss.exit_code == 4
    assert f"no more attempts after 2 failures; all files are kept in {kept.writer.layout.root}" in str(loss)
    problem = kept.uploads.flush(0.2)
    assert problem.startswith(f"the results are not all in {kept.store.url} (memory://")
    assert problem.endswith(f"they are kept in {kept.writer.layout.root}, and --resume a-run uploads them")
    kept.uploads.close(0.1)
    assert kept.writer.layout.run_json.exists()


def test_record_tells_the_end_even_where_other_files_are_missing(kept: Kept) -> None:
    kept.begin()
    kept.uploads.flush(60)
    kept.fs.fails = lambda path: OSError("too long a name") if "artifacts" in path else None
    (kept.writer.layout.artifacts_dir / "x").write_text("1")
    kept.uploads.put("artifacts/x")
    wait_until(lambda: kept.losses)
    assert "too long a name" in kept.uploads.flush(0.1)
    kept.writer.finish(RunStatus.FAILED, 4)
    kept.uploads.close(0.1)
    assert json.loads(kept.store.read("run.json") or b"")["status"] == "failed"


def test_run_that_another_driver_has_taken_is_not_written_any_more(kept: Kept) -> None:
    kept.begin()
    kept.uploads.flush(60)
    kept.uploads.lose(RunLocked("held by another"))
    count = len(kept.fs.writes)
    kept.writer.finish(RunStatus.FAILED, 6)
    assert "held by another" in kept.uploads.flush(1)
    kept.uploads.close(1)
    assert len(kept.fs.writes) == count and kept.writer.layout.root.exists()
    assert [type(error) for error in kept.losses] == [RunLocked]


def test_each_byte_of_a_log_is_sent_once_in_numbered_pieces(writer: RunWriter, stage: Stage, tmp_path: Path) -> None:
    kept = Kept(writer, stage, replace(QUICK, every_file=0.0))
    log, line = writer.layout.log(0), b"x" * 1023 + b"\n"
    kept.begin()
    for size in (300, 1, 399):
        with log.open("ab") as file:
            file.write(line * size)
        assert kept.uploads.flush(60) == ""
    files = kept.store.files("logs")
    assert sum(file.size_bytes for file in files.values()) == 700 * 1024
    assert set(files) >= {"logs/rank-0.log", "logs/rank-0.log.00001", "logs/rank-0.log.00002"}
    assert sorted(path for path in kept.order() if path.startswith("logs")) == sorted(files)  # none was written twice
    # Another driver continues: its working folder has the log, and the next line goes into a new part.
    again = tmp_path / "again" / "a-run"
    (again / "logs").mkdir(parents=True)
    (again / "logs/rank-0.log").write_bytes(line * 701)
    other = Uploader(kept.store, again, "token", pace=QUICK)
    other.begin(pytest.fail, lambda error: None)
    assert other.flush(60) == ""
    assert kept.store.files("logs")[f"logs/rank-0.log.{len(files):05d}"].size_bytes == 1024
    (again / "logs/rank-0.log").write_bytes(b"begun again\n")  # as a log that is rotated
    assert other.flush(60) == ""
    assert {path: file.size_bytes for path, file in kept.store.files("logs").items()} == {"logs/rank-0.log": 12}
    other.close(0.1)


def test_line_longer_than_a_piece_is_sent_before_the_folder_goes(kept: Kept) -> None:
    kept.begin()
    for size in (3 << 20, 9 << 20):
        kept.writer.event({"event": "notice", "level": "info", "message": "x" * size})
    assert kept.uploads.flush(60) == ""
    sent = [file for path, file in kept.store.files().items() if path.startswith("events.jsonl")]
    assert sum(file.size_bytes for file in sent) == kept.writer.layout.events_jsonl.stat().st_size


def test_step_of_an_earlier_version_that_was_saved_again_is_read(kept: Kept, tmp_path: Path) -> None:
    kept.save(1)
    upload(kept)
    path = "checkpoints/step-1/checkpoint.json"
    manifest = json.loads(kept.store.read(path) or b"") | {"stored_as": {"state.pt": "state.pt.0123abcd"}}
    kept.store.write(path, json.dumps(manifest).encode())
    kept.store.write("checkpoints/step-1/state.pt.0123abcd", b"")
    kept.store.remove("checkpoints/step-1/state.pt")
    assert download(kept.store, tmp_path / "other").name == "step-1"


def test_files_without_a_manifest_are_deleted_and_other_folders_stay(kept: Kept) -> None:
    kept.store.write("checkpoints/step-5/half", b"x")
    kept.store.write("checkpoints/odd/file", b"x")
    kept.save(9)
    upload(kept)
    assert {path.split("/")[1] for path in kept.store.files("checkpoints") if path.count("/") == 2} == {"step-9", "odd"}


def test_checkpoint_does_not_wait_behind_a_log(kept: Kept) -> None:
    sending, held = threading.Event(), threading.Event()

    def hold(path: str) -> None:
        if path.startswith("logs"):
            sending.set()
            held.wait(60)

    kept.fs.fails = hold
    kept.writer.layout.log(0).write_text("a log of any size\n")
    kept.begin()
    assert sending.wait(60)
    kept.save(1)
    wait_until(lambda: kept.store.read("checkpoints/latest"))
    assert not kept.store.files("logs")
    held.set()
    assert kept.uploads.flush(60) == "" and kept.store.files("logs")


# --- what is brought to another machine ---


def download(store: ObjectStore, folder: Path, warn: Callable[[str], None] = pytest.fail) -> Path:
    """The newest checkpoint that matches its manifest, in a new working folder."""
    download_newest(store, store.files(), folder)
    newest = newest_verified(Run(folder), warn)
    assert newest is not None
    return newest.folder


def upload(kept: Kept) -> None:
    kept.begin()
    assert kept.uploads.flush(60) == ""


@pytest.mark.parametrize("damage", ["truncated", "changed", "missing", "manifest"])
def test_damaged_newest_checkpoint_gives_way_to_the_one_before(kept: Kept, tmp_path: Path, damage: str) -> None:
    kept.save(1, 1.0)  # stays, being the best
    kept.save(2, 2.0)
    upload(kept)
    path = "checkpoints/step-2/model.safetensors"
    if damage == "missing":
        kept.store.remove(path)
    elif damage == "manifest":
        kept.store.write("checkpoints/step-2/checkpoint.json", b"{")
    else:
        kept.store.write(path, b"w" * 999 if damage == "truncated" else b"x" * 1000)
    warnings: list[str] = []
    assert download(kept.store, tmp_path / "other", warnings.append).name == "step-1"
    assert damage == "manifest" or "checkpoint step-2 is skipped" in warnings[0]


def test_only_the_newest_checkpoint_comes_with_its_files_and_the_best_is_still_kept(
    kept: Kept, tmp_path: Path, stage: Stage
) -> None:
    kept.save(1, 1.0)
    kept.save(2, 2.0)
    kept.writer.layout.log(0).write_text("before\n")
    kept.writer.finish(RunStatus.CANCELLED, 130)
    upload(kept)
    kept.uploads.close(60)
    other = tmp_path / "other" / "a-run"
    assert download(kept.store, other).name == "step-2"
    assert sorted(path.name for path in (other / "checkpoints/step-1").iterdir()) == ["checkpoint.json"]
    kept.store.fetch("run.json", other / "run.json")
    with RunWriter.reopen(other, "x") as again:
        there = Kept.__new__(Kept)
        there.writer, there.stage, there.store, there.fs = again, stage, kept.store, kept.fs
        again.go_on_from(verify(other / "checkpoints/step-2"), POLICY)
        mirror = Uploader(kept.store, other, "token", pace=QUICK)
        mirror.begin(pytest.fail, lambda error: None)
        there.save(3, 3.0)
        again.finish(RunStatus.SUCCEEDED, 0)
        assert mirror.flush(60) == ""
        mirror.close(60)
    steps = {path.split("/")[1] for path in kept.there() if path.endswith("safetensors")}
    assert steps == {"step-1", "step-3"} and kept.store.read("checkpoints/best") == b"step-1\n"


def test_reader_gets_the_best_model_alone_and_a_damaged_one_is_an_error(kept: Kept, tmp_path: Path) -> None:
    kept.save(1, 1.0, b"best")
    kept.save(2, 2.0, b"newest")
    upload(kept)
    copy = tmp_path / "copy"
    for _ in range(2):
        download_model(kept.store, copy, kept.store.files())
        assert (copy / "checkpoints/best").read_text() == "step-1\n"
        assert [path.parent.name for path in copy.rglob("*.safetensors")] == ["step-1"]
    for which, step in (("step-2", "step-2"), ("latest", "step-2"), ("step-1", "step-1")):
        download_model(kept.store, copy, kept.store.files(), which)
        assert [path.parent.name for path in copy.rglob("*.safetensors")] == [step]
        assert Run(copy).checkpoint(which).name == step
    with pytest.raises(RunNotFound, match=r"has no checkpoint step-3 in memory://.*; it has step-1, step-2"):
        download_model(kept.store, copy, kept.store.files(), "step-3")
    kept.store.write("checkpoints/step-1/model.safetensors", b"worn")
    download_model(kept.store, copy, kept.store.files())  # it is here, whole
    with pytest.raises(CheckpointDamaged, match=r"SHA-256 of model\.safetensors"):
        download_model(kept.store, tmp_path / "another", kept.store.files())
    with pytest.raises(RunNotFound, match="has no checkpoint in memory://"):
        download_model(kept.store.below("none"), copy, {})
