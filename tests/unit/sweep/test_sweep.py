"""A sweep whose trials are functions: what is run, what counts, and when it ends."""

from __future__ import annotations

import json
import math
import random
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddptrain.config.load import load_config, load_mapping
from ddptrain.errors import ExitCode, RunLocked, RunNotFound, UsageError
from ddptrain.results.run import Run
from ddptrain.results.run_writer import RunWriter
from ddptrain.results.sweep_record import TrialState, read_sweep
from ddptrain.sweep.home import check_same
from ddptrain.sweep.output import summary_lines, trial_line
from tests.unit.sweep.conftest import StubRun, Sweeper


def follows_lr(params: dict[str, Any], run: StubRun) -> str:
    for step in range(1, 5):
        if run.asked_to_end:
            return ""
        run.log(step, loss=params["lr"] + 1 / step)
    return ""


def logs_once(run: StubRun, loss: float) -> str:
    run.log(1, loss=loss)
    return ""


def test_every_trial_is_a_run_and_the_best_one_becomes_a_configuration(sweeper: Sweeper, tmp_path: Path) -> None:
    sweeper.workload = follows_lr
    assert sweeper.run(sweeper.config(space={"params.lr": [3, 1, 2]}, search="grid", trials=None)) == 0
    folder = sweeper.folder / "s"
    record = read_sweep(folder)
    assert (record.status, record.exit_code, record.best, record.planned) == ("succeeded", 0, 1, 3)
    assert [(each.params, each.value, each.step) for each in record.trials] == [
        ({"params.lr": 3}, 3.25, 4),
        ({"params.lr": 1}, 1.25, 4),
        ({"params.lr": 2}, 2.25, 4),
    ]
    assert [Run(folder / each.run_ids[0]).status for each in record.trials] == ["succeeded"] * 3
    best = load_config(folder / "best.yaml")
    assert best.config.params == {"lr": 1} and best.config.sweep is None
    assert best.config.results.dir == str(sweeper.folder) and best.config.name == "stub"


@pytest.fixture
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid with a pruner, too, tries its points in their order."""
    monkeypatch.setattr(random.Random, "sample", lambda chance, points, count: points)


@pytest.mark.usefixtures("in_order")
def test_trials_that_are_worse_are_ended_early(sweeper: Sweeper) -> None:
    sweeper.workload = follows_lr
    config = sweeper.config(space={"params.lr": [1, 2, 3]}, search="grid", trials=None, prune="asha")
    assert sweeper.run(config) == 0
    record = read_sweep(sweeper.folder / "s")
    assert [str(each.state) for each in record.trials] == ["complete", "pruned", "pruned"]
    assert record.trials[1].step == 1 and record.trials[1].value == 3.0
    assert Run(sweeper.folder / "s" / "s-0001").status == "preempted"


def test_a_sweep_without_a_complete_trial_says_so(sweeper: Sweeper, capsys: pytest.CaptureFixture[str]) -> None:
    sweeper.workload = lambda params, run: "no such file"
    assert sweeper.run(sweeper.config(trials=1)) == ExitCode.TRAINING_FAILED
    assert "\n  reason no trial is complete\n" in capsys.readouterr().out
    record = read_sweep(sweeper.folder / "s")
    assert "  reason no trial is complete" in summary_lines(record, "there")


def test_the_third_equal_failure_ends_the_sweep(sweeper: Sweeper, capsys: pytest.CaptureFixture[str]) -> None:
    sweeper.workload = lambda params, run: "no such file" if params["lr"] != 2 else ""
    config = sweeper.config(space={"params.lr": [1, 2, 3, 4, 5]}, search="grid", trials=None)
    assert sweeper.run(config) == ExitCode.TRAINING_FAILED
    record = read_sweep(sweeper.folder / "s")
    causes = [each.error for each in record.trials]
    assert causes[0] == causes[2] == causes[3] == "ValueError: no such file"
    assert causes[1].startswith("the run has logged no metric loss") and len(causes) == 4
    assert "3 trials have failed in the same way: ValueError: no such file" in record.message
    assert record.message in capsys.readouterr().err


def test_paths_of_their_own_do_not_make_failures_different(sweeper: Sweeper) -> None:
    sweeper.workload = lambda params, run: f"cannot read {sweeper.folder}/s/s-{len(sweeper.begun) - 1:04d}/inputs"
    assert sweeper.run(sweeper.config(trials=5)) == ExitCode.TRAINING_FAILED
    assert len(read_sweep(sweeper.folder / "s").trials) == 3


def test_points_that_diverge_are_results_as_long_as_others_do_not(sweeper: Sweeper) -> None:
    sweeper.workload = lambda params, run: logs_once(run, 1.0 if params["lr"] == 1 else math.nan)
    config = sweeper.config(space={"params.lr": [1, 2, 3, 4, 5, 6]}, search="grid", trials=None)
    assert sweeper.run(config) == 0
    config = sweeper.config(space={"params.lr": [2, 3, 4, 5, 6]}, search="grid", trials=None)
    assert sweeper.run(config, sweep_id="t") == ExitCode.TRAINING_FAILED
    assert len(read_sweep(sweeper.folder / "t").trials) == 3


def test_different_failures_are_results(sweeper: Sweeper) -> None:
    sweeper.workload = lambda params, run: f"bad {params['lr']}" if params["lr"] != 3 else follows_lr(params, run)
    assert sweeper.run(sweeper.config(space={"params.lr": [1, 2, 3, 4]}, search="grid", trials=None)) == 0
    states = [str(each.state) for each in read_sweep(sweeper.folder / "s").trials]
    assert states == ["failed", "failed", "complete", "failed"]


def test_a_value_that_is_no_number_is_a_failure(sweeper: Sweeper) -> None:
    sweeper.workload = lambda params, run: logs_once(run, math.nan)
    assert sweeper.run(sweeper.config(trials=1)) == ExitCode.TRAINING_FAILED
    (trial,) = read_sweep(sweeper.folder / "s").trials
    assert (trial.state, trial.error) == (TrialState.FAILED, "no value of loss is a finite number")
    assert "loss -" not in trial_line(replace(trial, value=math.nan), read_sweep(sweeper.folder / "s"))


def test_a_signal_interrupts_trials_and_a_resume_completes_them(sweeper: Sweeper) -> None:
    def stopped_at_2(params: dict[str, Any], run: StubRun) -> str:
        if params["lr"] == 2:
            signal.raise_signal(signal.SIGTERM)
            while not run.asked_to_end:
                pass
        return follows_lr(params, run)

    config = sweeper.config(space={"params.lr": [1, 2, 3]}, search="grid", trials=None)
    sweeper.workload = stopped_at_2
    assert sweeper.run(config) == ExitCode.PREEMPTED
    record = read_sweep(sweeper.folder / "s")
    assert [str(each.state) for each in record.trials] == ["complete", "interrupted"]
    assert record.status == "preempted"
    sweeper.workload = follows_lr
    assert sweeper.run(config, resume=True) == 0
    assert [(params["lr"], resumed) for params, resumed in sweeper.begun] == [
        (1, False),
        (2, False),
        (2, True),
        (3, False),
    ]


@pytest.mark.parametrize("wrong", [{"search": "tpa"}, {"prune": "ahsa"}, {"search": {"tpe": {"foo": 1}}}])
def test_a_wrong_sampler_or_pruner_is_found_before_anything_is_made(sweeper: Sweeper, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"^sweep\.(search|prune): "):
        sweeper.run(sweeper.config(**wrong))
    assert not (sweeper.folder / "s").exists()


def test_a_resume_with_another_space_names_both(sweeper: Sweeper) -> None:
    sweeper.workload = follows_lr
    assert sweeper.run(sweeper.config(trials=1, params={"pause": 3})) == 0
    with pytest.raises(UsageError) as caught:
        sweeper.run(sweeper.config(space={"params.lr": [1, 2]}, search="tpe"), resume=True)
    assert str(caught.value).splitlines()[1:] == [
        "  params.pause: was 3, is not set",
        '  sweep.search: was "random", is "tpe"',
        '  sweep.space.params.lr: was {"uniform": [0.0, 1.0]}, is [1, 2]',
    ]


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"prepare": {"accumulate": 2}}, "prepare.accumulate: was 1, is 2"),
        ({"cluster": {"ranks": 2}}, "sweep.ranks: was 1, is 2"),
    ],
)
def test_a_resume_with_trials_that_train_in_another_way_is_refused(
    tmp_path: Path, change: dict[str, Any], difference: str
) -> None:
    config = {"workload": "stub:train", "sweep": {"space": {"params.lr": [1]}, "trials": 1}}
    before = load_mapping(config, tmp_path)
    (tmp_path / "config.yaml").write_text(before.yaml_text)
    check_same(tmp_path, before)
    with pytest.raises(UsageError, match=difference):
        check_same(tmp_path, load_mapping({**config, **change}, tmp_path))


def test_a_resume_with_another_space_is_refused(sweeper: Sweeper) -> None:
    sweeper.workload = follows_lr
    assert sweeper.run(sweeper.config(trials=1)) == 0
    with pytest.raises(UsageError, match=r"s has other settings.*\n  sweep.metric: was \"loss\", is \"acc\""):
        sweeper.run(sweeper.config(metric="acc"), resume=True)
    assert sweeper.run(sweeper.config(trials=2), resume=True) == 0
    assert len(read_sweep(sweeper.folder / "s").trials) == 2


def test_a_sweep_has_one_driver_and_a_name_of_its_own(sweeper: Sweeper) -> None:
    sweeper.workload = follows_lr
    config = sweeper.config(trials=1)
    with pytest.raises(RunNotFound, match="there is no sweep named stub"):
        sweeper.run(config, resume=True, sweep_id=None)
    sweeper.run(config)
    with pytest.raises(UsageError, match="exists already; continue it with --resume"):
        sweeper.run(config)
    with RunWriter.reopen(sweeper.folder / "s", config.yaml_text), pytest.raises(RunLocked, match="sweep s is"):
        sweeper.run(config, resume=True)


def test_sweep_json_has_only_finite_numbers(sweeper: Sweeper) -> None:
    sweeper.workload = follows_lr
    sweeper.run(sweeper.config(trials=2))
    text = (sweeper.folder / "s" / "sweep.json").read_text()
    data = json.loads(text, parse_constant=pytest.fail)
    assert data["format"] == 1 and data["space"] == {"params.lr": {"kind": "uniform", "low": 0.0, "high": 1.0}}


def test_a_sweep_that_loses_its_store_saves_and_ends(sweeper: Sweeper, monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[Any] = []
    monkeypatch.setattr(RunWriter, "begin_upload", lambda upload, warn, loss: lost.append(loss))

    def taken(params: dict[str, Any], run: StubRun) -> str:
        if len(sweeper.begun) == 2:
            lost[0](RunLocked("sweep s is held by another driver"))
        return follows_lr(params, run)

    sweeper.workload = taken
    assert sweeper.run(sweeper.config(trials=9)) == ExitCode.LOCKED
    record = read_sweep(sweeper.folder / "s")
    assert (record.status, record.message) == ("failed", "sweep s is held by another driver")
    assert len(sweeper.begun) < 9


def test_no_trial_begins_before_its_point_is_in_the_store(sweeper: Sweeper, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = ["it took too long", "it took too long", ""]
    begun_at: list[int] = []

    def upload(upload: RunWriter, within_s: float) -> str:
        begun_at.append(len(sweeper.begun))
        return answers.pop(0) if answers else ""

    monkeypatch.setattr(RunWriter, "finish_upload", upload)
    sweeper.workload = follows_lr
    assert sweeper.run(sweeper.config(trials=1)) == 0
    assert begun_at == [0, 0, 0] and len(sweeper.begun) == 1
