"""Which points are chosen, which trials are ended early, and what the journal keeps."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any

import optuna
import pytest

from ddptrain.config.sections.sweeping import SweepConfig
from ddptrain.errors import UsageError
from ddptrain.sweep.records import TrialState
from ddptrain.sweep.study import _NOT_SAMPLERS, Study


def section(**fields: Any) -> SweepConfig:
    space = {"params.lr": {"log": [0.001, 1.0]}, "params.size": [16, [32, 8], "64"]}
    return SweepConfig.model_validate({"space": space, "trials": 8, "metric": "loss", "search": "random", **fields})


def points(study: Study, count: int) -> list[dict[str, Any]]:
    return [study.ask().params for _ in range(count)]


def test_points_lie_in_the_space_and_have_its_types(tmp_path: Path) -> None:
    space: dict[str, Any] = {
        "params.a": {"uniform": [0, 1], "step": 0.25},
        "params.b": {"int": [1, 9], "step": 4},
        "params.c": {"log_int": [1, 1000]},
        "params.d": [16, [32, 8], "64", None, {"x": 1}],
        "params.e": {"log": [0.001, 1.0]},
    }
    found = points(Study(tmp_path / "j", section(space=space)), 40)
    assert {each["params.a"] for each in found} <= {0.0, 0.25, 0.5, 0.75, 1.0}
    assert {each["params.b"] for each in found} == {1, 5, 9}
    assert all(type(each["params.c"]) is int and 1 <= each["params.c"] <= 1000 for each in found)
    assert all(each["params.d"] in space["params.d"] for each in found) and [32, 8] in [p["params.d"] for p in found]
    assert sum(each["params.e"] < 0.0316 for each in found) in range(10, 31)  # half of them, by the logarithm


def test_grid_tries_every_point_once_also_after_a_resume(tmp_path: Path) -> None:
    grid = section(search="grid", space={"params.a": [1, 2], "params.b": {"int": [1, 3]}}, trials=None)
    assert grid.grid_size == 6
    first = points(Study(tmp_path / "j", grid), 4)
    rest = points(Study(tmp_path / "j", grid), 2)
    expected = [{"params.a": a, "params.b": b} for a in (1, 2) for b in (1, 2, 3)]
    assert first + rest == expected


def test_grid_with_a_pruner_has_a_random_order_that_a_resume_keeps(tmp_path: Path) -> None:
    space = {"params.a": {"int": [1, 12]}}
    grid, other_seed = (section(search="grid", space=space, trials=None, prune="asha", seed=seed) for seed in (0, 1))
    found = [
        each["params.a"] for each in points(Study(tmp_path / "j", grid), 7) + points(Study(tmp_path / "j", grid), 5)
    ]
    assert sorted(found) == list(range(1, 13)) and found != sorted(found)
    again = [each["params.a"] for each in points(Study(tmp_path / "a", grid), 12)]
    assert again == found != [each["params.a"] for each in points(Study(tmp_path / "b", other_seed), 12)]


def test_grid_whose_pruner_changes_at_a_resume_still_tries_every_point_once(tmp_path: Path) -> None:
    space = {"params.a": {"int": [1, 12]}}
    plain, pruned = (section(search="grid", space=space, trials=None, prune=prune) for prune in ("none", "asha"))
    found = points(Study(tmp_path / "j", plain), 5) + points(Study(tmp_path / "j", pruned), 7)
    assert sorted(each["params.a"] for each in found) == list(range(1, 13))


def test_the_same_seed_chooses_the_same_points_and_a_resume_chooses_others(tmp_path: Path) -> None:
    one = points(Study(tmp_path / "a", section(seed=7)), 4)
    assert points(Study(tmp_path / "b", section(seed=7)), 4) == one
    assert points(Study(tmp_path / "c", section(seed=8)), 4) != one
    resumed = points(Study(tmp_path / "a", section(seed=7)), 4)
    assert not [each for each in resumed if each["params.lr"] in [other["params.lr"] for other in one]]


def test_asha_ends_trials_that_are_worse_at_the_same_number_of_values(tmp_path: Path) -> None:
    study = Study(tmp_path / "j", section(prune={"asha": {"reduction_factor": 2}}))
    numbers = [study.ask().number for _ in range(4)]
    ends = [study.report(number, 1, value) for number, value in zip(numbers, (1.0, 2.0, 3.0, 0.5), strict=True)]
    assert ends == [False, True, True, False]  # the first value has nothing to be compared with


def test_no_pruner_ends_nothing_and_a_known_index_is_ignored(tmp_path: Path) -> None:
    study = Study(tmp_path / "j", section(prune="none"))
    number = study.ask().number
    assert [study.report(number, index, 1e9) for index in (1, 2, 2, 1)] == [False] * 4


def test_results_are_in_the_journal_and_count_once(tmp_path: Path) -> None:
    study = Study(tmp_path / "j", section())
    done, failed, lost = study.ask(), study.ask(), study.ask()
    done.state, done.value, done.values, done.step = TrialState.COMPLETE, 2.0, [1.0, 3.0], 40
    failed.state, failed.error = TrialState.FAILED, "ValueError: no"
    study.tell(done)
    study.tell(failed)
    again = Study(tmp_path / "j", section())
    again.tell(done)  # the driver was killed before it wrote sweep.json
    records = again.records()
    assert [each.state for each in records] == [TrialState.COMPLETE, TrialState.FAILED, TrialState.INTERRUPTED]
    assert (records[0].value, records[0].values, records[0].step) == (2.0, [1.0, 3.0], 40)
    assert records[1].error == "ValueError: no"
    assert records[2].params == lost.params
    assert again.size == 3


def test_half_a_line_of_a_killed_driver_is_removed(tmp_path: Path) -> None:
    study = Study(tmp_path / "j", section())
    study.ask()
    with (tmp_path / "j").open("ab") as journal:
        journal.write(b'{"op_code":4,"worker')
    again = Study(tmp_path / "j", section())
    again.ask()
    assert Study(tmp_path / "j", section()).size == 2


def test_importance_names_the_field_that_matters(tmp_path: Path) -> None:
    study = Study(tmp_path / "j", section(space={"params.a": {"uniform": [0, 1]}, "params.b": {"uniform": [0, 1]}}))
    assert study.importance() is None
    for _ in range(30):
        trial = study.ask()
        trial.state, trial.value = TrialState.COMPLETE, float(trial.params["params.a"])
        study.tell(trial)
    shares = study.importance()
    assert shares is not None and next(iter(shares)) == "params.a"
    assert sum(shares.values()) == pytest.approx(1.0)


def test_importance_of_few_trials_names_the_field_that_matters(tmp_path: Path) -> None:
    space = {"params.lr": [1e-5, 1e-4, 0.1], "params.beta": {"uniform": [0, 1], "step": 0.25}, "params.x": ["a", "b"]}
    first = []
    for seed in range(20):
        study = Study(tmp_path / str(seed), section(space=space, search="random", seed=seed))
        for _ in range(20):
            trial = study.ask()
            trial.state = TrialState.COMPLETE
            trial.value = abs(math.log10(trial.params["params.lr"])) + 0.02 * trial.params["params.beta"]
            study.tell(trial)
        shares = study.importance()
        assert shares is not None
        first.append(next(iter(shares)))
    assert first.count("params.lr") >= 15


@pytest.mark.parametrize("name", ["tpe", "random", "nsgaii", "qmc", "TPESampler"])
def test_samplers_have_short_and_full_names(tmp_path: Path, name: str) -> None:
    assert Study(tmp_path / "j", section(search=name)).ask().params


def test_no_sampler_loads_a_pickle() -> None:
    """Who can write the journal, as that of a sweep in a store, could run code. Also of new versions of Optuna."""
    allowed = {name for name in dir(optuna.samplers) if name.endswith("Sampler")} - _NOT_SAMPLERS
    sources = {name: Path(inspect.getfile(getattr(optuna.samplers, name))).read_text() for name in allowed}
    assert {"TPESampler", "RandomSampler"} <= allowed
    assert [name for name, source in sources.items() if "pickle" in source] == []


@pytest.mark.parametrize("name", ["none", "median", "asha", "hyperband", "SuccessiveHalvingPruner"])
def test_pruners_have_short_and_full_names(tmp_path: Path, name: str) -> None:
    assert Study(tmp_path / "j", section(prune=name)).ask().params


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"search": "tpa"}, "sweep.search: there is no sampler tpa; did you mean tpe?"),
        ({"search": "cmaes"}, "sweep.search: there is no sampler cmaes; "),  # it loads pickles from the journal
        ({"search": "CmaEsSampler"}, "sweep.search: there is no sampler CmaEsSampler; "),
        ({"prune": "bruteforce"}, "sweep.prune: there is no pruner bruteforce"),
        ({"search": {"tpe": {"startup": 3}}}, "unexpected keyword argument 'startup'"),
        ({"prune": {"asha": {"reduction_factor": 0}}}, "sweep.prune: asha: "),
        ({"prune": "percentile"}, "required positional argument: 'percentile'"),
    ],
)
def test_unknown_methods_and_options_are_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        Study(tmp_path / "j", section(**fields))
    assert message in str(raised.value).replace("Did", "did")


@pytest.mark.parametrize("search", ["random", "tpe", "grid"])
def test_a_driver_killed_between_any_two_lines_of_the_journal_loses_no_result(tmp_path: Path, search: str) -> None:
    space = {"params.a": [1, 2], "params.b": [3, 4]}
    sweep = section(search=search, space=space)
    study = Study(tmp_path / "whole", sweep)
    points = []
    for number in range(3):
        record = study.ask()
        points.append(record.params)
        study.report(number, 1, float(number))
        record.state, record.value, record.values = TrialState.COMPLETE, float(number), [float(number)]
        record.run_ids = [f"s-000{number}"]
        study.tell(record)
    lines = (tmp_path / "whole").read_bytes().splitlines(keepends=True)
    told = [number for number, line in enumerate(lines, 1) if b'"state":1' in line]  # the end of each trial
    assert len(told) == 3
    for kept in range(len(lines) + 1):
        journal = tmp_path / f"first-{kept}"
        journal.write_bytes(b"".join(lines[:kept]) + b'{"half')
        again = Study(journal, sweep)
        found = again.records()
        complete = [each for each in found if each.state is TrialState.COMPLETE]
        assert [(each.value, each.run_ids, each.params) for each in complete] == [
            (float(number), [f"s-000{number}"], points[number]) for number in range(sum(line <= kept for line in told))
        ]
        assert all(each.params.keys() == space.keys() for each in [*found, again.ask()])


def test_a_decision_to_end_a_trial_survives_the_driver(tmp_path: Path) -> None:
    sweep = section(prune={"asha": {"reduction_factor": 2}})
    study = Study(tmp_path / "j", sweep)
    for value in (1.0, 2.0):
        number = study.ask().number
        ends = study.report(number, 1, value)
    assert ends
    again = Study(tmp_path / "j", sweep)
    assert [again.report(number, 1, value) for number, value in ((0, 1.0), (1, 2.0))] == [False, True]
