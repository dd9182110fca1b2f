"""What a rank logs to W&B, read back from the disk."""

from __future__ import annotations

import asyncio
import atexit
import errno
import json
import math
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import PIL.Image
import pytest
import torch
import wandb

from ddptrain.config.sections.tracking import WandbSettings
from ddptrain.tracking import items
from ddptrain.tracking.protocol import Facts
from ddptrain.tracking.wandb import transaction_log, wandb_run
from ddptrain.tracking.wandb.internals import parse_record
from ddptrain.tracking.wandb.media import shared_image_copies
from ddptrain.tracking.wandb.rank_run import RankRun
from ddptrain.tracking.wandb.tracker import WandbTracker, WentOffline
from ddptrain.tracking.wandb.wandb_artifacts import CheckpointArtifacts, Uploads
from ddptrain.tracking.wandb.wandb_folders import parts_below
from ddptrain.tracking.wandb.wandb_run import RunOptions, settings_for

CONFIG = {"params": {"epochs": 2}, "checkpoint": {"metric": "val/loss", "mode": "min"}}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """wandb keeps things in the environment; nothing of the outside is to be seen."""
    before = dict(os.environ)
    for name in before:
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)
    yield
    wandb_run.stop_service()
    for name in set(os.environ) - set(before):
        del os.environ[name]


class Heard:
    """What a tracker has told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.found: dict[str, str] = {}

    def facts(self, folder: Path, rank: int = 0, world_size: int = 1, attempt: int = 1, **told: Any) -> Facts:
        about = {"mode": "rank0", "online": False, "id": "w1", **told}
        return Facts(
            *("petnames-1", "petnames", attempt, rank, world_size, rank, 0, 1, folder),
            config=CONFIG,
            from_driver=about,
            tell=self.lines.append,
            found=self.found.update,
            resumed=attempt > 1,
        )


def options(**settings: Any) -> dict[str, Any]:
    return WandbSettings(**settings).model_dump()


def numbers(step: int, **values: float) -> items.Numbers:
    named = {name.replace("_", "/"): value for name, value in values.items()}
    return items.Numbers(time.time_ns(), named, step)


def read_back(folder: Path) -> list[Any]:
    """The records of the parts in a folder, in order."""
    return [parse_record(data) for part in parts_below(folder) for data in transaction_log.records(part.log)]


def rows(records: list[Any]) -> list[dict[str, str]]:
    found = []
    for record in records:
        if record.HasField("history"):
            pairs = ((item.key or "/".join(item.nested_key), item.value_json) for item in record.history.item)
            found.append({key: value for key, value in pairs if not key.startswith("_")})
    return found


def test_offline_run_holds_rows_pictures_table_and_artifact(tmp_path: Path) -> None:
    heard = Heard()
    tracker = WandbTracker(options(log_every=10, table_rows=2))
    tracker.start(heard.facts(tmp_path))
    for step in range(15):
        tracker.log(numbers(step, train_loss=1.0 / (step + 1)))
    tracker.log(numbers(14, val_loss=0.5))
    picture = tmp_path / "x.png"
    PIL.Image.new("RGB", (4, 4)).save(picture)
    shown = items.Image(0, "examples", picture, "a dog", 14)
    tracker.log(shown)
    tracker.log(items.Table(0, "predictions", ("image", "score"), ((shown, 0.1), (shown, 0.2), (shown, 0.3)), 14))
    assert len(staged_copies(tmp_path, picture)) == 2, "of the row's table, and of the artifact"
    assert {path.stat().st_ino for path in staged_copies(tmp_path, picture)} == {picture.stat().st_ino}
    picture.unlink()  # as ranks do, once log() has returned
    tracker.finish("finished")

    records = read_back(tmp_path / "wandb")
    logged = rows(records)
    assert [row["step"] for row in logged if "train/loss" in row] == ["0", "10", "14"]
    together = next(row for row in logged if "val/loss" in row)
    assert together["step"] == "14"
    assert any("examples" in key for key in together)  # one row for what was logged at one step
    artifacts = {record.artifact.name: record.artifact for record in records if record.HasField("artifact")}
    assert "predictions_petnames-1" in artifacts
    assert all(Path(path).is_relative_to(tmp_path) for path in staged(tmp_path))
    (run,) = (record.run for record in records if record.HasField("run"))
    assert (run.run_id, run.project, run.display_name) == ("w1", "petnames", "petnames-1")
    assert {"params", "run_id", "world_size"} <= {item.key for item in run.config.update}
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [0]
    assert [line for line in heard.lines if "first 2 are logged" in line]
    assert heard.found["mode"] == "offline"
    assert Path(heard.found["folder"]).parent == tmp_path / "wandb"


def test_process_that_ends_while_it_opens_a_run_does_not_say_that_the_run_has_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers: set[str] = set()
    while_opening: list[bool] = []
    init, register, unregister = wandb.init, atexit.register, atexit.unregister

    def noted(handler: Callable[[], object]) -> None:
        handlers.add(handler.__name__)
        register(handler)

    def forgotten(handler: Callable[[], object]) -> None:
        handlers.discard(handler.__name__)
        unregister(handler)

    def opened(**arguments: Any) -> wandb.Run:
        run = init(**arguments)
        while_opening.append("teardown_atexit" in handlers)  # wandb's, which ends all runs with exit code 0
        return run

    monkeypatch.setattr(atexit, "register", noted)
    monkeypatch.setattr(atexit, "unregister", forgotten)
    monkeypatch.setattr(wandb, "init", opened)
    wandb_run.prepare(tmp_path / "wandb")
    run = wandb_run.open_run(RunOptions("offline", "r1", tmp_path / "wandb"), Uploads())
    assert wandb_run.finish(run, "failed", 60.0)
    assert while_opening == [False]


def test_pictures_that_are_on_another_disk_are_there_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path))
    other, folder = tmp_path / "other.png", tmp_path / "artifacts/staging"
    other.write_bytes(b"a picture")
    folder.mkdir(parents=True)
    link = os.link

    def link_here(source: Path, new: Path) -> None:
        if source.parent != new.parent:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        link(source, new)

    monkeypatch.setattr("os.link", link_here)
    table = items.Table(0, "t", ("image",), ((items.Image(0, "x", other),),))
    with shared_image_copies(table, 1):
        for name, data in (("one", b"a picture"), ("two", b"a picture"), ("three", b"no pictur")):
            (folder / name).write_bytes(data)
            (folder / name).chmod(0o400)
        (folder / "under way").write_bytes(b"a picture")
    assert (folder / "one").stat().st_ino == (folder / "two").stat().st_ino
    assert {path.stat().st_nlink for path in (other, folder / "three", folder / "under way")} == {1}
    assert sorted(path.name for path in folder.iterdir()) == ["one", "three", "two", "under way"]


def test_core_of_another_process_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SERVICE", "3-1-unix-/gone")  # of a notebook that has started the run, say
    tracker = WandbTracker(options())
    tracker.start(Heard().facts(tmp_path))
    tracker.log(numbers(1, loss=1.0))
    tracker.finish("finished")
    assert [row["loss"] for row in rows(read_back(tmp_path / "wandb"))] == ["1"]


def staged_copies(folder: Path, picture: Path) -> list[Path]:
    """Those of a picture that wandb keeps for artifacts."""
    return [path for path in (folder / "wandb/data").rglob("tmp*") if path.read_bytes() == picture.read_bytes()]


def staged(folder: Path) -> list[str]:
    return [file.path for part in parts_below(folder / "wandb") for file in transaction_log.staged_files(part.log)]


def test_resumed_attempt_goes_on_in_the_same_run_and_knows_the_best_value(tmp_path: Path) -> None:
    for attempt, (value, state) in enumerate(((0.2, "failed"), (0.4, "finished")), start=1):
        tracker = WandbTracker(options())
        before = {"val/loss": (0.2, 0.9, 0.9)} if attempt > 1 else {}
        tracker.start(Heard().facts(tmp_path, attempt=attempt, before=before))
        tracker.log(numbers(attempt, val_loss=value))
        tracker.finish(state)  # type: ignore[arg-type]
    records = read_back(tmp_path / "wandb")
    assert {record.run.run_id for record in records if record.HasField("run")} == {"w1"}
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [1, 0]
    rows = [{item.key or item.nested_key[0]: item.value_json for item in record.history.item} for record in records]
    assert [(row["step"], row["attempt"]) for row in rows if "val/loss" in row] == [("1", "1"), ("2", "2")]
    last: Mapping[str, str] = {
        item.key or "/".join(item.nested_key): item.value_json
        for record in records
        if record.HasField("summary")
        for item in record.summary.update
    }
    assert any("0.2" in value for key, value in last.items() if key.startswith("val/loss"))


def test_strict_run_that_went_offline_says_so_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    heard = Heard()
    tracker = WandbTracker(options(init_timeout_s=1.0))
    tracker.start(heard.facts(tmp_path, online=True, strict=True))
    tracker.log(numbers(1, loss=1.0))
    (line,) = heard.lines
    assert "training continues, and is recorded offline" in line
    assert "kkkk" not in line
    with pytest.raises(WentOffline, match="opened no run online"):
        tracker.finish("finished")
    (part,) = parts_below(tmp_path / "wandb")  # nothing is left of the attempt to go online
    assert part.offline
    assert rows(read_back(tmp_path / "wandb"))


def plan(tmp_path: Path, rank: int, environ: Mapping[str, str] | None = None, **settings: Any) -> RankRun:
    chosen = options(**settings)
    facts = Heard().facts(tmp_path, rank, 2, mode=chosen["mode"], online=True)
    return RankRun(chosen, facts, environ or {})


def settings_of(plan: RankRun, mode: str, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    chosen: RunOptions = plan.run_options(mode)
    return {**settings_for(chosen, environ or {}), "config": chosen.config}


def test_each_process_has_a_run_of_its_own_in_one_group(tmp_path: Path) -> None:
    first, second = (settings_of(plan(tmp_path, rank, mode="process"), "online") for rank in range(2))
    assert (first["run_id"], second["run_id"]) == ("w1", "w1-1")
    assert (first["run_name"], second["run_name"]) == ("rank_0", "rank_1")
    assert first["run_group"] == second["run_group"] == "petnames-1"
    assert (first["x_disable_stats"], second["x_disable_stats"]) == (False, True)  # they are on one host
    assert first["resume"] == "allow"


def test_shared_run_is_named_and_finished_by_rank_0_alone(tmp_path: Path) -> None:
    first, second = (settings_of(plan(tmp_path, rank, mode="shared"), "shared") for rank in range(2))
    assert first["run_id"] == second["run_id"] == "w1"
    assert (first["x_primary"], second["x_primary"]) == (True, False)
    assert (first["x_label"], second["x_label"]) == ("rank_0", "rank_1")
    assert "x_update_finish_state" not in first
    assert second["x_update_finish_state"] is False
    assert second["config"] is None
    assert "run_name" not in second


def test_shared_run_that_is_offline_is_a_run_a_rank(tmp_path: Path) -> None:
    made = plan(tmp_path, 1, mode="shared")
    made.mode = "process"
    settings = settings_of(made, "offline")
    assert (settings["run_id"], settings["run_name"], settings["run_group"]) == ("w1-1", "rank_1", "petnames-1")


def test_variables_of_wandb_win(tmp_path: Path) -> None:
    environ = {"WANDB_RUN_ID": "mine", "WANDB_NAME": "named", "WANDB_PROJECT": "p", "WANDB__DISABLE_STATS": "true"}
    settings = settings_of(plan(tmp_path, 1, environ, mode="process", project="other"), "online", environ)
    assert (settings["run_id"], settings["run_name"]) == ("mine-1", "named-rank_1")
    assert not {"project", "x_disable_stats"} & settings.keys()  # wandb takes them from the environment


# --- checkpoints, and the model itself ---


def checkpoint(folder: Path, step: int) -> items.Checkpoint:
    """As it lies with a rank: under a name that says nothing."""
    files = folder / "lent" / str(step * 7)
    files.mkdir(parents=True)
    (files / "model.safetensors").write_bytes(bytes([step]) * 1000)
    (files / "checkpoint.json").write_text("{}")
    return items.Checkpoint(time.time_ns(), step, files, {"val/loss": 1.0 / step})


def test_checkpoint_that_is_recorded_offline_is_no_copy_but_that_of_the_run_directory(tmp_path: Path) -> None:
    tracker = WandbTracker(options(checkpoints=True))
    tracker.start(Heard().facts(tmp_path / "run" / "tracking"))
    for step in range(1, 6):
        tracker.log(checkpoint(tmp_path, step))
    tracker.finish("finished")
    tracking = tmp_path / "run" / "tracking"
    artifacts = [record.artifact for record in read_back(tracking / "wandb") if record.HasField("artifact")]
    assert [(artifact.name, artifact.type) for artifact in artifacts] == [("checkpoint_petnames-1", "model")] * 5
    assert [set(artifact.aliases) for artifact in artifacts] == [{"latest", f"step-{step}"} for step in range(1, 6)]
    assert {entry.path for entry in artifacts[0].manifest.contents} == {"model.safetensors", "checkpoint.json"}
    assert json.loads(artifacts[4].metadata) == {"step": 5, "val/loss": 0.2}
    assert str(tmp_path / "run/checkpoints/step-5/model.safetensors") in staged(tracking)
    kept = [path for path in tracking.rglob("*") if path.is_file() and path.stat().st_size == 1000]
    assert not kept, "nothing of it lies in the tracker's folder"


class Answer:
    """wandb's private handle: it answers at once that the artifact is there, or refused, or not at all."""

    def __init__(self, refused: str | None) -> None:
        self._refused = refused
        self.asyncer = self

    def run_soon(self, function: Callable[[], Coroutine[Any, Any, None]], *, daemon: bool) -> None:
        if self._refused is not None:
            asyncio.run(function())

    async def wait_async(self, *, timeout: float | None) -> Any:  # noqa: ASYNC109  # as wandb has it
        return SimpleNamespace(
            response=SimpleNamespace(log_artifact_response=SimpleNamespace(error_message=self._refused))
        )


def test_checkpoints_on_their_way_are_as_many_as_the_run_keeps_and_no_copies(tmp_path: Path) -> None:
    left = tmp_path / "sending" / "checkpoints" / "step-1"
    left.mkdir(parents=True)  # by a rank that was killed
    uploads = Uploads()
    made = CheckpointArtifacts(tmp_path / "sending", tmp_path, "a-run", keep=2, uploads=uploads)
    items_ = [checkpoint(tmp_path, step) for step in range(1, 6)]
    for item in items_:
        artifact = made.create(item, offline=False)
        uploads.watch(artifact, Answer("" if item.step == 1 else None))  # the first gets there at once
    waiting = sorted((tmp_path / "sending" / "checkpoints").iterdir())
    assert [folder.name for folder in waiting] == ["step-2", "step-4", "step-5"], "the first of those is being sent"
    assert (waiting[2] / "model.safetensors").samefile(items_[-1].folder / "model.safetensors")
    assert {entry.local_path for entry in artifact.manifest.entries.values()} == {
        str(path) for path in waiting[2].iterdir()
    }
    assert uploads.problem == "W&B lacks checkpoints (1) that were replaced by newer ones before they were sent"
    made.close()
    assert not (tmp_path / "sending").exists()


def test_artifacts_that_the_server_refuses_are_counted() -> None:
    uploads = Uploads()
    for refused in ("", "409\n of http://me:hush@there/", None):
        uploads.watch(wandb.Artifact("a", type="table"), Answer(refused))
    assert uploads.problem == "W&B lacks 1 of 3 artifacts; the last error: 409 of http://<left out>@there/"


def test_model_that_is_watched_comes_as_histograms_of_rows_that_are_no_older_than_it(tmp_path: Path) -> None:
    model = torch.nn.Linear(300, 400)
    tracker = WandbTracker(options(watch="all", log_every=1))
    tracker.start(Heard().facts(tmp_path))
    tracker.log(items.Model(time.time_ns(), model))
    tracker.log(items.Numbers(time.time_ns() - 60 * 10**9, {"loss": 2.0}, 1))  # it had to wait for the start
    model(torch.ones(2, 300)).sum().backward()
    for step in range(2, 14):
        tracker.log(numbers(step, loss=1.0))
    tracker.finish("finished")
    watched = {
        row["step"]: sorted({key.partition("/")[0] for key in row if key.endswith("weight") or "weight/" in key})
        for row in rows(read_back(tmp_path / "wandb"))
    }
    assert [step for step, found in watched.items() if found] == ["2", "12"]
    assert watched["2"] == ["gradients", "parameters"]


def test_odd_names_and_values_are_taken_and_ten_thousand_names(tmp_path: Path) -> None:
    tracker = WandbTracker(options(log_every=1))
    tracker.start(Heard().facts(tmp_path))
    odd = {"loss": math.nan, "a*b_loss": 1.0, "val/deep/er/loss": math.inf, "größe": -math.inf, "*": 2.0, "a.b\\c": 1.0}
    for step in range(4):
        tracker.log(items.Numbers(time.time_ns(), odd, step))
    tracker.log(items.Numbers(time.time_ns(), {f"layer_{n}/loss": 1.0 for n in range(10_000)}, 4))
    tracker.finish("finished")
    logged = rows(read_back(tmp_path / "wandb"))
    assert len(logged) == 5
    assert logged[0].keys() == {*odd, "step", "attempt"}
    assert (logged[0]["loss"], logged[0]["val/deep/er/loss"]) == ("NaN", "Infinity")
    assert len(logged[4]) == 10_002
