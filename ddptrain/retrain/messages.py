"""Decides which events users are notified of, and composes the messages, from the record of a retraining."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from ddptrain.config.wording import shorten
from ddptrain.model_registry.retrainings import RetrainRecord
from ddptrain.notify.sender import Kind, Message, code, facts
from ddptrain.text_tables import clean_line, duration, number

if TYPE_CHECKING:
    from ddptrain.config.resolved import ResolvedConfig

_SUCCESSES = ("promoted", "unchanged")
_BAD = ("failed", "rejected")  # statuses that are also events, and that a success ends
_NO_END = ("running", "skipped", "abandoned")  # `always` does not tell them: nothing was retrained
_KINDS: dict[str, Kind] = {"failed": "failure", "rejected": "warning", "recovered": "success", "promoted": "success"}
_REASON_CHARS = 500
_MAX_METRICS = 20
_MAX_LINES = 10  # of the gate, and of the difference of the data


def events_to_report(on: Collection[str], status: str, earlier: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the events of `on` that users are notified of now, the most important first; () for none.

    One message reports all of them. status: of a retraining. earlier: the statuses before it, oldest first. Those
    before the last success have no effect. Leave out a status whose message nobody got: then it is reported again.
    """
    bad: list[str] = []  # since the last success
    for each in earlier:
        bad = [] if each in _SUCCESSES else [*bad, *([each] if each in _BAD else [])]
    succeeds = status in _SUCCESSES
    events = [
        *([status] if status in _BAD and bad[-1:] != [status] else []),
        *(["recovered"] if succeeds and bad else []),
        *(["promoted"] if status == "promoted" else []),
        *(["finished"] if succeeds else []),
        *(["always"] if status not in _NO_END else []),
    ]
    wanted = [event for event in events if event in on]
    return tuple(event for event in wanted if event not in ("finished", "always")) or tuple(wanted[:1])


def known_states(on: Collection[str], newest: Sequence[RetrainRecord]) -> list[str]:
    """Return the statuses of earlier retrainings, oldest first, for events_to_report().

    newest: the retrainings, newest first. One that is continued counts as what it was before. A failure whose message
    nobody got is left out.
    """
    states = []
    for each in reversed(newest):
        states += [event for event in each.told if event in _BAD]
        if each.status not in _BAD or each.status not in on or each.status in each.told:
            states.append(each.status)
    return states


def compose(event: str, record: RetrainRecord, resolved: ResolvedConfig, duration_s: float | None = None) -> Message:
    """Return the message about a retraining.

    event: the first of events_to_report(). duration_s: of the start that has ended.
    """
    version = "the new version" if record.version is None else f"version {record.version}"
    new_champion = f"{version} is the champion"
    still = f" Version {record.champion} is still the champion." if record.champion is not None else ""
    was = f" The champion before was version {record.champion}." if record.champion is not None else ""
    up_to_date = new_champion if record.status == "promoted" else "the model is up to date"
    after = was if record.status == "promoted" else still
    match event:  # what follows the name of the model in the title, and in the first line
        case "failed":
            title, first = f"retraining failed: {clean_line(record.reason)}", f"the retraining failed.{still}"
        case "rejected":
            title, first = f"{version} did not pass the gate", f"{version} did not pass the gate.{still}"
        case "recovered":
            title, first = f"works again, {up_to_date}", f"works again: {up_to_date}.{after}"
        case "promoted":
            title, first = new_champion, f"{new_champion}.{was}"
        case _:
            title = f"retraining ended: {clean_line(record.status)}"
            first = f"{title}.{after}"
    reason = "" if record.status == "promoted" else shorten(record.reason, _REASON_CHARS)
    about = {
        ("root cause" if event == "failed" else "reason"): reason,
        "exit code": str(record.exit_code or ""),
        "run": record.run_id,
        "duration": "" if duration_s is None else duration(duration_s),
        "host": record.host,
        "configuration": str(resolved.path),
    }
    candidate, champion = record.scores.get("candidate", {}), record.scores.get("champion", {})
    metrics = []
    for name in sorted({*candidate, *champion})[:_MAX_METRICS]:
        one, other = candidate.get(name, math.nan), champion.get(name, math.nan)
        gain = f" ({one - other:+.4g})" if math.isfinite(one) and math.isfinite(other) else ""
        metrics.append(f"{code(name)}: {number(candidate.get(name))}, champion {number(champion.get(name))}{gain}")
    lists = {
        "Metrics": metrics,
        "Gate": [code(shorten(rule.reason, _REASON_CHARS)) for rule in record.gate[:_MAX_LINES]],
        "Data": [code(shorten(line, _REASON_CHARS)) for line in record.difference[:_MAX_LINES]],
    }
    return Message.of(record.model, title, first, facts(about), lists, _KINDS.get(event, "info"))
