"""Decides which events users are notified of, and composes the messages, from the record of a retraining."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from ddptrain.config.wording import shorten
from ddptrain.model_registry.retrainings import RetrainRecord
from ddptrain.notify.sender import Kind, Message, code
from ddptrain.text_tables import clean_line, duration, number

if TYPE_CHECKING:
    from ddptrain.config.resolved import ResolvedConfig

_SUCCESSES = ("promoted", "unchanged")
_BAD = ("failed", "rejected", "late")  # statuses that are also events, and that a success ends
_NO_END = ("running", "skipped", "abandoned")  # `always` does not tell them: nothing was retrained
_KINDS: dict[str, Kind] = {
    "failed": "failure",
    "late": "failure",
    "rejected": "warning",
    "recovered": "success",
    "promoted": "success",
}
_TITLE_CHARS = 120
_REASON_CHARS = 500
_MAX_METRICS = 20
_MAX_LINES = 10  # of the gate, and of the difference of the data


def events_to_report(on: Collection[str], status: str, earlier: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the events of `on` that users are notified of now, the most important first; () for none.

    One message reports all of them. status: a status of a retraining, or "late".
    earlier: the statuses before it, oldest first, with "late" where users know it. Those before the last success have
    no effect. Leave out a status whose message nobody got: then it is reported again.
    """
    since_success: list[str] = []
    for each in earlier:
        since_success = [] if each in _SUCCESSES else [*since_success, *([each] if each in _BAD else [])]
    events = [
        *([status] if status in _BAD and _is_new(status, since_success) else []),
        *(["recovered"] if status in _SUCCESSES and since_success else []),
        *(["promoted"] if status == "promoted" else []),
        *(["always"] if status not in _NO_END else []),
    ]
    wanted = [event for event in events if event in on]
    return tuple(event for event in wanted if event != "always") or tuple(wanted)


def _is_new(status: str, since_success: Sequence[str]) -> bool:
    """Return whether users do not know this state yet. "late" and a failure do not end each other."""
    if status == "late":
        return "late" not in since_success
    ends = [each for each in since_success if each != "late"]
    return not ends or ends[-1] != status


def known_states(on: Collection[str], newest: Sequence[RetrainRecord], late_told: str) -> list[str]:
    """Return the statuses of earlier retrainings, oldest first, and "late" where users were notified so.

    newest: the retrainings, newest first. late_told: when users were notified that the model is late, or "".
    One that is continued counts as what it was before. A failure whose message nobody got is left out.
    """
    once, states = ("failed", "rejected"), []
    for each in reversed(newest):
        states += [event for event in each.told if event in once]
        if each.status not in once or each.status not in on or each.status in each.told:
            states.append(each.status)
    succeeded = max((each.ended_at or "" for each in newest if each.is_success), default="")
    return [*states, *(["late"] if late_told > succeeded else [])]


def compose(event: str, record: RetrainRecord, resolved: ResolvedConfig, duration_s: float | None = None) -> Message:
    """Return the message about a retraining, or about a model that is late (status "late").

    event: the first of events_to_report(). duration_s: of the start that has ended.
    """
    model = clean_line(record.model)
    version = "the new version" if record.version is None else f"version {record.version}"
    new_champion = f"{version} is the champion"
    still = f" Version {record.champion} is still the champion." if record.champion is not None else ""
    was = f" The champion before was version {record.champion}." if record.champion is not None else ""
    # Event -> what follows the name of the model in the title, and in the first line.
    texts = {
        "failed": (f"retraining failed: {clean_line(record.reason)}", f"the retraining failed.{still}"),
        "rejected": (f"{version} did not pass the gate", f"{version} did not pass the gate.{still}"),
        "late": (
            "no successful retraining in time",
            f"there was no successful retraining for longer than its schedule allows.{still}",
        ),
        "recovered": ("works again, the model is up to date", f"works again: the model is up to date.{still}"),
        "promoted": (new_champion, f"{new_champion}.{was}"),
    }
    if event == "recovered" and record.status == "promoted":
        texts[event] = (f"works again, {new_champion}", f"works again: {new_champion}.{was}")
    ended = f"retraining ended: {clean_line(record.status)}"
    title, first = texts.get(event, (ended, f"{ended}.{was if record.status == 'promoted' else still}"))
    blocks = [f"**{model}**: {first}"]
    blocks += [
        "\n".join([*([f"**{name}**", ""] if name else []), *lines])
        for name, lines in _lists(event, record, resolved, duration_s)
        if lines
    ]
    return Message(shorten(f"{model}: {title}", _TITLE_CHARS), "\n\n".join(blocks), _KINDS.get(event, "info"))


def _lists(
    event: str, record: RetrainRecord, resolved: ResolvedConfig, duration_s: float | None
) -> Iterator[tuple[str, list[str]]]:
    """Yield titles with their items."""
    reason = "" if record.status == "promoted" else shorten(record.reason, _REASON_CHARS)
    facts = [
        ("root cause" if event == "failed" else "reason", reason),
        ("exit code", str(record.exit_code) if record.exit_code else ""),
        ("run", record.run_id),
        ("duration", "" if duration_s is None else duration(duration_s)),
        ("host", record.host),
        ("configuration", str(resolved.path)),
    ]
    yield "", [f"- {name}: {code(value)}" for name, value in facts if value]
    candidate, champion = record.scores.get("candidate", {}), record.scores.get("champion", {})
    metrics = []
    for name in sorted({*candidate, *champion})[:_MAX_METRICS]:
        one, other = candidate.get(name, math.nan), champion.get(name, math.nan)
        gain = f" ({one - other:+.4g})" if math.isfinite(one) and math.isfinite(other) else ""
        metrics.append(f"- {code(name)}: {number(candidate.get(name))}, champion {number(champion.get(name))}{gain}")
    yield "Metrics", metrics
    for name, lines in (("Gate", [rule.reason for rule in record.gate]), ("Data", list(record.difference))):
        yield name, [f"- {code(shorten(line, _REASON_CHARS))}" for line in lines[:_MAX_LINES]]
    on_host = f" on {clean_line(record.host)}" if record.host else ""
    yield (
        f"To look further{on_host}, in {clean_line(os.getcwd())}",
        [f"- {code(command)}" for command in next_commands(event, record, resolved)],
    )


def next_commands(event: str, record: RetrainRecord, resolved: ResolvedConfig) -> list[str]:
    """Return the next commands to inspect the result or to act, for the working directory."""
    config, model = resolved.config, shlex.quote(record.model)
    models = "" if config.models.dir == "models" else f" --models-dir {shlex.quote(config.models.dir)}"
    runs = "" if config.results.dir == "runs" else f" --runs-dir {shlex.quote(config.results.dir)}"
    run = shlex.quote(record.run_id) + runs
    show_run = [f"ddptrain results show {run}"] if record.run_id else []
    show_model, history = f"ddptrain models show {model}{models}", f"ddptrain models show {model} --history{models}"
    again = f"ddptrain retrain {shlex.quote(str(resolved.path))}"
    match event if event in _BAD else record.status:
        case "failed":
            return [*show_run, *([f"ddptrain results logs {run}"] if record.run_id else []), again]
        case "rejected":
            promote = [f"ddptrain models promote {model} {record.version}{models}"] if record.version else []
            return [*show_run, show_model, *promote]
        case "late":
            return [history, "ddptrain schedule list", again]
        case "promoted":
            back = [f"ddptrain models rollback {model}{models}"] if record.champion is not None else []
            return [show_model, history, *back]
    return [*show_run, history]
