"""Trials of a sweep: how many run, what they get, and what counts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddptrain.config.load import load_data, load_mapping
from ddptrain.config.resolved import ResolvedConfig
from ddptrain.protocol.events import CheckpointSaved, Metrics
from ddptrain.results.sweep_record import TrialRecord
from ddptrain.sweep import sweep
from ddptrain.sweep.sweep import Capacity, best_yaml, trial_config
from ddptrain.sweep.trial import MetricStream

# --- The configuration of a trial ---


def resolved(folder: Path, space: dict[str, Any], **fields: Any) -> ResolvedConfig:
    sweep = {"space": space, "trials": 2, "ranks": 2}
    return load_mapping({"workload": "elsewhere:train", "sweep": sweep, **fields}, folder)


def test_the_point_is_set_and_the_rest_stays(tmp_path: Path) -> None:
    space = {"params.lr": [1, 2], "params.model.size": [8], "prepare.precision": ["bf16"], "env.MODE": ["a"]}
    config = resolved(tmp_path, space, params={"seed": 3, "model": {"layers": 1}}, env={"OTHER": "x"})
    point = {"params.lr": 2, "params.model.size": 8, "prepare.precision": "bf16", "env.MODE": "a"}
    trial = trial_config(config, point, str(tmp_path / "runs" / "s"), "s").config
    assert trial.params == {"seed": 3, "model": {"layers": 1, "size": 8}, "lr": 2}
    assert (trial.prepare.precision, trial.env) == ("bf16", {"OTHER": "x", "MODE": "a"})
    assert (trial.cluster.ranks, trial.results.dir, trial.sweep) == (2, str(tmp_path / "runs" / "s"), None)
    assert trial.tracking.wandb.group == "s"
    assert config.config.params == {"seed": 3, "model": {"layers": 1}}


def test_a_script_gets_arguments(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    workload = {"script": "train.py", "args": ["--epochs", 3]}
    config = resolved(tmp_path, {"args.lr": [0.1]}, workload=workload)
    script = trial_config(config, {"args.lr": 0.1}, str(tmp_path), "s").config.script
    assert script is not None and script.args == ["--epochs", "3", "--lr", "0.1"]


def test_values_that_begin_with_a_minus_are_not_taken_as_options(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    config = resolved(tmp_path, {"args.shift": [-1e-05]}, workload={"script": "train.py"})
    script = trial_config(config, {"args.shift": -1e-05}, str(tmp_path), "s").config.script
    assert script is not None and script.args == ["--shift=-1e-05"]  # argparse takes -1e-05 alone as an option


def test_the_best_configuration_has_the_sweeps_own_folders_and_no_secrets(tmp_path: Path) -> None:
    config = resolved(tmp_path, {"params.lr": [1]}, env={"API_TOKEN": "hunter22hunter22"}, results={"dir": "there"})
    trial = trial_config(config, {"params.lr": 1}, str(tmp_path / "s"), "s")
    text = best_yaml(config, trial, "The best.")
    assert text.startswith("# The best.\nworkload: elsewhere:train\n")
    assert "hunter22" not in text and "dir: there" in text and "sweep:" not in text
    retrain = load_data(text.encode(), "best.yaml")["retrain"]
    assert retrain == {"model": config.config.name, "gate": [{"metric": "val/loss"}]}


def test_the_best_configuration_keeps_the_section_retrain(tmp_path: Path) -> None:
    config = resolved(tmp_path, {"params.lr": [1]}, retrain={"model": "m", "gate": {"metric": "accuracy"}})
    text = best_yaml(config, trial_config(config, {"params.lr": 1}, str(tmp_path / "s"), "s"), "The best.")
    retrain = load_data(text.encode(), "best.yaml")["retrain"]
    assert retrain["model"] == "m" and [rule["metric"] for rule in retrain["gate"]] == ["accuracy"]


def test_wrong_points_are_refused(tmp_path: Path) -> None:
    config = resolved(tmp_path, {"params.lr": [1]})
    with pytest.raises(ValueError, match="precision"):
        trial_config(config, {"prepare.precision": "fp7"}, str(tmp_path), "s")


# --- How many trials may run at the same time on a cluster that is shared ---


class Client:
    """A client of a cluster whose workers have (slots, held) each."""

    def __init__(self, *workers: tuple[int, int], waiting: int = 0) -> None:
        self.workers, self.waiting = workers, waiting

    def run_on_scheduler(self, _: object) -> dict[str, list[Any]]:
        workers = [{"slots": slots, "held": held} for slots, held in self.workers]
        return {"workers": workers, "waiting": ["run"] * self.waiting}


def cluster(*workers: tuple[int, int], waiting: int = 0) -> Any:
    return Client(*workers, waiting=waiting)


def test_slots_of_running_trials_count_besides_free_ones() -> None:
    assert Capacity(None, 2, cluster((4, 4), (4, 1))).trials(running=2) == 3
    assert Capacity(None, 2, cluster((4, 4))).trials(running=0) == 1  # it waits for its slots


def test_free_slots_make_room_for_whole_trials() -> None:
    clusters = [cluster((2 + free, 2)) for free in (0, 1, 2, 5)]
    assert [Capacity(None, 2, each).trials(running=1) for each in clusters] == [1, 1, 2, 3]


def test_a_fixed_number_is_the_most_and_no_trial_starts_without_slots() -> None:
    assert Capacity(3, 1, cluster((8, 0))).trials(running=0) == 3
    assert Capacity(3, 1, cluster((2, 2))).trials(running=2) == 2


def test_no_trial_is_added_while_another_run_waits() -> None:
    assert Capacity(None, 1, cluster((8, 2), waiting=1)).trials(running=2) == 1


def test_it_follows_the_size_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "_LOOK_EVERY_S", 0.0)
    client = cluster((2, 2))
    found = Capacity(None, 1, client)
    assert found.trials(running=2) == 2
    client.workers = ((2, 2), (2, 0))
    assert found.trials(running=2) == 4


def test_the_embedded_cluster_is_made_for_the_number_of_trials() -> None:
    assert Capacity(2, 2, None).trials(running=0) == 2


# --- The value of the metric at each step ---


class Pruner:
    """A trial of two ranks that keeps what its metric stream reports."""

    def __init__(self, ranks: int = 2, loggers: frozenset[int] = frozenset()) -> None:
        self.reported: list[tuple[int | None, float]] = []
        self.plan = SimpleNamespace(metric="loss", loggers=loggers, on_event=lambda event: None)
        self.record = TrialRecord(0, {})
        self.stream = MetricStream(self)  # type: ignore[arg-type]
        self.stream.on_event({"event": "ranks", "count": ranks})

    def report(self, index: int, value: float) -> None:
        assert index == len(self.reported) + 1
        self.reported.append((self.record.step, value))

    def logs(self, rank: int, step: int | None, value: float) -> list[tuple[int | None, float]]:
        event = Metrics(0, {"loss": value, "other": 7.0}, step)
        self.stream.on_event({"event": "numbers", "rank": rank, "numbers": [event]})
        return self.reported

    def saves(self, step: int, value: float) -> list[tuple[int | None, float]]:
        event = CheckpointSaved(0, step, "staged", (), metrics={"loss": value})
        self.stream.on_event({"event": "numbers", "rank": 0, "numbers": [event]})
        return self.reported


def test_a_step_is_complete_when_all_ranks_have_logged_it() -> None:
    pruner = Pruner()
    assert pruner.logs(0, 10, 1.0) == []
    assert pruner.logs(1, 10, 3.0) == [(10, 2.0)]


def test_a_step_that_one_rank_logs_is_complete_with_the_next_and_later_at_once() -> None:
    pruner = Pruner()
    assert pruner.logs(0, 10, 1.0) == []
    assert pruner.logs(0, 20, 2.0) == [(10, 1.0), (20, 2.0)]
    pruner.saves(30, 1.5)  # a checkpoint does not say which ranks log
    assert pruner.logs(0, 40, 3.0)[2:] == [(30, 1.5), (40, 3.0)]
    assert Pruner(loggers=pruner.plan.loggers).logs(0, 10, 1.0) == [(10, 1.0)]  # the next trial


def test_the_value_of_a_checkpoint_counts_and_steps_that_a_restart_repeats_are_ignored() -> None:
    pruner = Pruner()
    assert pruner.logs(0, 10, 1.0) == []
    assert pruner.saves(10, 1.5) == [(10, 1.5)]
    assert pruner.saves(20, 1.2) == [(10, 1.5), (20, 1.2)]
    for repeated in (pruner.saves(10, 9.0), pruner.logs(0, 20, 9.0), pruner.logs(1, 5, 9.0)):
        assert len(repeated) == 2
    known = Pruner(1)
    known.stream.reported({10.0: 1.0})
    known.reported.append((10, 1.0))
    assert known.logs(0, 10, 9.0) == [(10, 1.0)]
    assert known.logs(0, 11, 2.0) == [(10, 1.0), (11, 2.0)]


def test_values_without_a_step_are_counted() -> None:
    pruner = Pruner(1)
    pruner.logs(0, None, 5.0)
    assert pruner.logs(0, None, 4.0) == [(1, 5.0), (2, 4.0)]
