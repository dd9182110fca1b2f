"""`ddptrain results sync`: offline runs get to the server, once, in order, and whole."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from ddptrain.driver.syncing import Sent, sync_run
from ddptrain.errors import UsageError
from ddptrain.results import lock, wandblog
from ddptrain.results.find import load_run
from ddptrain.results.origin import Origin
from ddptrain.results.record import RunStatus
from ddptrain.results.writer import RunWriter
from ddptrain.wandbparts import UNSENT, parts_below
from tests.conftest import Cli
from tests.integration.wandb_backend import Backend, wandb_backend

# Two attempts of one run, the first of which was killed, and in the end a table with its artifact.
_RANK = """
import os, signal, sys, time
from pathlib import Path
import PIL.Image
from ddptrain.tracking import items
from ddptrain.tracking.protocol import Facts
from ddptrain.tracking.wandb_sink import WandbTracker

folder, attempt = Path(sys.argv[1]), int(sys.argv[2])
tracker = WandbTracker({"log_every": 1})
told = {"mode": "rank0", "online": False, "id": "w1"}
tracker.start(Facts("a-run", "petnames", attempt, 0, 1, 0, 0, 1, folder, told=told))
first = 0 if attempt == 1 else 3
for step in range(first, first + 5):
    tracker.log(items.Numbers(time.time_ns(), {"loss": 1.0 / (step + 1)}, step))
if attempt == 1:
    time.sleep(1.0)  # of the last second something may be lost
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
            subprocess.run(command, env=_outside(), timeout=60, check=attempt == 2)
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


def sync(run: Path, environ: Mapping[str, str], timeout_s: float = 60.0) -> Sent:
    return sync_run(load_run(run), {**_outside(), **environ}, time.monotonic() + timeout_s)


def unsent(run: Path) -> int:
    return sum(not part.sent for part in parts_below(run / "tracking" / "wandb"))


@pytest.mark.timeout(120)
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


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("gone")
def test_part_that_was_sent_by_half_has_the_same_steps_when_it_is_sent_again(run: Path, backend: Backend) -> None:
    _, last = parts_below(run / "tracking" / "wandb")
    for _ in range(2):
        last.log.with_suffix(".wandb.synced").unlink(missing_ok=True)
        assert sync(run, backend.environment).problem == ""
    steps = [row["_step"] for row in backend.run.history]
    assert steps[:5] == [0, 1, 2, 3, 4]
    assert steps[5:11] == steps[11:] == [5, 6, 7, 8, 9, 10]  # as the server knows rows apart


@pytest.mark.timeout(120)
def test_part_that_was_overtaken_does_not_say_how_the_run_has_ended(run: Path, backend: Backend) -> None:
    first, last = parts_below(run / "tracking" / "wandb")
    first.folder.rename(run.parent / "first")
    assert sync(run, backend.environment).sent == 1  # the second attempt was online, say
    (run.parent / "first").rename(first.folder)
    wandblog.rewritten(last.log, first.log, lambda file: Path(file.path), 1)  # one that has come to its end
    assert sync(run, backend.environment).sent == 1
    assert backend.run.exits == [0, 0]
    assert backend.run.state == "finished"


@pytest.mark.timeout(120)
def test_what_fails_waits_for_the_next_time(run: Path, backend: Backend) -> None:
    backend.fault = "unauthorized"
    failed = sync(run, backend.environment)
    assert (failed.sent, failed.waiting) == (0, 2)
    assert "unauthorized" in failed.problem
    backend.fault = "hang"
    began = time.monotonic()
    failed = sync(run, backend.environment, timeout_s=5.0)
    assert time.monotonic() - began < 15
    assert "not done in" in failed.problem
    backend.fault = ""
    backend.stopped.clear()
    assert unsent(run) == 2


def test_run_that_is_on_and_one_that_is_being_sent_are_left_alone(run: Path, backend: Backend) -> None:
    held = lock.take(run / "tracking" / "wandb" / ".sync.lock")
    try:
        assert sync(run, backend.environment).passed_over == "another process is sending it"
    finally:
        os.close(held)
    with RunWriter.reopen(run, "name: petnames\n"):
        assert sync(run, backend.environment).passed_over == "it is running"
    assert backend.asked == []
    assert unsent(run) == 2


def test_without_a_key_nothing_is_tried(run: Path, run_cli: Cli, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no API key"):
        sync(run, {"HOME": str(tmp_path)})
    for part in parts_below(run / "tracking" / "wandb"):
        part.log.with_suffix(".wandb.synced").touch()
    assert sync(run, {"HOME": str(tmp_path)}).words == "a-run: nothing to send to W&B"
    ended = run_cli("results", "sync")
    assert ended.rc == 2
    assert "--all" in ended.stderr


def test_artifact_whose_files_are_missing_is_told_of(run: Path, backend: Backend, gone: None) -> None:
    shutil.rmtree(run / "tracking" / "wandb" / "data")
    killed, _ = parts_below(run / "tracking" / "wandb")
    killed.log.with_suffix(".wandb.synced").touch()
    assert "files of artifacts are missing" in sync(run, backend.environment).problem
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
    first, _ = parts_below(folder)
    (first.folder / UNSENT).touch()
    assert unsent(run) == 1


def test_run_of_an_object_store_says_how_it_is_sent(run: Path, backend: Backend) -> None:
    Origin("s3://bucket/runs/a-run").mark(run)
    with pytest.raises(UsageError, match="a-run is in s3://bucket/runs/a-run: copy it into a folder"):
        sync(run, backend.environment)
    record = run / "run.json"
    record.write_text(record.read_text().replace('"offline"', '"rank0"'))
    assert sync(run, backend.environment).words == "a-run: nothing to send to W&B"
