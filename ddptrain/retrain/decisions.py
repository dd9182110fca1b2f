"""Decides what `ddptrain retrain` does: skip, continue or begin; train on these data; promote. Reads no file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ddptrain.config.sections.retraining import GateRule, RetrainConfig
from ddptrain.config.wording import shorten
from ddptrain.errors import ExitCode
from ddptrain.model_registry.retrainings import GateOutcome, RetrainRecord, RetrainStatus, Stage
from ddptrain.retrain.fingerprint import TrainingData, missing_classes

# After these exit codes of the training, the next start continues it: the cause may have passed by then.
_CONTINUED_AFTER = frozenset({ExitCode.CLUSTER, ExitCode.HANG, ExitCode.LOCKED})
_MOST_STARTS = 10  # of a retraining that fails again and again
_TRAINED = frozenset({Stage.TRAIN, Stage.EVALUATE, Stage.GATE, Stage.PROMOTE, Stage.NOTIFY, Stage.CLEAN_UP})
_MOST_NAMED = 5
_ROUNDING = 1e-9  # relative: 0.3 - 0.1 is not 0.2 in floating-point numbers
_LEAST_SHARE = 0.5  # of the data of the champion; with fewer nothing is trained


@dataclass(frozen=True, slots=True)
class Choice:
    """What to do: skip (with the reason), continue a retraining, or begin a new one (both are empty).

    abandoned: a retraining that ends without a result, because the configuration has changed.
    """

    skip: str = ""
    continued: RetrainRecord | None = None
    abandoned: RetrainRecord | None = None


def choose(newest: Sequence[RetrainRecord], config: str, slot: str, *, force: bool) -> Choice:
    """Choose between skipping, continuing and beginning.

    newest: earlier retrainings, newest first. config: the digest of the configuration. slot: the scheduled time, or "".
    force begins a new retraining, unless one with the same configuration was interrupted.
    """
    newest = [record for record in newest if _had_model(record)]
    last = to_continue(newest)
    if last is not None:
        if last.config == config:
            return Choice(continued=last)
        return Choice(abandoned=last)
    last_slot = max((record.slot for record in newest if record.slot), default="")
    if slot and last_slot >= slot and not force:
        record = next(record for record in newest if record.slot == last_slot)
        return Choice(
            skip=f"the scheduled time {slot} is done: retraining {record.number} of {last_slot} {record.status}"
        )
    return Choice()


def to_continue(newest: Iterable[RetrainRecord]) -> RetrainRecord | None:
    """Return the retraining that the next start continues, None if there is none."""
    last = next((record for record in newest if _had_model(record) and record.status != RetrainStatus.ABANDONED), None)
    return last if last is not None and is_resumable(last) else None


def _had_model(record: RetrainRecord) -> bool:
    """Return whether the start got the lock of the model; one that waited for it in vain did nothing."""
    return bool(record.config or record.run_id)


def is_resumable(record: RetrainRecord) -> bool:
    """Return whether the next start continues a retraining: it was killed, interrupted, or failed for a passing cause.

    A training that has failed by its own code begins anew.
    """
    if record.status in (RetrainStatus.RUNNING, RetrainStatus.DEADLINE, RetrainStatus.INTERRUPTED):
        return True
    if record.status != RetrainStatus.FAILED or record.starts >= _MOST_STARTS:
        return False
    return record.stage in _TRAINED or record.exit_code in _CONTINUED_AFTER


def unchanged(
    newest: Sequence[RetrainRecord],
    champion: int | None,
    config: str,
    data: str,
    settings: RetrainConfig,
) -> str:
    """Return why no training is needed, or "" if it is needed.

    Compares with the last training, and with that of the champion. A version that was rolled back is not made again
    from the same data; a rejected one only if there is another champion since.

    champion: its version. data: the digest of the training data.
    """
    trained = [each for each in newest if each.status in (RetrainStatus.PROMOTED, RetrainStatus.REJECTED)]
    if settings.if_unchanged == "train" or not trained:
        return ""
    for record in trained:
        if (record.config, record.data) != (config, data) or not (record is trained[0] or record.version == champion):
            continue
        same = f"data, params and code are those of version {record.version}"
        if record.version == champion:
            return f"{same}, the champion"
        if record.status == RetrainStatus.PROMOTED:
            return f"{same}, which is not the champion any more"
        if record.champion == champion:
            return f"{same}, which the gate has rejected"
    return ""


def data_problem(old: RetrainRecord | None, new: TrainingData, *, has_sources: bool) -> str:
    """Return why the training data look wrong, or "".

    old: a retraining with the data of the champion, None if they are not known.
    """
    if not new.n_files:
        return "there are no training data" if has_sources else ""
    if old is None or not old.n_files:
        return ""
    many = old.n_files > 1
    before, now = (old.n_files, new.n_files) if many else (old.size_bytes, new.size_bytes)
    if now < before * _LEAST_SHARE:
        noun = f"{new.noun}s" if many else "bytes"
        return f"the training data have shrunk from {before:,} to {now:,} {noun}, to less than half"
    if new.noun == "image" and (gone := missing_classes(old.classes, new.classes)):
        named = ", ".join(shorten(name) for name in gone[:_MOST_NAMED])
        return (
            f"class {named} has no images any more" if len(gone) == 1 else f"classes have no images any more: {named}"
        )
    return ""


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
