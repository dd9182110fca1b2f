"""Everything about one run that the page shows, read from its directory once."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from ddptrain.config import plugin_names
from ddptrain.config.load import load_data
from ddptrain.config.run_config import RunConfig
from ddptrain.config.wording import shorten
from ddptrain.errors import DdptrainError, one_line
from ddptrain.file_ops import open_regular
from ddptrain.redact import hide_secrets
from ddptrain.reports.facts import RankResult, is_installed, last_lines, rank_results
from ddptrain.reports.html import tables as csv_tables
from ddptrain.reports.html.pictures import Picture, PictureReader
from ddptrain.reports.html.series import MEAN, Line, MetricSummary, page_data, read_lines, read_system_lines, summaries
from ddptrain.results.compare import flat
from ddptrain.results.layout import files_below
from ddptrain.results.lookup import RunView, parse_time
from ddptrain.results.metrics import LAST_BYTES, read_events
from ddptrain.results.run_record import FailureRecord
from ddptrain.results.secure_files import read_bytes
from ddptrain.results.show.render import size
from ddptrain.results.time_use import TimeUse, time_use_of
from ddptrain.text_tables import duration

_FRAME = re.compile(r'^[ |+]*File "(?P<file>[^"\n]{1,1000})", line (?P<line>\d{1,9})(?:, in (?P<name>[^\n]{1,300}))?')
_MOST_FILES = 5000
_MOST_LISTED = 60
_TEXT = 2000
_SYSTEM_SHARE = 4  # of the points of curves, system metrics may have one part in so many
_EVALUATED = re.compile(r"(?:val|valid|validation|eval|test)[/_]", re.IGNORECASE)
MOST_RUNS = 100  # on one page
_POINTS = 300_000  # of all curves: 32 bytes each in the page
_PICTURES = 120  # of all runs
_LOG_BYTES, _DIFF_BYTES = 16 << 10, 200_000  # of one rank, of one run
_MOST_FRAMES = 20
_TRACEBACK_CHARACTERS = 20_000
_MOST_RANKS = 16
_LINES = 40
_MOST = 1000
_CHARACTERS = 300
_ANY = "petnames"  # what must be given has no default
WIDTH = 1000  # of a row, in units of its drawing
_MOST_ROWS = 64
_MOST_MARKS = 300  # of a row
_TIMED = {"evaluation": "evaluation", "checkpoint": "saving"}  # activities that ctx.timed() has measured
_LEAST_WIDTH = 1.5  # of a phase that is shown
_KINDS = (
    "run_started", "rank_started", "entered", "finished", "rank_ended", "fault", "checkpoint_staged", "timed",
    "run_finished",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame of the user's code, the outermost first; `code` has its source line if the traceback has it."""

    file: str
    line: int
    function: str
    code: str


def end_title(failure: FailureRecord | None) -> str:
    """Return the title of the section about a failure; the end of a run that was asked to end is none."""
    return "End" if failure is not None and failure.is_order else "Failure"


def user_frames(failure: FailureRecord | None) -> list[Frame]:
    """Return the last 20 frames of a traceback that are neither in the standard library nor in installed packages."""
    lines = shown_traceback(failure).splitlines()
    frames = []
    for at, text in enumerate(lines):
        match = _FRAME.match(text)
        if match and not is_installed(match["file"]):
            frames.append(Frame(match["file"], int(match["line"]), match["name"] or "", _code(lines[at + 1 :])))
    return frames[-_MOST_FRAMES:]


def _code(below: Sequence[str]) -> str:
    """Return the source line of a frame; lines that only mark a part of it are left out."""
    for text in below[:1]:
        if text.startswith("    ") and not _FRAME.match(text):
            return text.strip()
    return ""


def shown_traceback(failure: FailureRecord | None) -> str:
    """Return the end of the traceback, which names the error."""
    text = failure.traceback.rstrip() if failure is not None else ""
    return text if len(text) <= _TRACEBACK_CHARACTERS else f"...\n{text[-_TRACEBACK_CHARACTERS:]}"


def tails(view: RunView) -> dict[int, list[str]]:
    """Return the last lines of the first 16 ranks, that of the failure first."""
    failure = view.record.failure
    first = failure.rank if failure is not None else None
    logs = sorted(view.layout.logs().items(), key=lambda item: (item[0] != first, item[0]))[:_MOST_RANKS]
    return {rank: lines for rank, path in logs if (lines := last_lines(path, _LINES, _LOG_BYTES))}


@dataclass(frozen=True, slots=True)
class RunCard:
    """One run. curves: for the page's script. gallery, confusion, tables, pictures: from its artifacts.

    files: other files that it has saved, with their sizes as text. diff: changes of its code that were not committed.
    problems: what could not be read.
    """

    view: RunView
    ranks: Sequence[RankResult]
    metrics: Sequence[MetricSummary]
    curves: Sequence[dict[str, Any]]
    timeline: Timeline | None
    frames: Sequence[Frame]
    traceback: str
    tails: Mapping[int, Sequence[str]]
    tables: Sequence[csv_tables.TableFile]
    galleries: Sequence[tuple[str, Sequence[csv_tables.GalleryItem]]]
    confusion: csv_tables.Confusion | None
    pictures: Sequence[tuple[str, Sequence[Picture]]]
    names: Sequence[csv_tables.GeneratedName]
    files: Sequence[tuple[str, str]]
    settings: Sequence[Setting]
    result: str
    problems: Sequence[str]
    time_use: TimeUse | None = None
    diff: str = ""
    is_detailed: bool = True

    @property
    def sections(self) -> list[tuple[str, str]]:
        """The sections that it has: anchors and titles."""
        every = (
            ("failure", end_title(self.view.record.failure), self.view.record.failure),
            ("curves", "Curves", self.curves),
            ("metrics", "Metrics", self.metrics),
            ("timeline", "Timeline", self.timeline),
            ("time", "Time", self.time_use),
            ("confusion", "Confusion matrix", self.confusion),
            ("predictions", "Predictions", self.galleries),
            ("names", "Generated names", self.names),
            ("images", "Images", self.pictures),
            ("tables", "Tables", self.tables),
            ("logs", "Logs", self.tails),
            ("configuration", "Configuration", self.settings),
            ("environment", "Environment", True),
        )
        return [(anchor, title) for anchor, title, content in every if content]

    @property
    def changed(self) -> list[Setting]:
        """The settings that differ from the defaults."""
        return [setting for setting in self.settings if setting.is_changed]


def read_card(view: RunView, *, of: int = 1, is_detailed: bool = True) -> RunCard:
    """Read a run. Files that cannot be read are left out, and named in `problems`.

    of: the number of runs on the page, which share its points and pictures. is_detailed: whether the card has logs,
    configuration, images and tables.
    """
    problems = [view.problem] if view.problem else []
    lines: list[Line] = []
    system: list[Line] = []
    try:
        lines = read_lines(view)
        system = read_system_lines(view)
    except DdptrainError as error:
        problems.append(one_line(error))
    points = _POINTS // max(1, of)
    media = _media(view, _PICTURES // max(1, of)) if is_detailed else NO_MEDIA
    failure = view.record.failure
    return RunCard(
        view,
        rank_results(view),
        summaries(lines),
        [*page_data(lines, points), *page_data(system, points // _SYSTEM_SHARE)],
        read_timeline(view, _evaluations(view, lines)),
        user_frames(failure),
        shown_traceback(failure),
        tails(view) if is_detailed else {},
        **media,
        settings=read_settings(view.layout.config_yaml),
        result="" if view.record.result is None else shorten(json.dumps(hide_secrets(view.record.result)), _TEXT),
        problems=problems,
        time_use=time_use_of(view),
        diff=_diff(view) if is_detailed else "",
        is_detailed=is_detailed,
    )


def _diff(view: RunView) -> str:
    """Return the changes of the code that were not committed; "" if there are none, or they cannot be read."""
    if view.record.git is None or not view.record.git.dirty:
        return ""
    try:
        with os.fdopen(open_regular(view.layout.git_diff), "rb") as file:
            text = file.read(_DIFF_BYTES + 1)
    except OSError:
        return ""
    shown = text[:_DIFF_BYTES].decode("utf-8", "replace")
    return f"{shown}\n... (the rest is left out)" if len(text) > _DIFF_BYTES else shown


NO_MEDIA: Mapping[str, Any] = dict.fromkeys(("tables", "galleries", "pictures", "names", "files"), ()) | {
    "confusion": None
}


def _media(view: RunView, most_pictures: int) -> Mapping[str, Any]:
    """Return the tables, pictures and other files among the artifacts, as fields of a card."""
    files = dict(islice(_artifacts(view), _MOST_FILES))
    csv_files = csv_tables.CsvFiles(view.layout.artifacts_dir, files)
    pictures = PictureReader(view.layout.artifacts_dir, files, most_pictures)
    tables = csv_files.tables()
    galleries = [(table.path, items) for table in tables if (items := csv_tables.gallery(table, pictures))]
    in_gallery = {path for table in tables for row in table.rows for path in row if path in files}
    predictions = csv_tables.confusion(csv_files.predictions())
    shown = {path for path, _ in galleries}
    if predictions is not None:
        shown |= {table.path for table in tables if table.path.startswith("predictions/")}
    others = [(path, size(size_bytes)) for path, size_bytes in sorted(files.items()) if not path.endswith(".png")]
    return {
        "tables": [table for table in tables if table.path not in shown],
        "galleries": galleries,
        "confusion": predictions,
        "pictures": pictures.groups(in_gallery),
        "names": csv_files.generated_names(),
        "files": others[:_MOST_LISTED],
    }


def _artifacts(view: RunView) -> Iterator[tuple[str, int]]:
    root = view.layout.artifacts_dir
    return ((path.relative_to(root).as_posix(), size_bytes) for path, size_bytes in files_below(root))


def _evaluations(view: RunView, lines: Sequence[Line]) -> list[tuple[float, int]]:
    """Return when which rank has logged a metric of an evaluation, in seconds since the epoch."""
    began = parse_time(view.record.started_at)
    start = began.timestamp() if began is not None else 0.0
    found = {
        (start + float(time_s), 0 if line.rank == MEAN else int(line.rank))
        for line in lines
        if _EVALUATED.match(line.metric)
        for time_s in line.time
    }
    return sorted(found)


@dataclass(frozen=True, slots=True)
class Setting:
    """A key of the configuration; `default` is None if it has none. The values are texts."""

    key: str
    value: str
    default: str | None

    @property
    def is_changed(self) -> bool:
        """Whether the value is not the default."""
        return self.value != self.default


def read_settings(path: Path) -> list[Setting]:
    """Return the settings of a config.yaml; none if it cannot be read."""
    try:
        data = load_data(read_bytes(path), path.name)
    except (OSError, DdptrainError):
        return []
    if not isinstance(data, dict):
        return []
    defaults = dict(flat(_defaults(data.get("workload"))))
    found: list[Setting] = []
    for key, value in flat(hide_secrets(data)):
        text = _text(value)
        default = _text(defaults[key]) if key in defaults else None
        if len(found) >= _MOST:
            break
        found.append(Setting(shorten(key, _CHARACTERS), text, default))
    return found


def _defaults(workload: object) -> dict[str, Any]:
    """Return the complete configuration of a workload with nothing but defaults."""
    is_built_in = isinstance(workload, str) and workload in plugin_names.BUILT_IN
    model = plugin_names.params_model(str(workload)) if is_built_in else None
    fields = model.model_fields.items() if model is not None else ()
    params = {name: one.get_default(call_default_factory=True) for name, one in fields if not one.is_required()}
    defaults = RunConfig.model_validate({"workload": _ANY, "name": _ANY}).model_dump(mode="json")
    return {name: value for name, value in defaults.items() if value != _ANY} | {"params": params}


def _text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))  # 1.0 and 1 are the same setting
    return shorten(str(value), _CHARACTERS)


@dataclass(frozen=True, slots=True)
class Phase:
    """A span of a rank: waiting, start, training or end, and within training evaluation and saving.

    `x` and `width` are in units of the drawing.
    """

    kind: str
    x: float
    width: float
    text: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment of a rank: a checkpoint, an evaluation or a failure."""

    kind: str
    x: float
    text: str


@dataclass(frozen=True, slots=True)
class Row:
    """One rank of one attempt; `text` says the same as the drawing."""

    attempt: int
    rank: int
    host: str
    phases: tuple[Phase, ...]
    marks: tuple[Mark, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """All rows; `ticks` are positions and their times since the start of the run. `hidden`: rows that are left out."""

    rows: tuple[Row, ...]
    ticks: tuple[tuple[float, str], ...]
    hidden: int = 0


@dataclass(slots=True)
class _Rank:
    """What the events say about one rank of one attempt; times in seconds since the epoch."""

    host: str = ""
    entered: float | None = None
    finished: float | None = None
    ended: float | None = None
    fault: tuple[float, str] | None = None
    checkpoints: list[tuple[float, Any]] = field(default_factory=list)
    timed: list[tuple[str, float, float]] = field(default_factory=list)  # phase, start, end


@dataclass(slots=True)
class _Attempt:
    number: int
    waits_since: float
    started: float
    ranks: dict[int, _Rank] = field(default_factory=dict)


def read_timeline(view: RunView, evaluations: Sequence[tuple[float, int]] = ()) -> Timeline | None:
    """Return the timeline of a run; None if no rank was started.

    evaluations: when which rank has logged a result of an evaluation, in seconds since the epoch.
    """
    began = parse_time(view.record.started_at)
    events = list(read_events(view.layout.events_jsonl, _KINDS, LAST_BYTES))
    attempts, end = _attempts(events, began.timestamp() if began else None)
    found = [(attempt, rank) for attempt in attempts for rank in sorted(attempt.ranks)]
    if not found:
        return None
    if view.is_running and view.duration_s is not None:
        end = max(end, attempts[0].waits_since + view.duration_s)
    scale = _Scale(attempts[0].waits_since, end)
    ends = [following.waits_since for following in attempts[1:]] + [end]
    until = {attempt.number: last for attempt, last in zip(attempts, ends, strict=True)}
    rows = tuple(_row(attempt, rank, scale, until[attempt.number], evaluations) for attempt, rank in found[:_MOST_ROWS])
    return Timeline(rows, scale.ticks(), max(0, len(found) - _MOST_ROWS))


class _Scale:
    """Places times in a row."""

    def __init__(self, start: float, end: float) -> None:
        self.start, self.end = start, max(end, start + 1e-3)

    def x(self, time_s: float) -> float:
        share = (time_s - self.start) / (self.end - self.start)
        return round(min(1.0, max(0.0, share)) * WIDTH, 1)

    def ticks(self) -> tuple[tuple[float, str], ...]:
        length = self.end - self.start
        return tuple((WIDTH * part / 4, duration(length * part / 4) if part else "0 s") for part in range(5))


def _attempts(events: Sequence[dict[str, Any]], began: float | None) -> tuple[list[_Attempt], float]:
    """Return the attempts, and the time of the last event. An attempt waits since the end of the one before it."""
    attempts: list[_Attempt] = []
    last = began if began is not None else events[0]["time_s"] if events else 0.0
    for event in events:
        time_s = float(event["time_s"])
        if event["event"] == "run_started":
            number = event.get("attempt")
            attempts.append(_Attempt(number if isinstance(number, int) else len(attempts) + 1, last, time_s))
        elif attempts and isinstance(event.get("rank"), int):
            _note(attempts[-1].ranks.setdefault(event["rank"], _Rank()), event, time_s)
        last = max(last, time_s)
    return attempts, last


def _note(rank: _Rank, event: dict[str, Any], time_s: float) -> None:
    match event["event"]:
        case "rank_started":
            rank.host = str(event.get("host", ""))
        case "entered":
            rank.entered = time_s
        case "finished":
            rank.finished = time_s
        case "rank_ended":
            rank.ended = time_s
        case "fault" if rank.fault is None:
            rank.fault = (time_s, str(event.get("message", ""))[:300])
        case "checkpoint_staged" if len(rank.checkpoints) < _MOST_MARKS:
            rank.checkpoints.append((time_s, event.get("step")))
        case "timed" if len(rank.timed) < _MOST_MARKS:
            kind, seconds = _TIMED.get(str(event.get("activity"))), event.get("seconds")
            if kind and isinstance(seconds, int | float) and 0 <= seconds <= time_s:
                rank.timed.append((kind, time_s - seconds, time_s))


def _row(attempt: _Attempt, number: int, scale: _Scale, until: float, evaluations: Sequence[tuple[float, int]]) -> Row:
    rank = attempt.ranks[number]
    over = rank.ended if rank.ended is not None else until
    stopped = min(time_s for time_s in (rank.finished, rank.fault and rank.fault[0], over) if time_s is not None)
    spans = [
        ("waiting", attempt.waits_since, attempt.started),
        ("start", attempt.started, min(stopped, rank.entered) if rank.entered is not None else stopped),
        *([("training", rank.entered, stopped)] if rank.entered is not None else []),
        ("end", stopped, over),
    ]
    phases = [_phase(kind, start, end, scale) for kind, start, end in spans if end > start]
    marks = [
        *(Mark("checkpoint", scale.x(time_s), f"checkpoint at step {step}") for time_s, step in rank.checkpoints),
        *([] if rank.timed else _evaluation_marks(evaluations, number, attempt.started, over, scale)),
        *([Mark("failure", scale.x(rank.fault[0]), f"failed: {rank.fault[1]}")] if rank.fault else []),
    ]
    texts = [phase.text for phase in phases]
    texts += [f"{len(rank.checkpoints)} checkpoints"] * bool(rank.checkpoints)
    texts += [f"failed: {rank.fault[1]}"] if rank.fault else []
    measured = [_phase(kind, start, end, scale) for kind, start, end in rank.timed]
    drawn = [phase for phase in phases if phase.width >= _LEAST_WIDTH]
    drawn += [replace(phase, width=max(_LEAST_WIDTH, phase.width)) for phase in measured]
    return Row(attempt.number, number, rank.host, tuple(drawn), tuple(marks), "; ".join(texts))


def _phase(kind: str, start: float, end: float, scale: _Scale) -> Phase:
    x = scale.x(start)
    return Phase(kind, x, round(scale.x(end) - x, 1), f"{kind} {duration(end - start)}")


def _evaluation_marks(
    evaluations: Sequence[tuple[float, int]], rank: int, start: float, end: float, scale: _Scale
) -> Iterator[Mark]:
    times = [time_s for time_s, logged_by in evaluations if logged_by == rank and start <= time_s <= end]
    for time_s in times[:: max(1, -(-len(times) // _MOST_MARKS))]:
        yield Mark("evaluation", scale.x(time_s), "result of an evaluation")
