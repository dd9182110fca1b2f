"""Everything about one run that the page shows, read from its directory once."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self

from ddptrain.config.wording import shorten
from ddptrain.errors import DdptrainError, one_line
from ddptrain.file_ops import open_regular
from ddptrain.redact import hide_secrets
from ddptrain.reports.html import tables as csv_tables
from ddptrain.reports.html.failure import Frame, Tail, shown_traceback, tails, user_frames
from ddptrain.reports.html.pictures import Picture, PictureReader
from ddptrain.reports.html.series import MEAN, Line, MetricSummary, page_data, read_lines, read_system_lines, summaries
from ddptrain.reports.html.settings import Setting, read_settings
from ddptrain.reports.html.timeline import Timeline, read_timeline
from ddptrain.reports.rank_results import RankResult, rank_results
from ddptrain.results.layout import files_below
from ddptrain.results.lookup import RunView, moment
from ddptrain.results.show.render import size
from ddptrain.results.timing.time_use import TimeUse, time_use_of

MOST_RUNS = 100  # on one page
_POINTS = 300_000  # of all curves: 32 bytes each in the page
_IMAGE_BYTES = 4 << 20  # of all runs, as they are in the page
_TEXT_BYTES = 2 << 20  # of one kind (last lines, tables, configurations) of all runs


@dataclass(frozen=True, slots=True)
class Limits:
    """The share of one run. curve_points: of all its curves together. The bytes are those before escaping.

    A page has less than 20 MB with any number of runs up to MOST_RUNS.
    """

    curve_points: int
    image_bytes: int
    log_bytes: int
    table_bytes: int
    config_bytes: int
    diff_bytes: int

    @classmethod
    def for_runs(cls, count: int) -> Self:
        """Return the share of each of `count` runs."""
        share = max(1, count)
        text = _TEXT_BYTES // share
        return cls(
            _POINTS // share,
            _IMAGE_BYTES // share,
            min(text, 256 << 10),
            text,
            min(text, 128 << 10),
            min(text, 200_000),
        )


_MOST_FILES = 5000
_MOST_LISTED = 60
_TEXT = 2000
_SYSTEM_SHARE = 4  # of the points of curves, system metrics may have one part in so many
_EVALUATED = re.compile(r"(?:val|valid|validation|eval|test)[/_]", re.IGNORECASE)


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
    tails: Sequence[Tail]
    tables: Sequence[csv_tables.TableFile]
    galleries: Sequence[tuple[str, Sequence[csv_tables.GalleryItem]]]
    confusion: csv_tables.Confusion | None
    pictures: Sequence[tuple[str, Sequence[Picture]]]
    operators: Sequence[csv_tables.Operators]
    names: Sequence[csv_tables.GeneratedName]
    files: Sequence[tuple[str, str]]
    settings: Sequence[Setting]
    result: str
    problems: Sequence[str]
    time_use: TimeUse | None = None
    diff: str = ""

    @property
    def sections(self) -> list[tuple[str, str]]:
        """The sections that it has: anchors and titles."""
        every = (
            ("failure", "Failure", self.view.record.failure),
            ("curves", "Curves", self.curves),
            ("metrics", "Metrics", self.metrics),
            ("timeline", "Timeline", self.timeline),
            ("time", "Time", self.time_use),
            ("operators", "Top operators", self.operators),
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


def read_card(view: RunView, limits: Limits) -> RunCard:
    """Read a run. Files that cannot be read are left out, and named in `problems`."""
    problems = [view.problem] if view.problem else []
    lines: list[Line] = []
    system: list[Line] = []
    try:
        lines = read_lines(view)
        system = read_system_lines(view)
    except DdptrainError as error:
        problems.append(one_line(error))
    media = _media(view, limits)
    failure = view.record.failure
    return RunCard(
        view,
        rank_results(view),
        summaries(lines),
        [*page_data(lines, limits.curve_points), *page_data(system, limits.curve_points // _SYSTEM_SHARE)],
        read_timeline(view, _evaluations(view, lines)),
        user_frames(failure),
        shown_traceback(failure),
        tails(view, limits.log_bytes),
        **media,
        settings=read_settings(view.layout.config_yaml, limits.config_bytes),
        result="" if view.record.result is None else shorten(json.dumps(hide_secrets(view.record.result)), _TEXT),
        problems=problems,
        time_use=time_use_of(view),
        diff=_diff(view, limits.diff_bytes),
    )


def _diff(view: RunView, budget_bytes: int) -> str:
    """The changes of the code that were not committed; "" if there are none, or they cannot be read."""
    if view.record.git is None or not view.record.git.dirty:
        return ""
    try:
        with os.fdopen(open_regular(view.layout.git_diff), "rb") as file:
            text = file.read(budget_bytes + 1)
    except OSError:
        return ""
    shown = text[:budget_bytes].decode("utf-8", "replace")
    return f"{shown}\n... (the rest is left out)" if len(text) > budget_bytes else shown


def _media(view: RunView, limits: Limits) -> dict[str, Any]:
    """The tables, pictures and other files among the artifacts, as fields of a card."""
    files = dict(islice(_artifacts(view), _MOST_FILES))
    csv_files = csv_tables.CsvFiles(view.layout.artifacts_dir, files, limits.table_bytes)
    pictures = PictureReader(view.layout.artifacts_dir, files, limits.image_bytes)
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
        "operators": csv_files.operators(),
        "names": csv_files.generated_names(),
        "files": others[:_MOST_LISTED],
    }


def _artifacts(view: RunView) -> Iterator[tuple[str, int]]:
    root = view.layout.artifacts_dir
    return ((path.relative_to(root).as_posix(), size_bytes) for path, size_bytes in files_below(root))


def _evaluations(view: RunView, lines: Sequence[Line]) -> list[tuple[float, int]]:
    """When which rank has logged a metric of an evaluation, in seconds since the epoch."""
    began = moment(view.record.started_at)
    start = began.timestamp() if began is not None else 0.0
    found = {
        (start + float(time_s), 0 if line.rank == MEAN else int(line.rank))
        for line in lines
        if _EVALUATED.match(line.metric)
        for time_s in line.time
    }
    return sorted(found)
