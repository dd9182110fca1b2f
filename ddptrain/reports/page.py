"""The page about runs, a sweep or models: its content, and the templates that make HTML of it.

The same templates write the file of `ddptrain results report` and the pages of `ddptrain ui`. Nothing from a run
directory reaches a page but through `safe_text`, and autoescape follows.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from ddptrain.config import plugin_names
from ddptrain.config.load import load_data
from ddptrain.config.run_config import RunConfig
from ddptrain.config.wording import counted, shorten
from ddptrain.errors import DdptrainError, UsageError, one_line
from ddptrain.file_ops import sha256
from ddptrain.redact import hide_credentials, hide_secrets
from ddptrain.reports.artifacts import read_artifacts
from ddptrain.reports.curves import Line, page_data, read_lines, read_system_lines, summaries
from ddptrain.reports.facts import last_lines, rank_results, read_timeline, user_frames
from ddptrain.reports.markdown import is_plain_link
from ddptrain.results.compare import flat
from ddptrain.results.layout import valid_run_id
from ddptrain.results.metrics import finite_number
from ddptrain.results.run import Run, fetch_all, time_text
from ddptrain.results.run_record import RunStatus, root_cause
from ddptrain.results.runs import open_runs_dir, split_run
from ddptrain.results.secure_files import read_bytes
from ddptrain.results.show.render import event_sections, size
from ddptrain.results.sweep_record import FoundSweep, SweepRecord, TrialRecord, find_sweep
from ddptrain.results.time_use import time_use_of
from ddptrain.text_tables import clean, duration, number
from ddptrain.version import __version__

MOST_RUNS = 100  # on one page
_RUNS_OF_SWEEP = 50  # the best ones
_PICTURE_FILES = tuple(f"artifacts/*.{kind}" for kind in ("csv", "png", "jpg", "jpeg", "webp", "json"))
FILES = ("*.jsonl", "config.yaml", "logs/rank-*", *_PICTURE_FILES)  # what a page reads of a run
_POINTS = 100_000  # of all curves: about 21 bytes each in the page
_PICTURES = 120
_MOST_COLUMNS, _MOST_ROWS, _MOST_SETTINGS = 6, 100, 1000
_MOST_TRIALS, _MOST_AXES = 2000, 20
_ID_CHARACTERS, _CHARACTERS, _MOST_OF_LONG = 120, 1000, 40_000  # of an id, of one text, of a traceback or a log
_MOST_LOGS, _LINES, _LOG_BYTES = 16, 40, 16 << 10
_STATES = frozenset((*RunStatus, "complete", "pruned", "interrupted"))
_HERE = Path(__file__).parent
_SCRIPTS = ("uplot/uPlot.iife.min.js", "chart.js", "curves.js", "page.js")
_STYLES = ("uplot/uPlot.min.css", "page.css")
_FOR_SCRIPT = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


# --- A run ---


class RunCard:
    """A run with its settings and curves; files that cannot be read are left out.

    of: the number of runs on the page, which share its points.
    """

    def __init__(self, view: Run, of: int = 1) -> None:
        self.view, self.record, self.failure, self._of = view, view.record, view.record.failure, of

    @cached_property
    def lines(self) -> tuple[list[Line], list[Line], str]:
        """The curves of the metrics and of the system metrics, and why they can't be read."""
        try:
            return read_lines(self.view), read_system_lines(self.view), ""
        except DdptrainError as error:
            return [], [], one_line(error)

    @property
    def curves(self) -> list[dict[str, Any]]:
        """The curves for the script; system metrics have a quarter of the points."""
        metrics, system, _ = self.lines
        return [*page_data(metrics, _POINTS // self._of), *page_data(system, _POINTS // self._of // 4)]

    @cached_property
    def settings(self) -> dict[str, tuple[str, str | None]]:
        """Value and default of each key of the configuration, as texts; none if it cannot be read."""
        path = self.view.config_yaml
        try:
            data = load_data(read_bytes(path), path.name)
            items = list(itertools.islice(flat(hide_secrets(data)), _MOST_SETTINGS)) if isinstance(data, dict) else []
        except (OSError, DdptrainError):
            return {}
        known = {key: _setting_text(value) for key, value in flat(_defaults(self.record.workload))} if items else {}
        return {shorten(key, 300): (_setting_text(value), known.get(key)) for key, value in items}


def _details(card: RunCard) -> dict[str, Any]:
    """Return what the page of one run has besides: the names are those of its template."""
    view, record, failure = card.view, card.record, card.failure
    metrics, _, problem = card.lines
    traceback = failure.traceback.rstrip() if failure is not None else ""
    first = failure.rank if failure is not None else None
    logs = sorted(view.logs().items(), key=lambda item: (item[0] != first, item[0]))[:_MOST_LOGS]
    trackers = [(name, one.get("url", "")) for name, one in view.trackers().items()]
    variables = sorted(record.rank_environment.items())[:_MOST_ROWS]
    hosts = sorted({rank.host for attempt in record.attempts for rank in attempt.ranks if rank.host})
    git, code = record.git, record.code
    environment = {
        "directory": view.where,
        "driver": record.driver.description if record.driver.host else "",
        "hosts of the ranks": ", ".join(hosts[:50]),
        "git commit": git.commit + (", with changes that are not committed" if git.dirty else "") if git else "",
        "uploaded code": f"{code.folder}, {code.files} files, hash {code.hash}" if code else "",
        "checkpoints": ", ".join(record.checkpoints[:50]),
    }
    return {
        "problems": [text for text in (view.problem, problem) if text],
        "notes": [section for section in event_sections(view.events_jsonl) if section[1]],
        "result": "" if record.result is None else shorten(json.dumps(hide_secrets(record.result)), 2000),
        "links": [(name[:50], url) for name, url in dict.fromkeys(trackers) if is_plain_link(url)][:10],
        "frames": user_frames(failure),
        "traceback": traceback if len(traceback) <= 20_000 else f"...\n{traceback[-20_000:]}",
        "ranks": [rank for rank in rank_results(view) if rank.outcome != "passed"][:64],
        "metrics": sorted(summaries(metrics), key=lambda metric: not metric.name.startswith("val")),
        "timeline": read_timeline(view),
        "time_use": time_use_of(view),
        "artifacts": read_artifacts(view, _PICTURES),
        "tails": {rank: lines for rank, path in logs if (lines := last_lines(path, _LINES, _LOG_BYTES))},
        "environment": [item for item in environment.items() if item[1]],
        "variables": [(name[:200], f"{hide_credentials(v.value[:500])} ({v.source[:20]})") for name, v in variables],
    }


def _defaults(workload: object) -> dict[str, Any]:
    """Return the complete configuration of a workload with nothing but defaults."""
    model = plugin_names.params_model(str(workload)) if workload in plugin_names.BUILT_IN else None
    fields = model.model_fields.items() if model is not None else ()
    params = {name: one.get_default(call_default_factory=True) for name, one in fields if not one.is_required()}
    needed = {"workload": "petnames", "name": "petnames"}  # what must be given has no default
    defaults = RunConfig.model_validate(needed).model_dump(mode="json")
    return {name: value for name, value in defaults.items() if name not in needed} | {"params": params}


def _setting_text(value: Any) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))  # 1.0 and 1 are the same setting
    return shorten(json.dumps(value) if value is None or isinstance(value, bool) else str(value), 300)


# --- A sweep ---


@dataclass(frozen=True, slots=True)
class Axis:
    """A parameter of the search space; dots: number, value and place of each trial, from 0 to 1 to the right and up.

    labels: the smallest and the largest value.
    """

    name: str
    importance: float | None
    dots: Sequence[tuple[TrialRecord, float, float]]
    labels: tuple[str, str]


class SweepTable:
    """What the page shows of a sweep. hidden: the number of trials that are left out."""

    def __init__(self, record: SweepRecord) -> None:
        self.record = record
        self.names = list(record.space)[:_MOST_AXES]
        self.trials = record.trials[:_MOST_TRIALS]
        self.hidden = len(record.trials) - len(self.trials)
        sign = -1.0 if record.mode == "max" else 1.0
        known = [trial for trial in self.trials if finite_number(trial.value) is not None]
        self.ranked = sorted(known, key=lambda trial: (trial.state != "complete", sign * (trial.value or 0.0)))

    @cached_property
    def axes(self) -> list[Axis]:
        """The parameters with more than one value, and where the trials with a result are."""
        heights = dict(
            zip((t.number for t in self.ranked), _places([t.value or 0.0 for t in self.ranked]), strict=True)
        )
        found = []
        for name in self.names:
            kind = str(self.record.space[name].get("kind"))
            trials = [trial for trial in self.ranked if name in trial.params]
            values = [finite_number(trial.params[name]) for trial in trials]
            texts = sorted({_value_text(trial.params[name]) for trial in trials})
            if kind == "choice" or None in values:
                values = [float(texts.index(_value_text(trial.params[name]))) for trial in trials]
            else:
                texts = [_value_text(value) for value in sorted(set(values), key=lambda value: value or 0.0)]
            if len(texts) > 1:
                places = _places([value or 0.0 for value in values], is_log=kind.startswith("log"))
                dots = [(trial, x, heights[trial.number]) for trial, x in zip(trials, places, strict=True)]
                importance = finite_number((self.record.importance or {}).get(name))
                found.append(Axis(name, importance, dots, (texts[0], texts[-1])))
        return found


def _places(values: Sequence[float], *, is_log: bool = False) -> list[float]:
    """Return where values are between the smallest (0) and the largest (1)."""
    if is_log and all(value > 0 for value in values):
        values = [math.log(value) for value in values]
    low, high = min(values, default=0.0), max(values, default=0.0)
    return [(value - low) / (high - low) if high > low and math.isfinite(high - low) else 0.5 for value in values]


def _value_text(value: Any) -> str:
    number = finite_number(value)
    if number is not None:
        return f"{number:.6g}"
    return (value if isinstance(value, str) else json.dumps(value))[:100]


# --- A page ---


@dataclass(frozen=True, slots=True)
class Page:
    """What a page shows: `body` is the name of its template, `data` is for its script.

    is_served: by `ddptrain ui`, where runs have pages of their own; a file has everything in one page.
    """

    body: str
    title: str
    subtitle: str = ""
    cards: Sequence[RunCard] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    sweep: SweepTable | None = None
    rows: Sequence[Any] = ()
    sweeps: Sequence[SweepRecord] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    is_served: bool = False

    @property
    def has_curves(self) -> bool:
        """Whether there are curves, now or later."""
        return bool(self.data.get("curves")) or (self.is_served and bool(self.cards))

    @property
    def differing(self) -> list[str]:
        """Settings whose values are not the same in all runs."""
        found = [card.settings for card in self.cards if card.settings]
        names = dict.fromkeys(key for settings in found for key in settings)
        keys = [key for key in names if len({settings.get(key) for settings in found}) > 1]
        return sorted(keys, key=lambda key: not key.startswith("params."))[:_MOST_COLUMNS]

    @property
    def shared_metrics(self) -> list[str]:
        """The metrics that most runs have, those of validation first."""
        counts = Counter(name for card in self.cards for name in card.record.last_metrics)
        ordered = sorted(counts.items(), key=lambda one: (-one[1], not one[0].startswith("val"), "loss" not in one[0]))
        return [name for name, _ in ordered[:_MOST_COLUMNS]]


def runs_page(
    views: Sequence[Run], sweep: SweepRecord | None = None, *, is_served: bool = False, with_curves: bool = True
) -> Page:
    """Return the page about runs, and a sweep; of one run it has everything."""
    cards = [RunCard(view, len(views)) for view in views]
    labels = [shorten(card.view.run_id, _ID_CHARACTERS) for card in cards]
    states = Counter(view.shown_status for view in views)
    by_state = ", ".join(f"{count} {shorten(state, 40)}" for state, count in states.most_common(8))
    title = f"Sweep {shorten(sweep.sweep_id, _ID_CHARACTERS)}" if sweep is not None else counted(len(views), "run")
    curves = [{"run": at, **curve} for at, card in enumerate(cards) for curve in card.curves] if with_curves else []
    is_single = sweep is None and len(views) == 1
    return Page(
        "run" if is_single else "runs",
        f"Run {labels[0]}" if is_single else title,
        f"{counted(len(views), 'run')}: {by_state}." if len(views) > 1 else "",
        cards,
        _details(cards[0]) if is_single else {},
        SweepTable(sweep) if sweep is not None else None,
        data={"runs": [{"id": label} for label in labels], "curves": curves},
        is_served=is_served,
    )


def find_subjects(names: Sequence[str], runs_dir: str) -> tuple[list[Run], SweepRecord | None]:
    """Return the runs that the names stand for, and the sweep with its best runs if one is among them.

    Raises UsageError, RunNotFound, StoreError.
    """
    views: list[Run] = []
    sweeps: list[FoundSweep] = []
    for name in dict.fromkeys(names):
        if (found := find_sweep(runs_dir, name)) is not None:
            sweeps.append(found)
        else:
            place, run = split_run(name, runs_dir)
            views.append(open_runs_dir(place).find(run))
    if len(sweeps) > 1:
        raise UsageError(f"a report has at most one sweep, got {len(sweeps)}; write one report for each")
    views += _runs_of(sweeps[0]) if sweeps else []
    views = list({view.root: view for view in views}.values())
    if len(views) > MOST_RUNS:
        raise UsageError(f"a report has at most {MOST_RUNS} runs, got {len(views)}; name fewer")
    fetch_all(views, *FILES)
    return views, sweeps[0].record if sweeps else None


def _runs_of(sweep: FoundSweep) -> list[Run]:
    """Return the runs of the trials that are running, and of the best ones; then of those that failed."""
    running, failed = ([t for t in sweep.record.trials if t.state == state] for state in ("running", "failed"))
    ranked = SweepTable(sweep.record).ranked
    names = dict.fromkeys(name for trial in (*running, *ranked, *failed) for name in trial.run_ids)
    runs = (sweep.trials.get(name) for name in names if valid_run_id(name))
    return list(itertools.islice((view for view in runs if view is not None), _RUNS_OF_SWEEP))


# --- Templates ---


def safe_text(value: object) -> object:
    """Return what a template prints: a text without control and bidi characters, and of limited length.

    Autoescape follows. Markup is that of a template.
    """
    if value is None:
        return ""
    return value if isinstance(value, Markup | int | float) else _cleaned(str(value), _CHARACTERS)


def _cleaned(text: str, most: int) -> str:
    return clean(text if len(text) <= most else f"{text[:most]}...")


def page_json(value: object) -> Markup:
    """Return JSON for a script element: it cannot end the element, and its texts are safe as in `safe_text`."""
    text = json.dumps(_safe_data(value), allow_nan=False, separators=(",", ":"))
    return Markup(text.translate(_FOR_SCRIPT))  # valid inside JSON strings, the only place where these occur


def _safe_data(value: object) -> object:
    if isinstance(value, str):
        return value if value.isascii() and value.isprintable() else clean(value)
    if isinstance(value, Mapping):
        return {str(key): _safe_data(item) for key, item in value.items()}
    return [_safe_data(item) for item in value] if isinstance(value, list | tuple) else value


def policy() -> str:
    """Return the policy of all pages: this package's script and style, by their hashes, and pictures inside the page.

    A page may fetch from its own server; a file has none.
    """
    script, style = (f"'sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}'" for text in _statics())
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'self'"
    )


def page_html(page: Page) -> bytes:
    """Return the page as UTF-8."""
    script, style = map(Markup, _statics())
    values = {"policy": Markup(policy()), "script": script, "style": style, "data": page_json(page.data)}
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}"
    text = _templates().get_template("page.html.j2").render(page=page, version=__version__, now=now, **values)
    return text.encode("utf-8", "replace")


def body_html(page: Page) -> str:
    """Return the part of the page that changes while a run is running, without its curves."""
    return _templates().get_template(f"{page.body}.html.j2").render(page=page)


@cache
def _statics() -> tuple[str, str]:
    """Return the script and the style of all pages."""
    static = _HERE / "static"
    script, style = ("\n".join((static / name).read_text("utf-8") for name in names) for names in (_SCRIPTS, _STYLES))
    return f"(() => {{\n'use strict';\n{script}}})();\n", style


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=safe_text,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "data_url": Markup,  # base64 of our own; too long for safe_text
        "duration": duration,
        "long": lambda text, most=_MOST_OF_LONG: escape(_cleaned(text, most)),
        "number": number,
        "param_name": lambda name: name.removeprefix("params."),
        "root_cause": root_cause,
        "short_number": _short_number,
        "size": size,
        "sort_key": lambda value: "" if value is None or value != value else value,  # rows without a value stay last
        "status_class": lambda status: status if status in _STATES else "",
        "time": time_text,
    }
    return environment


def _short_number(value: object) -> str:
    """Return numbers with four digits; other texts as they are."""
    try:
        return f"{float(str(value)):.4g}" if value is not None else ""
    except ValueError:
        return str(value)
