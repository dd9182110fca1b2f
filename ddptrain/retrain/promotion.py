"""The stages "evaluate", "gate" and "promote": whether the new version becomes the champion."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddptrain.config.plugin_names import is_built_in
from ddptrain.config.sections.retraining import GateRule
from ddptrain.errors import ExitCode, UsageError, one_line
from ddptrain.model_registry.add_run import Retrained, add_output, add_run
from ddptrain.model_registry.model_reader import open_version
from ddptrain.model_registry.records import RegistryDamaged, VersionRecord
from ddptrain.model_registry.retrainings import GateOutcome, RetrainRecord, RetrainStatus, Stage
from ddptrain.results.checkpoints.verification import verify
from ddptrain.results.layout import BEST
from ddptrain.results.lookup import RunView, find_checkpoint
from ddptrain.retrain.start import Start, output_state, read_metrics

if TYPE_CHECKING:
    from ddptrain.retrain.evaluation import Evaluation


_MOST_EVALUATIONS = 3
_ROUNDING = 1e-9  # relative: 0.3 - 0.1 is not 0.2 in floating-point numbers


class Candidate:
    """The model that the run of a retraining has trained."""

    def __init__(self, start: Start, view: RunView) -> None:
        self._start, self._view = start, view
        self._config = start.resolved.config

    def evaluate(self, champion: int | None) -> Evaluation:
        """Score the candidate and the champion.

        With an evaluation function both are scored on the same held-out data, by the ranks. Otherwise the metrics are
        those of their trainings. Raises the errors of the evaluation's launch; UsageError, StoreError.
        """
        version, folder, note = self._champion(champion)
        if self._config.script is None and (is_built_in(self._config.workload) or self._config.evaluate):
            return self._evaluate_on_ranks(folder, note)
        from ddptrain.retrain.evaluation import Evaluation

        notes = [note] if note else []
        scores: dict[str, Mapping[str, float]] = {"candidate": self._training_metrics()}
        if version is not None and folder is not None:
            scores["champion"] = version.evaluation or version.metrics
            notes.append("metrics of the trainings, as there is no evaluate function")
        return Evaluation(scores, notes=tuple(notes))

    def add(self) -> VersionRecord:
        """Add the candidate to the registry, once. Raises UsageError, StoreError."""
        record = self._start.began
        known = Retrained(record.data, record.held_out, record.config, record.scores.get("candidate", {}))
        registry, model = self._start.registry, self._start.settings.model
        script = self._config.script
        if script is None:
            return add_run(registry, model, self._view, BEST, known)
        if script.checkpoint is None:
            raise UsageError("workload.checkpoint is missing: it names the file or folder with the script's model")
        output = self._written_by_run(script.checkpoint, "workload.checkpoint")
        return add_output(registry, model, self._view, output, self._training_metrics(), known)

    def _champion(self, number: int | None) -> tuple[VersionRecord | None, Path | None, str]:
        """Return the champion, its verified folder, and why there is none."""
        if number is None:
            return None, None, ""
        registry, model = self._start.registry, self._start.settings.model
        try:
            version = registry.version(model, number)
            return version, open_version(registry, version), ""
        except (RegistryDamaged, UsageError) as error:
            note = f"the champion cannot be evaluated: {one_line(error)}"
            self._start.out.notice(note, level="warning")
            return None, None, note

    def _evaluate_on_ranks(self, champion: Path | None, note: str) -> Evaluation:
        from ddptrain.retrain.evaluation import EvaluationTarget, evaluate

        targets = [EvaluationTarget("candidate", self._view.layout.root)]
        if champion is not None:
            targets.append(EvaluationTarget("champion", champion))
        evaluation = evaluate(self._start.resolved, targets, output=self._start.options.output)
        return replace(evaluation, notes=tuple(text for text in (note, *evaluation.notes) if text))

    def _training_metrics(self) -> Mapping[str, float]:
        """Return the metrics of the best checkpoint, or those that the script has written."""
        script = self._config.script
        if script is None:
            return verify(find_checkpoint(self._view.layout, BEST)).metrics
        if script.metrics is None:
            raise UsageError(
                "workload.metrics is missing: it names the JSON file with the metrics of the script's model"
            )
        return read_metrics(self._written_by_run(script.metrics, "workload.metrics"))

    def _written_by_run(self, path: str, field: str) -> Path:
        """Return a file or folder of the script. Raises UsageError if the run has not written it."""
        state = output_state(path)
        if not state or state == self._start.began.outputs.get(field):
            why = "is still as it was before the run" if state else "does not exist"
            raise UsageError(f"{field} is {path}, which {why}: the script has to write it, below {Path.cwd()}")
        return Path(path).expanduser()


def decide(start: Start) -> None:
    """Evaluate, judge and promote; again if another process changes the champion meanwhile.

    Raises the errors of the evaluation; UsageError, StoreError.
    """
    for number in range(1, _MOST_EVALUATIONS + 1):
        candidate = Candidate(start, start.view())
        if not start.is_done(Stage.EVALUATE):
            _evaluate(start, candidate)
        if not start.is_done(Stage.GATE):
            _judge(start)
        if start.is_done(Stage.PROMOTE):
            return
        try:
            _promote(start, candidate)
            return
        except UsageError as error:
            if number == _MOST_EVALUATIONS or start.champion() == start.began.champion:
                raise
            start.out.notice(f"{one_line(error)}; evaluating again", level="warning")
            start.update(stage=Stage.TRAIN)


def outcome(start: Start) -> RetrainRecord:
    """Return the end of a retraining whose stage "promote" is complete."""
    record = start.began
    reasons = "; ".join(rule.reason for rule in record.gate if rule.passed or not passed(record.gate))
    if passed(record.gate) or record.promoted_anyway:
        anyway = "" if passed(record.gate) else "promoted anyway; "
        reason = f"version {record.version} is the champion ({anyway}{reasons})"
        return start.ended(RetrainStatus.PROMOTED, ExitCode.SUCCEEDED, reason)
    failed = "; ".join(rule.reason for rule in record.gate if not rule.passed)
    champion = f"version {record.champion} stays the champion" if record.champion else "there is no champion"
    reason = f"version {record.version} was rejected, {champion}: {failed}"
    return start.ended(RetrainStatus.REJECTED, ExitCode.REJECTED, reason)


def _evaluate(start: Start, candidate: Candidate) -> None:
    champion = start.champion()
    evaluation = candidate.evaluate(champion)
    results: dict[str, Any] = {"scores": evaluation.scores, "notes": evaluation.notes, "held_out": evaluation.held_out}
    start.out.stage(Stage.EVALUATE, scores_text(evaluation), **results)
    start.update(stage=Stage.EVALUATE, champion=champion, **results)


def scores_text(evaluation: Evaluation) -> str:
    """Return the scores in one line, as "val/loss 2.31 (champion 2.35)"."""
    champion = evaluation.scores.get("champion", {})
    parts = []
    for name, value in sorted(evaluation.scores["candidate"].items()):
        beside = f" (champion {champion[name]:.4g})" if name in champion else ""
        parts.append(f"{name} {value:.4g}{beside}")
    return "; ".join([", ".join(parts) or "no metrics", *evaluation.notes])


def _judge(start: Start) -> None:
    record = start.began
    why_none = "; ".join(record.notes) if record.champion is not None else ""
    outcomes = judge(start.settings.gate, record.scores.get("candidate", {}), record.scores.get("champion"), why_none)
    result = "passed" if passed(outcomes) else "rejected"
    reasons = "; ".join(outcome.reason for outcome in outcomes) or "there are no conditions"
    start.out.stage(Stage.GATE, f"{result}: {reasons}", passed=passed(outcomes), conditions=outcomes)
    start.update(stage=Stage.GATE, gate=outcomes)


def _promote(start: Start, candidate: Candidate) -> None:
    """Add the candidate as a version, also if it was rejected; make it the champion if it has passed."""
    record = start.began
    version = candidate.add()
    name = f"version {version.version}"
    anyway = not passed(record.gate) and bool(start.options.promote_anyway)
    if passed(record.gate) or anyway:
        reason = f"retraining {record.number}" + (f" for {record.slot}" if record.slot else "")
        if anyway:
            reason += f"; rejected by the gate, promoted anyway: {start.options.promote_anyway}"
        start.registry.promote(start.settings.model, version.version, reason, expected=record.champion)
        text = f"{name} is the champion" + (", although the gate rejected it" if anyway else "")
    else:
        failed = "; ".join(rule.reason for rule in record.gate if not rule.passed)
        start.registry.reject(start.settings.model, version.version, failed)
        text = f"{name} is kept; " + (
            f"version {record.champion} stays the champion" if record.champion else "no champion"
        )
    start.out.stage(Stage.PROMOTE, text, version=version.version)
    start.update(stage=Stage.PROMOTE, version=version.version, promoted_anyway=anyway)


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
