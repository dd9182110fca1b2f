"""Decides which events users are notified of, and composes the messages. The functions use no I/O and no clock."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal

from ddptrain.config.wording import shorten
from ddptrain.text_tables import clean_line, duration, number, plain_sections, plain_table

Kind = Literal["info", "success", "warning", "failure"]

_SUCCESSES = ("promoted", "unchanged")
_BAD = ("failed", "rejected", "late")  # statuses that are also events, and that a success ends
_NO_END = ("running", "skipped", "abandoned")  # `always` does not tell them: nothing was retrained
_KINDS: Mapping[str, Kind] = {
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrainReport:
    """All that a message states about one retraining, or about a model that is late.

    event: what is told, the first of events_to_tell(). status: the status of the retraining, or "late".
    reason: the root cause in one line. scores: "candidate" and "champion" -> metrics. gate: the reasons of the gate.
    difference: how the data differ from those of the champion. version: the version that the retraining created.
    champion: the version that was the champion before; None if there was none, or it is not known.
    folder: the working directory, for which runs_dir and models_dir are given.
    """

    event: str
    model: str
    status: str
    reason: str = ""
    scores: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    gate: Sequence[str] = ()
    difference: Sequence[str] = ()
    version: int | None = None
    champion: int | None = None
    run_id: str = ""
    duration_s: float | None = None
    exit_code: int | None = None
    host: str = ""
    folder: str = ""
    config: str = ""
    runs_dir: str = "runs"
    models_dir: str = "models"


@dataclass(frozen=True, slots=True)
class Message:
    """A message in the formats of the services: text, Markdown, or the content of an HTML body."""

    title: str
    text: str
    markdown: str
    html: str
    kind: Kind = "info"


def events_to_tell(on: Collection[str], status: str, earlier: str | Sequence[str] | None = None) -> tuple[str, ...]:
    """Return the events of `on` that users are told now, the most important first; () for none.

    One message tells all of them. status: a status of a retraining, or "late".
    earlier: the statuses before it, oldest first, with "late" where users were told so; or only the last one. Those
    before the last success have no effect. Leave out a status whose message nobody got: then it is told again.
    """
    before = [earlier] if isinstance(earlier, str) else list(earlier or ())
    since_success: list[str] = []
    for each in before:
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


def compose(report: RetrainReport) -> Message:
    """Return the message with title, plain text and Markdown."""
    return Message(title(report), plain_text(report), markdown(report), html(report), _KINDS.get(report.event, "info"))


def compose_test(host: str, config: str) -> Message:
    """Return the message of `ddptrain notify test`."""
    text = f"ddptrain can send messages from {clean_line(host)}. The configuration is {clean_line(config)}."
    return Message("Test message of ddptrain", text, text, escape(text))


def title(report: RetrainReport) -> str:
    """Return the subject: the model, what happened, and the root cause; at most 120 characters."""
    model, version = clean_line(report.model), _new_version(report)
    champion = f"version {report.version} is the champion" if report.status == "promoted" and report.version else ""
    what = {
        "failed": f"{model}: retraining failed",
        "rejected": f"{model}: {version} did not pass the gate",
        "late": f"{model}: no successful retraining in time",
        "recovered": f"{model}: works again, {champion or 'the model is up to date'}",
        "promoted": f"{model}: {champion or 'new champion'}",
    }.get(report.event, f"{model}: retraining ended: {clean_line(report.status)}")
    has_cause = report.event == "failed" and report.reason
    return shorten(f"{what}: {clean_line(report.reason)}" if has_cause else what, _TITLE_CHARS)


def plain_text(report: RetrainReport) -> str:
    """Return the body as plain text, with metrics in columns."""
    blocks = [_headline(report)]
    if facts := _facts(report):
        blocks.append(plain_sections([("Retraining", facts)]))
    if metrics := _metrics(report):
        blocks.append(plain_table([("METRIC", "CANDIDATE", "CHAMPION", "DIFFERENCE"), *metrics]))
    blocks += ["\n".join([name, *(f"  {line}" for line in lines)]) for name, lines in _lists(report)]
    if commands := next_commands(report):
        blocks.append("\n".join([f"{_look_further(report)}:", *(f"  {command}" for command in commands)]))
    return "\n\n".join(blocks)


def markdown(report: RetrainReport) -> str:
    """Return the body as Markdown: only bold, code and lists, which all chat services show."""
    blocks = [_headline(report, bold=True)]
    for name, items in _bullets(report):
        lines = [f"- {before}{_code(text)}{after}" for before, text, after in items]
        blocks.append("\n".join([*([f"**{name}**", ""] if name else []), *lines]))
    return "\n\n".join(blocks)


def html(report: RetrainReport) -> str:
    """Return the body as HTML for e-mail: paragraphs and lists."""
    blocks = [f"<p>{escape(_headline(report))}</p>"]
    for name, items in _bullets(report):
        lines = "".join(f"<li>{escape(''.join(item))}</li>\n" for item in items)
        blocks.append((f"<p><b>{escape(name)}</b></p>\n" if name else "") + f"<ul>\n{lines}</ul>")
    return "\n".join(blocks)


def next_commands(report: RetrainReport) -> list[str]:
    """Return the next commands to inspect the result or to act; they must be called in the folder of the report."""
    model = shlex.quote(report.model)
    models = _option("--models-dir", report.models_dir, "models")
    run = shlex.quote(report.run_id) + _option("--runs-dir", report.runs_dir, "runs") if report.run_id else ""
    show_run = [f"ddptrain results show {run}"] if run else []
    again = [f"ddptrain retrain {shlex.quote(report.config)}"] if report.config else []
    show_model = f"ddptrain models show {model}{models}"
    history = f"ddptrain models show {model} --history{models}"
    state = report.event if report.event in _BAD else report.status
    if state == "failed":
        return [*show_run, *([f"ddptrain results logs {run}"] if run else []), *again]
    if state == "rejected":
        anyway = f"ddptrain models promote {model} {report.version}{models}"
        return [*show_run, show_model, *([anyway] if report.version is not None else [])]
    if state == "late":
        return [history, "ddptrain schedule list", *again]
    if state == "promoted":
        back = [f"ddptrain models rollback {model}{models}"] if report.champion is not None else []
        return [show_model, history, *back]
    return [*show_run, history]


def _headline(report: RetrainReport, *, bold: bool = False) -> str:
    model, version = clean_line(report.model), _new_version(report)
    model = f"**{model}**" if bold else model
    champion = f" Version {report.champion} is still the champion." if report.champion is not None else ""
    if report.event == "failed":
        return f"The retraining of {model} failed.{champion}"
    if report.event == "rejected":
        return f"{version[0].upper()}{version[1:]} of {model} did not pass the gate.{champion}"
    if report.event == "late":
        return f"{model} has had no successful retraining for longer than its schedule allows.{champion}"
    if report.status == "promoted":
        again = "works again: " if report.event == "recovered" else ""
        before = f" The champion before was version {report.champion}." if report.champion is not None else ""
        return f"{model}: {again}{version} is the champion.{before}"
    if report.event == "recovered":
        return f"{model} works again: the model is up to date.{champion}"
    return f"The retraining of {model} ended with the status {clean_line(report.status)}.{champion}"


def _new_version(report: RetrainReport) -> str:
    return "the new version" if report.version is None else f"version {report.version}"


def _facts(report: RetrainReport) -> list[tuple[str, str]]:
    """Return names and values, without those that are not known, or that say only that all is well."""
    reason = "" if report.status == "promoted" else shorten(report.reason, _REASON_CHARS)
    facts = [
        ("root cause" if report.event == "failed" else "reason", reason),
        ("exit code", str(report.exit_code) if report.exit_code else ""),
        ("run", report.run_id),
        ("duration", "" if report.duration_s is None else duration(report.duration_s)),
        ("host", report.host),
        ("configuration", report.config),
    ]
    return [(name, clean_line(value)) for name, value in facts if value]


def _metrics(report: RetrainReport) -> list[tuple[str, str, str, str]]:
    """Return rows of metric, candidate, champion and their difference; what is missing is "-"."""
    candidate, champion = report.scores.get("candidate", {}), report.scores.get("champion", {})
    rows = []
    for name in sorted({*candidate, *champion})[:_MAX_METRICS]:
        one, other = candidate.get(name), champion.get(name)
        is_known = one is not None and other is not None and math.isfinite(one) and math.isfinite(other)
        difference = f"{one - other:+.4g}" if is_known and one is not None and other is not None else number(None)
        rows.append((clean_line(name), number(one), number(other), difference))
    return rows


def _lists(report: RetrainReport) -> list[tuple[str, list[str]]]:
    found = [("Gate", report.gate), ("Data", report.difference)]
    return [
        (name, [clean_line(shorten(line, _REASON_CHARS)) for line in lines[:_MAX_LINES]])
        for name, lines in found
        if lines
    ]


def _bullets(report: RetrainReport) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Return titles with their items: the text that is shown as it is, what stands before it, and what follows."""
    parts = [("", [(f"{name}: ", value, "") for name, value in _facts(report)])]
    compared = [
        ("", name, f": {candidate}, champion {champion}" + (f" ({difference})" if difference != number(None) else ""))
        for name, candidate, champion, difference in _metrics(report)
    ]
    parts.append(("Metrics", compared))
    parts += [(name, [("", line, "") for line in lines]) for name, lines in _lists(report)]
    parts.append((_look_further(report), [("", command, "") for command in next_commands(report)]))
    return [(name, items) for name, items in parts if items]


def _look_further(report: RetrainReport) -> str:
    host = f" on {clean_line(report.host)}" if report.host else ""
    return f"To look further{host}" + (f", in {clean_line(report.folder)}" if report.folder else "")


def _option(name: str, value: str, default: str) -> str:
    return "" if value == default else f" {name} {shlex.quote(value)}"


def _code(text: str) -> str:
    """Return the text as inline code, so that underscores and stars stay as they are."""
    return "`" + text.replace("`", "'") + "`"
