"""`ddptrain results sync`: offline runs get to the server, once, in order, and whole."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from ddptrain.driver.tracking.wandb_sync import SyncResult, sync_run
from ddptrain.errors import UsageError
from ddptrain.results import ownership
from ddptrain.results.lookup import load_run
from ddptrain.results.run_record import RunStatus
from ddptrain.results.run_writer import RunWriter
from ddptrain.tracking.wandb.wandb_folders import OPEN, UNSENT, parts_below, unsent_parts
from tests.conftest import Cli
from tests.servers.seaweed import bucket_of, seaweed
from tests.servers.wandb_backend import Backend, wandb_backend

# Two attempts of one run, the first of which was killed.
_RANK = """
import os, signal, sys, time
from pathlib import Path
from ddptrain.tracking import items
from ddptrain.tracking.protocol import Facts
from ddptrain.tracking.wandb.tracker import WandbTracker
from tests.servers.wandb_training import OfflineRun


def rows_on_disk():
    (log,) = folder.rglob(f"*_{rank}/run-*.wandb" if mode == "shared" else "run-*.wandb")
    return len(OfflineRun(log).history)


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
    assert [row["_step"] for row in backend.run.history] == [*range(10)]  # as the server knows rows apart


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
    first, _ = parts_below(run / "tracking" / "wandb")
    first.folder.rename(run.parent / "first")
    assert sync(run, backend.environment).sent == 1  # the second attempt was online, say
    (run.parent / "first").rename(first.folder)
    assert sync(run, backend.environment).sent == 1
    assert backend.run.exits[-1] == 0
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
    held = ownership.take(run / "tracking" / "wandb" / ".sync.lock")
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


@pytest.fixture
def store(tmp_path: Path) -> Iterator[dict[str, str]]:
    (tmp_path / "seaweed").mkdir()
    with seaweed(tmp_path / "seaweed", "bucket") as environment:
        yield environment


@pytest.mark.usefixtures("gone")
def test_run_in_an_object_store_is_sent_from_there_and_only_once(
    run: Path, backend: Backend, run_cli: Cli, store: dict[str, str]
) -> None:
    place = "s3://bucket/runs"
    run_cli.folder.joinpath("tmp").mkdir()
    table = run / "artifacts/tables/predictions/step-8-rank-0.csv"
    table.parent.mkdir(parents=True)
    table.write_text("name,score\nrex,0.5\n")
    bucket = bucket_of(store, "bucket")
    for path in (path for path in run.rglob("*") if path.is_file()):
        bucket.put(f"runs/{path.relative_to(run.parent).as_posix()}", path)
    env = store | {"XDG_CACHE_HOME": str(run.parents[1] / "cache"), "TMPDIR": str(run_cli.folder / "tmp")}
    ended = run_cli("results", "sync", "--all", "--runs-dir", place, env=env | backend.environment)
    assert (ended.rc, ended.stdout) == (0, "a-run: 2 sent to W&B\n"), ended.stderr
    assert [row["step"] for row in backend.run.history if "loss" in row] == [0, 1, 2, 3, 4, 3, 4, 5, 6, 7]
    (content,) = backend.artifact("predictions_a-run").files.values()
    assert json.loads(content)["data"] == [["rex", 0.5]]

    asked = len(backend.asked)
    ended = run_cli("results", "sync", f"{place}/a-run", env=env | backend.environment)
    assert (ended.rc, ended.stdout) == (0, "a-run: nothing to send to W&B\n"), ended.stderr
    assert len(backend.asked) == asked
    shown = run_cli("results", "show", "latest", "--runs-dir", place, env=env).stdout
    assert f"{backend.url}/stub-entity/petnames/runs/w1" in shown
    assert not [*(run_cli.folder / "tmp").iterdir()]
    left = [item["path"] for page in bucket.list() for item in page if item["path"].endswith("wandb/run.lock")]
    assert left == []
