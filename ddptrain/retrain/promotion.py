"""The stages "evaluate", "gate" and "promote": whether the new version becomes the champion."""

from __future__ import annotations

from ddptrain.errors import ExitCode, UsageError, one_line
from ddptrain.model_registry.mirrors.mirrors import ModelMirrors
from ddptrain.retrain.candidate import Candidate
from ddptrain.retrain.gate import judge, passed
from ddptrain.retrain.records import RetrainStatus, Stage
from ddptrain.retrain.start import End, Start

_MOST_EVALUATIONS = 3


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


def outcome(start: Start) -> End:
    """Return the end of a retraining whose stage "promote" is complete."""
    record = start.began
    reasons = "; ".join(each.reason for each in record.gate if each.passed or not passed(record.gate))
    if passed(record.gate) or record.promoted_anyway:
        anyway = "" if passed(record.gate) else "promoted anyway; "
        return End(
            RetrainStatus.PROMOTED, ExitCode.SUCCEEDED, f"version {record.version} is the champion ({anyway}{reasons})"
        )
    failed = "; ".join(each.reason for each in record.gate if not each.passed)
    champion = f"version {record.champion} stays the champion" if record.champion else "there is no champion"
    return End(
        RetrainStatus.REJECTED, ExitCode.REJECTED, f"version {record.version} was rejected, {champion}: {failed}"
    )


def _evaluate(start: Start, candidate: Candidate) -> None:
    champion = start.champion()
    scores = candidate.evaluate(champion)
    start.out.stage(Stage.EVALUATE, scores.text, scores=scores.scores, notes=scores.notes, held_out=scores.held_out)
    start.update(
        stage=Stage.EVALUATE,
        scores=scores.scores,
        notes=scores.notes,
        held_out=scores.held_out,
        champion=champion,
    )


def _judge(start: Start) -> None:
    record = start.began
    why_none = "; ".join(record.notes) if record.champion is not None else ""
    outcomes = judge(start.settings.gate, record.scores.get("candidate", {}), record.scores.get("champion"), why_none)
    result = "passed" if passed(outcomes) else "rejected"
    reasons = "; ".join(each.reason for each in outcomes) or "there are no conditions"
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
        _update_mirrors(start, reason)
        text = f"{name} is the champion" + (", although the gate rejected it" if anyway else "")
    else:
        text = f"{name} is kept; " + (
            f"version {record.champion} stays the champion" if record.champion else "no champion"
        )
    start.out.stage(Stage.PROMOTE, text, version=version.version)
    start.update(stage=Stage.PROMOTE, version=version.version, promoted_anyway=anyway)


def _update_mirrors(start: Start, reason: str) -> None:
    """Tell the other registries of the new champion; a problem is only a warning. Raises Interrupted.

    If this process dies here, the next start does it again: the stage is not complete.
    """
    mirrors = ModelMirrors.of_config(start.resolved.config, start.resolved.import_folders)
    results = mirrors.update(
        start.registry, start.settings.model, reason=reason, should_stop=lambda: bool(start.signals.taken)
    )
    start.raise_if_signalled()
    for result in results:
        for note in result.notes:
            start.out.notice(note)
        if result.problem:
            start.out.notice(result.warning, level="warning")
