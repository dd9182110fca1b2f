"""Decides whether a new version of a model may become the champion."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ddptrain.config.sections.retraining import GateRule
from ddptrain.model_registry.retrainings import GateOutcome

_ROUNDING = 1e-9  # relative: 0.3 - 0.1 is not 0.2 in floating-point numbers


def judge(
    rules: Sequence[GateRule], candidate: Mapping[str, float], champion: Mapping[str, float] | None, why_none: str = ""
) -> tuple[GateOutcome, ...]:
    """Check each rule of the gate; the candidate may be promoted if all have passed.

    candidate, champion: metrics of the evaluation. champion is None if there is none to compare with: for the first
    version, or because it cannot be evaluated; then only the absolute bounds count, and why_none is part of the reason.

    A candidate without the metric, or with NaN or an infinite value, never passes. A champion without the metric, or
    with NaN, is not compared with. An equal value passes if better_by is 0.
    """
    return tuple(_judge_rule(rule, candidate, champion, why_none) for rule in rules)


def passed(outcomes: Sequence[GateOutcome]) -> bool:
    """Return whether all rules have passed."""
    return all(outcome.passed for outcome in outcomes)


def _judge_rule(
    rule: GateRule, candidate: Mapping[str, float], champion: Mapping[str, float] | None, why_none: str
) -> GateOutcome:
    name = rule.metric
    value = candidate.get(name)
    reference = champion.get(name) if champion is not None else None
    if value is None:
        known = ", ".join(sorted(candidate)) or "no metrics"
        advice = "" if candidate else ": give ctx.checkpoint metrics=..., or name a function in evaluate"
        reason = f"the evaluation has no {name} (retrain.gate.metric); it has {known}{advice}"
        return GateOutcome(name, False, reason, None, reference)
    if not math.isfinite(value):
        return GateOutcome(name, False, f"{name} is {value:g}", value, reference)
    if bound := _broken_bound(rule, value):
        return GateOutcome(name, False, f"{name} {_figure(value)} is {bound}", value, reference)
    if rule.against == "none":
        return GateOutcome(name, True, f"{name} {_figure(value)} is within its limits", value, None)
    if champion is None:
        return GateOutcome(
            name, True, f"{name} {_figure(value)}; {why_none or 'this is the first version'}", value, None
        )
    if reference is None or math.isnan(reference):
        has = f"has no {name}" if reference is None else f"has {name} NaN"
        return GateOutcome(name, True, f"{name} {_figure(value)}; the champion {has}", value, reference)
    return _compare(rule, value, reference)


def _broken_bound(rule: GateRule, value: float) -> str:
    """Return which absolute bound a value violates, or ""."""
    if rule.at_most is not None and value > rule.at_most:
        return f"above at_most, {_figure(rule.at_most)}"
    if rule.at_least is not None and value < rule.at_least:
        return f"below at_least, {_figure(rule.at_least)}"
    return ""


def _compare(rule: GateRule, value: float, reference: float) -> GateOutcome:
    gain = reference - value if rule.mode == "min" else value - reference
    slack = _ROUNDING * max(abs(reference), abs(value), abs(rule.better_by)) if math.isfinite(reference) else 0.0
    ok = gain >= rule.better_by - slack if rule.better_by else gain >= 0
    better = "equal to" if value == reference else "better than" if gain > 0 else "worse than"
    by = f" by {_figure(abs(gain))}" if value != reference else ""
    text = f"{rule.metric} {_figure(value)} is {better} the champion's {_figure(reference)}{by}"
    required = f"; it must be better by {_figure(rule.better_by)}" if not ok and rule.better_by > 0 else ""
    allowed = f"; it may be worse by {_figure(-rule.better_by)}" if rule.better_by < 0 and gain < 0 else ""
    return GateOutcome(rule.metric, ok, f"{text}{required}{allowed}", value, reference)


def _figure(value: float) -> str:
    """Four significant digits, all digits before the point of a large number."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
