"""The gate: every kind of condition and value, with known outcomes."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ddptrain.config.sections.retraining import GateRule
from ddptrain.retrain.decisions import judge, passed

NAN, INF = math.nan, math.inf
LOSS, ACCURACY = "val/loss", "val/accuracy"


def rule(**fields: Any) -> GateRule:
    return GateRule(**{"metric": LOSS, **fields})


def best(**fields: Any) -> GateRule:
    return GateRule(**{"metric": ACCURACY, "mode": "max", **fields})


# (name, rule, candidate's value or None for no such metric, champion's value, "none" for no champion or None for no
# such metric, whether it passes, a part of the reason)
CASES: list[tuple[str, GateRule, float | None, float | str | None, bool, str]] = [
    # Compared with the champion, lower is better.
    ("lower", rule(), 2.0, 2.5, True, "val/loss 2 is better than the champion's 2.5 by 0.5"),
    ("higher", rule(), 2.5, 2.0, False, "val/loss 2.5 is worse than the champion's 2 by 0.5"),
    ("tie", rule(), 2.0, 2.0, True, "val/loss 2 is equal to the champion's 2"),
    ("hardly worse", rule(), 2.0000001, 2.0, False, "worse than the champion's 2 by 1e-07"),
    ("negative", rule(), -3.0, -2.0, True, "better than"),
    ("zero against zero", rule(), 0.0, 0.0, True, "equal"),
    ("large", rule(), 123456.0, 200000.0, True, "val/loss 123,456 is better than the champion's 200,000 by 76,544"),
    # By a margin.
    ("margin reached", rule(better_by=0.5), 2.0, 2.5, True, "better than"),
    ("margin missed", rule(better_by=0.5), 2.1, 2.5, False, "by 0.4; it must be better by 0.5"),
    ("margin reached but for rounding", rule(better_by=0.1), 0.2, 0.3, True, "better than"),
    ("margin and tie", rule(better_by=0.1), 2.0, 2.0, False, "it must be better by 0.1"),
    ("margin and worse", rule(better_by=0.1), 2.5, 2.0, False, "worse than"),
    ("tolerance, worse", rule(better_by=-0.1), 2.05, 2.0, True, "it may be worse by 0.1"),
    ("tolerance reached", rule(better_by=-0.1), 2.1, 2.0, True, "it may be worse by 0.1"),
    ("tolerance exceeded", rule(better_by=-0.1), 2.2, 2.0, False, "worse than the champion's 2 by 0.2"),
    ("tolerance, better", rule(better_by=-0.1), 1.9, 2.0, True, "better than"),
    # Higher is better.
    ("max: higher", best(), 0.9, 0.8, True, "val/accuracy 0.9 is better than the champion's 0.8 by 0.1"),
    ("max: lower", best(), 0.7, 0.8, False, "worse than"),
    ("max: tie", best(), 0.8, 0.8, True, "equal"),
    ("max: margin reached", best(better_by=0.1), 0.9, 0.8, True, "better than"),
    ("max: margin missed", best(better_by=0.2), 0.9, 0.8, False, "it must be better by 0.2"),
    ("max: tolerance", best(better_by=-0.1), 0.75, 0.8, True, "it may be worse by 0.1"),
    # Absolute bounds.
    ("at_most kept", rule(at_most=2.6), 2.5, "none", True, "this is the first version"),
    ("at_most reached", rule(at_most=2.6), 2.6, "none", True, "first version"),
    ("at_most exceeded", rule(at_most=2.6), 2.7, "none", False, "val/loss 2.7 is above at_most, 2.6"),
    ("at_most exceeded although better", rule(at_most=2.6), 2.7, 3.0, False, "above at_most, 2.6"),
    ("at_most kept but worse", rule(at_most=2.6), 2.5, 2.0, False, "worse than"),
    ("at_least kept", best(at_least=0.5), 0.6, "none", True, "first version"),
    ("at_least reached", best(at_least=0.5), 0.5, "none", True, "first version"),
    ("at_least missed", best(at_least=0.5), 0.4, "none", False, "val/accuracy 0.4 is below at_least, 0.5"),
    ("at_least missed although better", best(at_least=0.5), 0.4, 0.3, False, "below at_least"),
    ("at_most of a metric where higher is better", best(at_most=0.99), 0.995, 0.9, False, "above at_most, 0.99"),
    ("bound of zero", rule(at_most=0.0), 0.1, "none", False, "above at_most, 0"),
    # Without comparison.
    ("against none: within", rule(against="none", at_most=3.0), 2.9, 1.0, True, "val/loss 2.9 is within its limits"),
    ("against none: outside", rule(against="none", at_most=3.0), 3.1, 9.0, False, "above at_most"),
    ("against none, no bounds", rule(against="none"), 9.9, 1.0, True, "within its limits"),
    # No champion, or nothing to compare with.
    ("first version", rule(), 9.0, "none", True, "val/loss 9; this is the first version"),
    ("first version with margin", rule(better_by=1.0), 9.0, "none", True, "this is the first version"),
    ("champion lacks the metric", rule(), 2.0, None, True, "the champion has no val/loss"),
    ("champion is NaN", rule(), 2.0, NAN, True, "the champion has val/loss NaN"),
    ("champion is infinite", rule(), 2.0, INF, True, "better than"),
    ("champion is infinite, higher is better", best(), 0.9, INF, False, "worse than"),
    # The candidate has no usable value.
    ("NaN", rule(), NAN, 2.0, False, "val/loss is nan"),
    ("NaN, first version", rule(), NAN, "none", False, "val/loss is nan"),
    ("NaN, both", rule(), NAN, NAN, False, "val/loss is nan"),
    ("NaN, against none", rule(against="none"), NAN, 2.0, False, "val/loss is nan"),
    ("infinite", rule(), INF, 2.0, False, "val/loss is inf"),
    ("minus infinite", rule(), -INF, 2.0, False, "val/loss is -inf"),
    ("infinite, higher is better", best(), INF, 0.5, False, "val/accuracy is inf"),
    ("missing", rule(), None, 2.0, False, "the evaluation has no val/loss (retrain.gate.metric); it has other"),
    (
        "missing, first version",
        rule(),
        None,
        "none",
        False,
        "the evaluation has no val/loss (retrain.gate.metric); it has other",
    ),
]


@pytest.mark.parametrize(
    ("given", "value", "reference", "passes", "reason"), [each[1:] for each in CASES], ids=[each[0] for each in CASES]
)
def test_condition(
    given: GateRule, value: float | None, reference: float | str | None, passes: bool, reason: str
) -> None:
    candidate = {"other": 1.0} if value is None else {given.metric: value, "other": 1.0}
    champion: dict[str, float] | None = None
    if reference != "none":
        champion = {"other": 1.0} if reference is None else {given.metric: float(reference)}
    (outcome,) = judge([given], candidate, champion)
    assert outcome.passed is passes
    assert reason in outcome.reason
    assert passed([outcome]) is passes


def test_all_conditions_must_pass() -> None:
    rules = [rule(), best(at_least=0.5)]
    good = judge(rules, {LOSS: 2.0, ACCURACY: 0.6}, {LOSS: 2.1, ACCURACY: 0.5})
    bad = judge(rules, {LOSS: 2.0, ACCURACY: 0.4}, {LOSS: 2.1, ACCURACY: 0.3})
    assert passed(good) and not passed(bad)
    assert [each.passed for each in bad] == [True, False]


def test_without_conditions_everything_passes() -> None:
    assert passed(judge([], {LOSS: NAN}, {LOSS: 1.0}))


def test_champion_that_cannot_be_evaluated_is_named_as_the_reason() -> None:
    (outcome,) = judge([rule(at_most=3.0)], {LOSS: 2.0}, None, "the champion is damaged")
    assert outcome.passed and outcome.reason == "val/loss 2; the champion is damaged"
    (outcome,) = judge([rule(at_most=1.0)], {LOSS: 2.0}, None, "the champion is damaged")
    assert not outcome.passed


def test_values_are_kept_for_the_record() -> None:
    (outcome,) = judge([rule()], {LOSS: 2.0}, {LOSS: 2.5})
    assert (outcome.metric, outcome.candidate, outcome.champion) == (LOSS, 2.0, 2.5)


def test_evaluation_without_any_metric_names_where_metrics_come_from() -> None:
    (outcome,) = judge([rule()], {}, None)
    assert outcome.reason == (
        "the evaluation has no val/loss (retrain.gate.metric); it has no metrics: give ctx.checkpoint metrics=..., "
        "or name a function in evaluate"
    )
