"""`ddptrain results sync`: offline runs get to the server, once, in order, and whole."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from ddptrain.driver.tracking.wandb_sync import SyncResult, sync_run
from ddptrain.errors import UsageError
from ddptrain.results.lookup import load_run
from ddptrain.results.ownership import run_lock
from ddptrain.results.run_record import RunStatus
from ddptrain.results.run_writer import RunWriter
from ddptrain.tracking.wandb import transaction_log
from ddptrain.tracking.wandb.wandb_folders import CHECKPOINT_TYPE, OPEN, UNSENT, RunPart, parts_below, unsent_parts
from tests.conftest import Cli
from tests.integration.wandb_backend import Backend, wandb_backend

# Two attempts of one run, the first of which was killed, and in the end a table with its artifact.
_RANK = """
import os, signal, sys, time
from pathlib import Path
import PIL.Image
from wandb.proto.wandb_internal_pb2 import Record
from ddptrain.tracking.wandb.transaction_log import records
from ddptrain.tracking import items
from ddptrain.tracking.protocol import Facts
from ddptrain.tracking.wandb.tracker import WandbTracker


def rows_on_disk():
    (log,) = folder.rglob(f"*_{rank}/run-*.wandb" if mode == "shared" else "run-*.wandb")
    return [Record.FromString(each).WhichOneof("record_type") for each in records(log)].count("history")


folder, attempt = Path(sys.argv[1]), int(sys.argv[2])
tracker = WandbTracker({"log_every": 1})
mode, rank = (sys.argv[3], int(sys.argv[4])) if len(sys.argv) > 3 else ("rank0", 0)
online = len(sys.argv) > 3
told = {"mode": mode, "online": online, "id": "w1"}
tracker.start(Facts("a-run", "petnames", attempt, rank, 1, 0, 0, 1, folder, from_driver=told))
first = 0 if attempt == 1 else 3
for step in range(first, first + 5):
    tracker.log(items.Numbers(time.time_ns(), {"loss": 1.0 / (step + 1)}, step))
if attempt == 1:
    while rows_on_disk() < 5:
        time.sleep(0.05)
    if online:
        print("logged", flush=True)
        time.sleep(60)  # it is killed from outside, with all that it has started
    os.kill(os.getpid(), signal.SIGKILL)
PIL.Image.new("RGB", (4, 4)).save(folder / "x.png")
picture = items.Image(0, "x", folder / "x.png")
tracker.log(items.Table(time.time_ns(), "predictions", ("image", "score"), ((picture, 0.5),), 8))
tracker.finish("finished")
"""


def _outside() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A runs folder with one run, recorded offline in two attempts; to be copied."""
    runs = tmp_path_factory.mktemp("recorded") / "runs"
    with RunWriter.create(runs, "a-run", "petnames", "name: petnames\n", "petnames") as writer:
        writer.layout.tracking_dir.mkdir()
        for attempt in (1, 2):
            command = [sys.executable, "-c", _RANK, str(writer.layout.tracking_dir), str(attempt)]
            subprocess.run(command, env=_outside(), timeout=100, check=attempt == 2)
            time.sleep(1.1)  # their folders are named by the second
        writer.update(tracking={"wandb": {"id": "w1", "mode": "offline", "project": "petnames"}})
        writer.finish(RunStatus.SUCCEEDED, 0)
    return runs


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    """The run's folder, moved from where it was recorded."""
    shutil.copytree(recorded, tmp_path / "runs")
    return tmp_path / "runs" / "a-run"


@pytest.fixture
def gone(recorded: Path, run: Path) -> Iterator[None]:
    """What was recorded is not where it was."""
    hidden = recorded.with_name("hidden")
    recorded.rename(hidden)
    yield
    hidden.rename(recorded)


@pytest.fixture
def backend() -> Iterator[Backend]:
    with wandb_backend() as made:
        yield made


def sync(run: Path, environ: Mapping[str, str], timeout_s: float = 60.0) -> SyncResult:
    return sync_run(load_run(run), {**_outside(), **environ}, time.monotonic() + timeout_s)


def unsent(run: Path) -> int:
    return len(unsent_parts(parts_below(run / "tracking" / "wandb")))


@pytest.mark.usefixtures("gone")
def test_moved_run_is_sent_whole_and_in_order_and_only_once(run: Path, backend: Backend, run_cli: Cli) -> None:
    ended = run_cli("results", "sync", "latest", env=backend.environment)
    assert (ended.rc, ended.stdout) == (0, "a-run: 2 sent to W&B\n"), ended.stderr
    assert backend.run.id == "w1"
    assert [row["step"] for row in backend.run.history if "loss" in row] == [0, 1, 2, 3, 4, 3, 4, 5, 6, 7]
    assert backend.run.state == "finished"
    artifact = backend.artifact("predictions_a-run")
    assert (artifact.state, len(artifact.files)) == ("COMMITTED", 2)

    asked = len(backend.asked)
    ended = run_cli("results", "sync", "--all", env=backend.environment)
    assert (ended.rc, ended.stdout) == (0, "")
    assert len(backend.asked) == asked
    shown = run_cli("results", "show", "latest").stdout
    assert f"{backend.url}/stub-entity/petnames/runs/w1" in shown
    assert "not sent" not in shown


@pytest.mark.usefixtures("gone")
def test_part_that_was_sent_by_half_has_the_same_steps_when_it_is_sent_again(run: Path, backend: Backend) -> None:
    _, last = parts_below(run / "tracking" / "wandb")
    for _ in range(2):
        last.log.with_suffix(".wandb.synced").unlink(missing_ok=True)
        assert sync(run, backend.environment).problem == ""
    assert [row["_step"] for row in backend.run.history] == [*range(11)]  # as the server knows rows apart


def killed_online(folder: Path, backend: Backend, mode: str, ranks: int) -> Path:
    """A run whose ranks were killed with all that they had started, once they had logged five rows; its folder."""
    with RunWriter.create(folder / "runs", "a-run", "petnames", "name: petnames\n", "petnames") as writer:
        writer.layout.tracking_dir.mkdir()
        for number in range(ranks):
            words = [sys.executable, "-c", _RANK, str(writer.layout.tracking_dir), "1", mode, str(number)]
            rank = subprocess.Popen(words, env={**_outside(), **backend.environment}, stdout=subprocess.PIPE)
            assert rank.stdout is not None
            with rank, rank.stdout:
                assert b"logged\n" in iter(rank.stdout.readline, b"")
                family = [*psutil.Process(rank.pid).children(recursive=True), psutil.Process(rank.pid)]
                for process in family:
                    process.kill()
        writer.update(tracking={"wandb": {"id": "w1", "mode": mode, "project": "petnames"}})
        writer.finish(RunStatus.FAILED, 1)
    return writer.layout.root


def test_online_rank_that_was_killed_with_its_host_is_sent_later_and_each_row_is_there_once(
    tmp_path: Path, backend: Backend
) -> None:
    run = killed_online(tmp_path, backend, "rank0", 1)
    # wandb sends rows only every 15 s: these were the first.
    lines = [json.dumps({"_step": step, "step": step, "loss": 1.0 / (step + 1)}) for step in range(3)]
    backend.run.clients[""].take({"wandb-history.jsonl": {"offset": 0, "content": lines}})
    assert unsent(run) == 1
    assert sync(run, backend.environment).problem == ""
    assert [row["step"] for row in backend.run.history if "loss" in row] == [0, 1, 2, 3, 4]
    assert backend.run.exits == [1], "the server hears how it ended"


def test_ranks_that_shared_a_run_are_sent_later_as_a_run_each_for_their_rows_have_the_same_steps(
    tmp_path: Path, backend: Backend
) -> None:
    run = killed_online(tmp_path, backend, "shared", 2)
    first, last = parts_below(run / "tracking" / "wandb")
    assert (first.folder.name[-7:], last.folder.name[-7:]) == ("-rank_0", "-rank_1")
    (first.folder / "files/it").symlink_to(run / "run.json")
    came = sync(run, backend.environment)
    assert (came.sent, came.waiting, "is a symbolic link" in came.problem) == (1, 1, True), "it holds up no other"
    (first.folder / "files/it").unlink()
    for _ in range(2):  # the second time nothing is left to be sent
        assert sync(run, backend.environment).problem == ""
        assert sorted(backend.runs) == ["w1", "w1-rank_0", "w1-rank_1"]
        for rank in range(2):
            sent = backend.runs[f"w1-rank_{rank}"]
            rows = [row[f"rank_{rank}/step"] for row in sent.history if f"rank_{rank}/loss" in row]
            assert (sent.name, sent.group, rows) == (f"rank_{rank}", "a-run", [0, 1, 2, 3, 4])
    assert unsent(run) == 0


def test_part_that_was_overtaken_does_not_say_how_the_run_has_ended(run: Path, backend: Backend) -> None:
    first, last = parts_below(run / "tracking" / "wandb")
    first.folder.rename(run.parent / "first")
    assert sync(run, backend.environment).sent == 1  # the second attempt was online, say
    (run.parent / "first").rename(first.folder)
    transaction_log.rewrite(last.log, first.log, lambda file: Path(file.path), 1)  # one that has come to its end
    assert sync(run, backend.environment).sent == 1
    assert backend.run.exits == [0, 0]
    assert backend.run.state == "finished"


def test_what_fails_waits_for_the_next_time(run: Path, backend: Backend) -> None:
    backend.fault = "unauthorized"
    failed = sync(run, backend.environment)
    assert (failed.sent, failed.waiting) == (0, 2)
    assert "unauthorized" in failed.problem
    backend.fault = "hang"
    began = time.monotonic()
    failed = sync(run, backend.environment, timeout_s=5.0)
    assert time.monotonic() - began < 40  # the 5 s, and what it takes to end
    assert "not done in" in failed.problem
    backend.fault = ""
    backend.stopped.clear()
    assert unsent(run) == 2


def test_run_that_is_on_and_one_that_is_being_sent_are_left_alone(run: Path, backend: Backend) -> None:
    held = run_lock.take(run / "tracking" / "wandb" / ".sync.lock")
    try:
        assert sync(run, backend.environment).skipped == "another process is sending it"
    finally:
        os.close(held)
    with RunWriter.reopen(run, "name: petnames\n"):
        assert sync(run, backend.environment).skipped == "it is running"
    assert backend.asked == []
    assert unsent(run) == 2


def test_without_a_key_nothing_is_tried(run: Path, run_cli: Cli, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no API key"):
        sync(run, {"HOME": str(tmp_path)})
    for part in parts_below(run / "tracking" / "wandb"):
        part.log.with_suffix(".wandb.synced").touch()
    assert sync(run, {"HOME": str(tmp_path)}).summary == "a-run: nothing to send to W&B"
    ended = run_cli("results", "sync")
    assert ended.rc == 2
    assert "--all" in ended.stderr


def test_artifact_whose_files_are_missing_is_told_of(run: Path, backend: Backend, gone: None) -> None:
    shutil.rmtree(run / "tracking" / "wandb" / "data")
    killed, _ = parts_below(run / "tracking" / "wandb")
    killed.log.with_suffix(".wandb.synced").touch()
    assert "files of artifacts are missing" in sync(run, backend.environment).problem
    assert backend.asked == []


def _adds(part: RunPart, **record: Any) -> None:
    """Put a further record into a log, before its last one."""
    from wandb.proto import wandb_internal_pb2

    added = wandb_internal_pb2.Record(**record)  # type: ignore[attr-defined]
    *known, last = transaction_log.records(part.log)
    transaction_log.write(part.log, iter([*known, added.SerializeToString(), last]))


def _artifact(kind: str, **manifest: Any) -> dict[str, Any]:
    about = {"version": 1, "storage_policy": "wandb-storage-policy-v1", **manifest}
    named = {"type": kind, "name": "loot", "run_id": "w1", "project": "petnames", "client_id": "1", "digest": "1"}
    return {"artifact": {**named, "sequence_client_id": "1", "finalize": True, "manifest": about}}


def _leads_away(kind: str, part: RunPart, foreign: Path) -> None:
    """Have a part name the file `key` in `foreign`, which is nothing of the run's."""
    staging = part.log.parents[1] / "data/artifacts/staging"
    entry = {"path": "key", "local_path": str(staging / "key"), "skip_cache": True}
    match kind:
        case "file that is a link":
            (part.folder / "files/it").symlink_to(foreign / "key")
            return _adds(part, files={"files": [{"path": "it"}]})
        case "file below a link":
            (part.folder / "files/it").symlink_to(foreign)
            return _adds(part, files={"files": [{"path": "it/key"}]})
        case "checkpoint in a link":
            (part.log.parents[3] / "checkpoints/step-1").symlink_to(foreign)
            return _adds(part, **_artifact(CHECKPOINT_TYPE, contents=[{**entry, "local_path": "/step-1/key"}]))
        case "list of an artifact's files":
            with gzip.open(staging / "list", "wt") as file:
                file.write(json.dumps({"path": "key", "digest": "1", "local_path": str(foreign / "key")}))
            return _adds(part, **_artifact("dataset", manifest_file_path=str(staging / "list")))
        case "staged in a link":
            staging.rename(foreign / "own")
            staging.symlink_to(foreign)
        case "staged as a link":
            (staging / "key").symlink_to(foreign / "key")
        case "staged above":
            shutil.copy(foreign / "key", staging.parent)
            entry["local_path"] = str(staging / "../key")
        case _:
            entry["local_path"] = str(foreign / "key")
    return _adds(part, **_artifact("dataset", contents=[entry]))


@pytest.mark.parametrize(
    "kind",
    [
        "staged elsewhere",
        "staged above",
        "staged in a link",
        "staged as a link",
        "checkpoint in a link",
        "file that is a link",
        "file below a link",
        "list of an artifact's files",
    ],
)
def test_log_that_names_files_which_are_not_of_the_run_sends_none_of_them(
    run: Path, backend: Backend, kind: str, tmp_path: Path
) -> None:
    killed, last = parts_below(run / "tracking" / "wandb")
    shutil.rmtree(killed.folder)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/key").write_text("hush-hush")
    _leads_away(kind, last, tmp_path / "foreign")
    came = sync(run, backend.environment)
    problem = came.problem
    sent = [made.files for made in backend.artifacts.values()] + [made.files for made in backend.runs.values()]
    assert b"hush-hush" not in [data for files in sent for data in files.values()]
    if kind == "checkpoint in a link":
        assert came.summary == "a-run: 1 sent to W&B, without 1 checkpoint that the run no longer keeps"
    else:
        assert "are missing" in problem or "outside of this run" in problem
        assert backend.asked == []


def test_part_of_a_rank_that_was_killed_at_once_is_done_with(run: Path, backend: Backend) -> None:
    folder = run / "tracking" / "wandb"
    for part in parts_below(folder):
        part.log.write_bytes(b"")
    assert sync(run, backend.environment).sent == 2
    assert backend.asked == []


def test_online_run_counts_as_sent_unless_it_says_otherwise(run: Path) -> None:
    folder = run / "tracking" / "wandb"
    for part in parts_below(folder):
        part.folder.rename(part.folder.with_name(part.folder.name.removeprefix("offline-")))
    assert unsent(run) == 0
    first, last = parts_below(folder)
    (first.folder / UNSENT).touch()
    assert unsent(run) == 1
    (first.folder / UNSENT).write_text(OPEN)
    assert unsent(run) == 0, "it was killed, and the attempt after it went on where the server was"
    shutil.rmtree(last.folder)
    assert unsent(run) == 1


@pytest.mark.usefixtures("gone")
def test_run_in_an_object_store_is_sent_from_there_and_only_once(run: Path, backend: Backend, run_cli: Cli) -> None:
    place = f"file://{run.parent}"  # fsspec takes any folder for a store
    run_cli.folder.joinpath("tmp").mkdir()
    env = {"XDG_CACHE_HOME": str(run.parents[1] / "cache"), "TMPDIR": str(run_cli.folder / "tmp")}
    ended = run_cli("results", "sync", "--all", "--runs-dir", place, env=env | backend.environment)
    assert (ended.rc, ended.stdout) == (0, "a-run: 2 sent to W&B\n"), ended.stderr
    assert [row["step"] for row in backend.run.history if "loss" in row] == [0, 1, 2, 3, 4, 3, 4, 5, 6, 7]
    artifact = backend.artifact("predictions_a-run")
    assert (artifact.state, len(artifact.files)) == ("COMMITTED", 2)

    asked = len(backend.asked)
    ended = run_cli("results", "sync", f"{place}/a-run", env=env | backend.environment)
    assert (ended.rc, ended.stdout) == (0, "a-run: nothing to send to W&B\n"), ended.stderr
    assert len(backend.asked) == asked
    shown = run_cli("results", "show", "latest", "--runs-dir", place, env=env).stdout
    assert f"{backend.url}/stub-entity/petnames/runs/w1" in shown
    assert not [*(run_cli.folder / "tmp").iterdir(), *run.glob("tracking/wandb/run.lock")]
