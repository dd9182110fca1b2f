"""Which points are chosen, which trials are ended early, and what a rebuilt study knows."""

from __future__ import annotations

from typing import Any

import pytest

from ddptrain.config.sections.sweeping import SweepConfig
from ddptrain.errors import UsageError
from ddptrain.results.sweep_record import TrialRecord, TrialState
from ddptrain.sweep.study import Study


def section(**fields: Any) -> SweepConfig:
    space = {"params.lr": {"log": [0.001, 1.0]}, "params.size": [16, [32, 8], "64"]}
    return SweepConfig.model_validate({"space": space, "trials": 8, "metric": "loss", "search": "random", **fields})


def points(study: Study, count: int) -> list[dict[str, Any]]:
    return [study.ask().params for _ in range(count)]


def test_points_lie_in_the_space_and_have_its_types() -> None:
    space: dict[str, Any] = {
        "params.a": {"uniform": [0, 1], "step": 0.25},
        "params.b": {"int": [1, 9], "step": 4},
        "params.c": {"log_int": [1, 1000]},
        "params.d": [16, [32, 8], "64", None, {"x": 1}],
        "params.e": {"log": [0.001, 1.0]},
    }
    found = points(Study(section(space=space)), 40)
    assert {each["params.a"] for each in found} <= {0.0, 0.25, 0.5, 0.75, 1.0}
    assert {each["params.b"] for each in found} == {1, 5, 9}
    assert all(type(each["params.c"]) is int and 1 <= each["params.c"] <= 1000 for each in found)
    assert all(each["params.d"] in space["params.d"] for each in found) and [32, 8] in [p["params.d"] for p in found]
    assert sum(each["params.e"] < 0.0316 for each in found) in range(10, 31)  # half of them, by the logarithm


def asked(study: Study, count: int, state: TrialState = TrialState.COMPLETE) -> list[TrialRecord]:
    """Choose points, and give each a result."""
    records = [study.ask() for _ in range(count)]
    for record in records:
        record.state, record.value = state, float(record.number)
        if state.is_final:
            study.tell(record)
    return records


def test_grid_tries_every_point_once_also_after_a_resume() -> None:
    grid = section(search="grid", space={"params.a": [1, 2], "params.b": {"int": [1, 3]}}, trials=None)
    assert grid.grid_size == 6
    first = asked(Study(grid), 4)
    rest = asked(Study(grid, first), 2)
    expected = [{"params.a": a, "params.b": b} for a in (1, 2) for b in (1, 2, 3)]
    assert [each.params for each in first + rest] == expected
    assert [each.number for each in rest] == [4, 5]


def test_grid_with_a_pruner_has_a_random_order_that_a_resume_keeps() -> None:
    space = {"params.a": {"int": [1, 12]}}
    grid = section(search="grid", space=space, trials=None, prune="asha")
    first = asked(Study(grid), 7)
    found = [each.params["params.a"] for each in first + asked(Study(grid, first), 5)]
    assert sorted(found) == list(range(1, 13)) and found != sorted(found)
    again = [each["params.a"] for each in points(Study(grid), 12)]
    assert again == found
    plain = section(search="grid", space=space, trials=None, prune="none")
    rest = [each.params["params.a"] for each in asked(Study(plain, first), 5)]  # the pruner may change at a resume
    assert sorted([*rest, *(each.params["params.a"] for each in first)]) == list(range(1, 13))


def test_the_same_seed_chooses_the_same_points_and_a_resume_chooses_others() -> None:
    seven, eight = ({"tpe": {"seed": seed}} for seed in (7, 8))
    one = asked(Study(section(search=seven)), 4)
    values = [each.params["params.lr"] for each in one]
    assert [each["params.lr"] for each in points(Study(section(search=seven)), 4)] == values
    assert [each["params.lr"] for each in points(Study(section(search=eight)), 4)] != values
    resumed = points(Study(section(search=seven), one), 4)
    assert not {each["params.lr"] for each in resumed} & set(values)


def test_asha_ends_trials_that_are_worse_at_the_same_number_of_values() -> None:
    study = Study(section(prune={"asha": {"reduction_factor": 2}}))
    numbers = [study.ask().number for _ in range(4)]
    ends = [study.report(number, 1, value) for number, value in zip(numbers, (1.0, 2.0, 3.0, 0.5), strict=True)]
    assert ends == [False, True, True, False]  # the first value has nothing to be compared with


def test_no_pruner_ends_nothing_and_a_known_index_is_ignored() -> None:
    study = Study(section(prune="none"))
    number = study.ask().number
    assert [study.report(number, index, 1e9) for index in (1, 2, 2, 1)] == [False] * 4


def test_rebuilt_pruner_compares_with_the_trials_of_earlier_drivers() -> None:
    asha = section(prune={"asha": {"reduction_factor": 2}})
    before = asked(Study(asha), 2)
    interrupted = asked(Study(asha, before), 1, TrialState.INTERRUPTED)
    known = {0: [1.0], 1: [2.0], 2: [3.0]}
    study = Study(asha, before + interrupted, lambda trial: known[trial.number])
    assert study.report(2, 1, 3.0) is True  # a known value: the decision is that of the comparison
    new = study.ask()
    assert new.number == 3 and study.report(3, 1, 0.5) is False


@pytest.mark.parametrize("name", ["tpe", "random", "nsgaii", "qmc", "TPESampler"])
def test_samplers_have_short_and_full_names(name: str) -> None:
    Study(section(search=name))


@pytest.mark.parametrize("name", ["none", "median", "asha", "hyperband", "SuccessiveHalvingPruner"])
def test_pruners_have_short_and_full_names(name: str) -> None:
    Study(section(prune=name))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"search": "tpa"}, "sweep.search: there is no sampler tpa; did you mean tpe?"),
        ({"prune": "bruteforce"}, "sweep.prune: there is no pruner bruteforce"),
        ({"search": {"tpe": {"startup": 3}}}, "unexpected keyword argument 'startup'"),
        ({"prune": {"asha": {"reduction_factor": 0}}}, "sweep.prune: asha: "),
        ({"prune": "percentile"}, "required positional argument: 'percentile'"),
    ],
)
def test_unknown_methods_and_options_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        Study(section(**fields))
    assert message in str(raised.value).replace("Did", "did")


def test_a_decision_to_end_a_trial_survives_the_driver() -> None:
    sweep = section(prune={"asha": {"reduction_factor": 2}})
    study, records = Study(sweep), []
    for value in (1.0, 2.0):
        records.append(study.ask())
        ends = study.report(records[-1].number, 1, value)
    assert ends
    again = Study(sweep, records, lambda trial: [[1.0], [2.0]][trial.number])
    assert [again.report(number, 1, value) for number, value in ((0, 1.0), (1, 2.0))] == [False, True]
