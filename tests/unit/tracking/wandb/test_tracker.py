"""What a rank logs to W&B, read back from the disk."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import PIL.Image
import pytest

from ddptrain.config.sections.tracking import WandbSettings
from ddptrain.tracking import protocol as items
from ddptrain.tracking import wandb_run
from ddptrain.tracking.protocol import Facts
from ddptrain.tracking.wandb import WandbTracker
from ddptrain.tracking.wandb_files import parts_below
from ddptrain.tracking.wandb_run import RankRun
from tests.servers.wandb_training import OfflineRun

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


def read_back(folder: Path) -> list[OfflineRun]:
    """The parts of W&B runs below a folder, in order."""
    return [OfflineRun(part.log) for part in parts_below(folder / "wandb")]


def rows(folder: Path) -> list[dict[str, Any]]:
    found = [row for run in read_back(folder) for row in run.history]
    return [{key: value for key, value in row.items() if not key.startswith("_")} for row in found]


def test_offline_run_holds_rows_and_images_and_no_artifacts(tmp_path: Path) -> None:
    heard = Heard()
    tracker = WandbTracker(options(log_every=10, checkpoints=True))
    tracker.start(heard.facts(tmp_path))
    for step in range(15):
        tracker.log(numbers(step, train_loss=1.0 / (step + 1)))
    tracker.log(numbers(14, val_loss=0.5))
    picture = tmp_path / "x.png"
    PIL.Image.new("RGB", (4, 4)).save(picture)
    shown = items.Image(0, "examples", picture, "a dog", 14)
    tracker.log(shown)
    tracker.log(items.Table(0, "predictions", ("image", "score"), ((shown, 0.1),) * 1001, 14))
    tracker.log(items.Checkpoint(time.time_ns(), 14, tmp_path, {}))
    picture.unlink()  # as ranks do, once log() has returned
    tracker.finish("finished")

    (run,) = read_back(tmp_path)
    assert [row["step"] for row in run.history if "train/loss" in row] == [0, 10, 14]
    together = next(row for row in run.history if "val/loss" in row)
    assert together["step"] == 14
    assert any("examples" in key for key in together)  # one row for what was logged at one step
    assert not run.of("artifact")
    assert (run.run["run_id"], run.run["project"], run.name, run.exit_code) == ("w1", "petnames", "petnames-1", 0)
    assert [line for line in heard.lines if "first 1,000 are logged" in line]
    assert heard.found["mode"] == "offline"
    assert Path(heard.found["folder"]).parent == tmp_path / "wandb"


def test_core_of_another_process_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SERVICE", "3-1-unix-/gone")  # of a notebook that has started the run, say
    tracker = WandbTracker(options())
    tracker.start(Heard().facts(tmp_path))
    tracker.log(numbers(1, loss=1.0))
    tracker.finish("finished")
    assert [row["loss"] for row in rows(tmp_path)] == [1]


def test_resumed_attempt_goes_on_in_the_same_run(tmp_path: Path) -> None:
    for attempt, (value, state) in enumerate(((0.2, "failed"), (0.4, "finished")), start=1):
        tracker = WandbTracker(options())
        tracker.start(Heard().facts(tmp_path, attempt=attempt))
        tracker.log(numbers(attempt, val_loss=value))
        tracker.finish(state)  # type: ignore[arg-type]
    runs = read_back(tmp_path)
    assert [(run.run["run_id"], run.exit_code) for run in runs] == [("w1", 1), ("w1", 0)]
    rows = [row for run in runs for row in run.history if "val/loss" in row]
    assert [(row["step"], row["attempt"]) for row in rows] == [(1, 1), (2, 2)]


def test_run_that_went_offline_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    heard = Heard()
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    tracker = WandbTracker(options())
    tracker.start(heard.facts(tmp_path, online=True))
    tracker.log(numbers(1, loss=1.0))
    (line,) = heard.lines
    assert "training continues, and is recorded offline" in line
    assert "kkkk" not in line
    tracker.finish("finished")
    (part,) = parts_below(tmp_path / "wandb")  # nothing is left of the attempt to go online
    assert part.offline
    assert rows(tmp_path)


def plan(tmp_path: Path, rank: int, environ: Mapping[str, str] | None = None, **settings: Any) -> RankRun:
    chosen = options(**settings)
    facts = Heard().facts(tmp_path, rank, 2, mode=chosen["mode"], online=True)
    return RankRun(chosen, facts, environ or {})


def test_each_process_has_a_run_of_its_own_in_one_group(tmp_path: Path) -> None:
    first, second = (plan(tmp_path, rank, mode="process").settings("online") for rank in range(2))
    assert (first["run_id"], second["run_id"]) == ("w1", "w1-1")
    assert (first["run_name"], second["run_name"]) == ("rank_0", "rank_1")
    assert first["run_group"] == second["run_group"] == "petnames-1"
    assert (first["x_disable_stats"], second["x_disable_stats"]) == (False, True)  # they are on one host
    assert first["resume"] == "allow"


def test_shared_run_is_named_and_finished_by_rank_0_alone(tmp_path: Path) -> None:
    first, second = (plan(tmp_path, rank, mode="shared").settings("shared") for rank in range(2))
    assert first["run_id"] == second["run_id"] == "w1"
    assert (first["x_primary"], second["x_primary"]) == (True, False)
    assert (first["x_label"], second["x_label"]) == ("rank_0", "rank_1")
    assert "x_update_finish_state" not in first
    assert second["x_update_finish_state"] is False
    assert "run_name" not in second


def test_shared_run_that_is_offline_is_a_run_a_rank(tmp_path: Path) -> None:
    made = plan(tmp_path, 1, mode="shared")
    made.mode = "process"
    settings = made.settings("offline")
    assert (settings["run_id"], settings["run_name"], settings["run_group"]) == ("w1-1", "rank_1", "petnames-1")


def test_variables_of_wandb_win(tmp_path: Path) -> None:
    environ = {"WANDB_RUN_ID": "mine", "WANDB_NAME": "named", "WANDB_PROJECT": "p", "WANDB__DISABLE_STATS": "true"}
    settings = plan(tmp_path, 1, environ, mode="process", project="other").settings("online")
    assert (settings["run_id"], settings["run_name"]) == ("mine-1", "named-rank_1")
    assert not {"project", "x_disable_stats"} & settings.keys()  # wandb takes them from the environment


def test_odd_names_and_values_are_taken_and_thousands_of_names(tmp_path: Path) -> None:
    tracker = WandbTracker(options(log_every=1))
    tracker.start(Heard().facts(tmp_path))
    odd = {"loss": math.nan, "a*b_loss": 1.0, "val/deep/er/loss": math.inf, "größe": -math.inf, "*": 2.0, "a.b\\c": 1.0}
    for step in range(4):
        tracker.log(items.Numbers(time.time_ns(), odd, step))
    tracker.log(items.Numbers(time.time_ns(), {f"layer_{n}/loss": 1.0 for n in range(2_000)}, 4))
    tracker.finish("finished")
    logged = rows(tmp_path)
    assert len(logged) == 5
    assert logged[0].keys() == {*odd, "step", "attempt"}
    assert (logged[0]["loss"], logged[0]["val/deep/er/loss"]) == ("NaN", "Infinity")
    assert len(logged[4]) == 2_002
