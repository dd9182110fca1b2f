"""Trackers: their names, items, files and goals."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from ddptrain.config.rank_settings import TrackerSpec, goal_of
from ddptrain.config.run_config import RunConfig
from ddptrain.config.sections import tracking as tracking_config
from ddptrain.config.sections.tracking import TrackingConfig
from ddptrain.driver.tracking.setup import check_trackers
from ddptrain.errors import UsageError
from ddptrain.protocol import events
from ddptrain.protocol.rank_spec import TrackingSpec
from ddptrain.rank.output import Emitter
from ddptrain.rank.trackers import RankTrackers
from ddptrain.tracking.protocol import Checkpoint, Numbers
from ddptrain.tracking.trackers import load, start_trackers
from tests.unit.specs import make_spec

# --- From the configuration to the trackers of a rank: which there are, what they are told, and what absent ---


MODULE = """
import pathlib
seen = {}
class Mine:
    class Inner:
        def __init__(self, options): raise RuntimeError("made")
    def __init__(self, options): self.options = options
    def start(self, facts):
        seen["facts"] = facts
        facts.tell("here"); facts.found({"url": "http://x", "n": 1})
    def log(self, item): seen.setdefault("items", []).append(item)
    def finish(self, state): seen["state"] = state
"""


def names(rank: int, **settings: Any) -> list[str]:
    return [each.name for each in TrackingConfig.model_validate(settings).for_rank(rank)]


@pytest.mark.parametrize(
    ("settings", "rank_0", "rank_1"),
    [
        ({}, [], []),
        ({"wandb": {}}, ["wandb"], []),
        ({"wandb": True, "tensorboard": True}, ["wandb", "tensorboard"], []),
        ({"wandb": {"mode": False}, "tensorboard": {"mode": "off"}}, [], []),  # `off` is false in YAML
        ({"wandb": {"mode": "shared"}}, ["wandb"], ["wandb"]),
        ({"tensorboard": {"mode": "process"}}, ["tensorboard"], ["tensorboard"]),
        ({"other": [{"name": "a.b:C"}, {"name": "a:D", "mode": "rank0"}]}, ["a.b:C", "a:D"], ["a.b:C"]),
    ],
)
def test_section_says_which_ranks_have_which_trackers(
    settings: dict[str, Any], rank_0: list[str], rank_1: list[str]
) -> None:
    assert names(0, **settings) == rank_0
    assert names(1, **settings) == rank_1
    assert TrackingConfig.model_validate(settings).is_on == bool(rank_0)


def test_options_and_time_limits_go_along() -> None:
    config = {"wandb": {"finish_timeout_s": 5.0}, "other": [{"name": "a:B", "options": {"x": 1}}]}
    wandb, other = TrackingConfig.model_validate(config).for_rank(0)
    assert (wandb.options["log_every"], wandb.finish_timeout_s) == (10, 5)
    assert other == TrackerSpec("a:B", {"x": 1}, 30.0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"other": [{"name": "wandb"}]}, "has a section of its own"),
        ({"other": [{"name": "nope"}]}, "there is no such tracker"),
        ({"tensorboard": {"mode": "shared"}}, "rank0"),
        ({"wandb": {"log_every": 0}}, "greater than or equal to 1"),
        ({"wandb": {"projekt": "x"}}, "projekt"),
    ],
)
def test_wrong_settings_are_errors_before_anything_starts(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        TrackingConfig.model_validate(settings)


def test_package_that_is_missing_is_an_error_of_the_driver_where_ranks_run_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ddptrain.driver.tracking.setup.find_spec", lambda name: None)
    for name, package in (("tensorboard", "'tensorboard>=2.17'"), ("wandb", "wandb")):
        config: dict[str, Any] = {"workload": "a:b", "tracking": {name: {"mode": "rank0"}}}
        with pytest.raises(UsageError, match=rf"pip install {package}, or turn it off with --set tracking\.{name}"):
            check_trackers(RunConfig.model_validate(config))
    check_trackers(RunConfig.model_validate({**config, "cluster": {"address": "tcp://far.away:8786"}}))


def test_package_that_is_missing_in_the_rank_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ddptrain.tracking.tensorboard", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ImportError, match="tensorboard"):
        load("tensorboard")


def test_rank_without_trackers_starts_no_thread_and_tells_nothing(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with (tmp_path / "events").open("ab", buffering=0) as file:
        tracked = RankTrackers(make_spec(staging=str(tmp_path)), Emitter(file.fileno()))
        tracked.begin()
        tracked.end("failed")
        tracked.finish("failed")
    assert tracked.manager is None and set(threading.enumerate()) <= before
    assert (tmp_path / "events").read_bytes() == b""


def test_users_own_tracker_is_imported_in_its_thread_and_told_the_facts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sink_a.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    told: list[events.Event] = []
    chosen = TrackerSpec("sink_a:Mine", {"x": "all"}, 60.0, {"id": "7"})
    tracking = TrackingSpec((chosen,), "pets", config={"a": 1}, folder=str(tmp_path / "runs/tracking"))
    manager = start_trackers(make_spec(attempt=2, rank=1, staging=str(tmp_path), tracking=tracking), told.append)
    assert manager is not None
    assert not manager.wants(Checkpoint)
    manager.put(Numbers(1, {"loss": 0.5}, 1))
    manager.end("preempted")
    manager.wait()
    seen = sys.modules["sink_a"].seen
    facts = seen["facts"]
    assert (facts.name, facts.attempt, facts.rank, facts.resumed, facts.from_driver) == (
        "pets",
        2,
        1,
        True,
        {"id": "7"},
    )
    assert (facts.folder, facts.config) == (tmp_path / "runs/tracking", {"a": 1})
    assert (seen["items"], seen["state"]) == ([Numbers(1, {"loss": 0.5}, 1)], "preempted")
    note, found = told
    assert isinstance(note, events.Note)
    assert isinstance(found, events.Tracked)
    assert (note.message, found.found) == ("sink_a:Mine: here", {"url": "http://x", "n": "1"})


def test_trackers_of_installed_packages_are_known_by_their_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    point = importlib.metadata.EntryPoint("theirs", "collections:Counter", tracking_config.TRACKERS.group)
    points = importlib.metadata.EntryPoints([point])
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points.select(group=group))
    assert names(1, other=[{"name": "theirs"}]) == ["theirs"]
    assert load("theirs") is Counter
    with pytest.raises(ValidationError, match="there is no such tracker"):
        names(1, other=[{"name": "thiers"}])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_module:Mine", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("pathlib:Nope", "AttributeError"),
        ("sink_b:Mine.Inner", "RuntimeError: made"),
        ("gone", "there is no tracker gone"),
    ],
)
def test_tracker_that_can_not_be_had_is_off_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    (tmp_path / "sink_b.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    told: list[events.Event] = []
    manager = start_trackers(make_spec(staging=str(tmp_path), tracking=TrackingSpec((TrackerSpec(name),))), told.append)
    assert manager is not None
    manager.end("finished")
    manager.wait()
    (warning,) = [event.message for event in told if isinstance(event, events.Note)]
    assert f"{name} could not start: " in warning
    assert words in warning


def test_process_is_not_forked_in_the_middle_of_a_trackers_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sink_c.py").write_text(f"import time\ntime.sleep(0.5)\n{MODULE}")
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = make_spec(staging=str(tmp_path), tracking=TrackingSpec((TrackerSpec("sink_c:Mine"),)))
    manager = start_trackers(spec, lambda event: None)
    assert manager is not None
    while "sink_c" not in sys.modules:
        time.sleep(0.01)
    assert importlib.util.find_spec("sink_c") is not None

    pid = os.fork()
    if pid == 0:
        os._exit(0 if hasattr(sys.modules["sink_c"], "Mine") else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    manager.end("finished")
    manager.wait()


# --- Whether a higher or a lower value of a metric is better ---


@pytest.mark.parametrize(
    ("name", "goal"),
    [
        ("train/loss", "min"),
        ("val_loss", "min"),
        ("val/accuracy", "max"),
        ("val/top5", "max"),
        ("accuracy/val", "max"),
        ("val_acc1", "max"),
        ("map@50", "max"),
        ("score_error", "min"),
        ("train/learning_rate", ""),
        ("samples_per_s", ""),
        ("glossary", ""),
    ],
)
def test_best_is_known_from_the_name(name: str, goal: str) -> None:
    assert goal_of(name) == goal


def test_checkpoints_metric_is_best_as_the_configuration_says() -> None:
    assert goal_of("val/loss", "val/loss", "max") == "max"
