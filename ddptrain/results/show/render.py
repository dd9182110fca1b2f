"""Shows runs as text: a table of runs, and everything about one run, for a terminal (rich) or a pipe."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from ddptrain.config.wording import counted, shorten
from ddptrain.results.layout import TRACKING
from ddptrain.results.metrics import LAST_BYTES, read_events
from ddptrain.results.run import Run, time_text
from ddptrain.results.run_record import (
    AttemptRecord,
    FailureRecord,
    JobRecord,
    ProgressRecord,
    RankRecord,
    RunRecord,
    RunStatus,
    root_cause,
)
from ddptrain.results.selection import RunFields, cells, header
from ddptrain.text_tables import Section, clean, clean_line, columns_of, duration, number, plain_table

if TYPE_CHECKING:
    from rich.console import Console

_MARKS = ("JOB", "TAGS", "NOTE")  # columns that are shown if a run has one
HEADER = ("RUN", "STATUS", "STARTED (UTC)", "DURATION", "RANKS", "RESULT")
_STATUS_STYLE = {
    RunStatus.QUEUED: "cyan",
    RunStatus.RUNNING: "cyan",
    RunStatus.WAITING: "cyan",
    RunStatus.SUCCEEDED: "green",
    RunStatus.FAILED: "red",
    RunStatus.UNREADABLE: "red",
    RunStatus.PREEMPTED: "yellow",
    RunStatus.CANCELLED: "yellow",
}
_WRAPPED = ("RESULT", "NOTE")
_RESULT_WIDTH = 60
_MOST_MESSAGES = 20  # of a section
_MAX_FILES = 8  # a folder with more files is shown as one line
_LEFT_OUT = ("RANKS", "DURATION", "STARTED (UTC)")
_LEAST_RESULT = 12  # characters per line of a row's last cell, which may take several lines
_RETURNED_WIDTH = 2_000
_KIB = 1024.0
_TRACE = re.compile(r"profile/steps-(\d{1,18})-(\d{1,18})/rank-\d{1,9}\.pt\.trace\.json\.gz")


def run_table(runs: Sequence[RunFields], extra: Sequence[str] = ()) -> list[tuple[str, ...]]:
    """Return the table of runs with its header: HEADER, `extra` fields, and jobs, tags and notes if there are any."""
    marks = [_marks(run.view) for run in runs]
    shown = [any(mark[column] for mark in marks) for column in range(len(_MARKS))]

    def row(main: Sequence[str], more: Sequence[str], mark: Sequence[str]) -> tuple[str, ...]:
        *before, note = ([text] if is_shown else [] for text, is_shown in zip(mark, shown, strict=True))
        return (*main[:-1], *more, *chain(*before), main[-1], *note)

    found = [row(HEADER, header(extra), _MARKS)]
    for run, main, mark in zip(runs, rows(run.view for run in runs), marks, strict=True):
        found.append(row(main, cells(run, extra), [clean_line(text) for text in mark]))
    return found


def _marks(view: Run) -> tuple[str, str, str]:
    annotations = view.annotations
    known = [job for job in view.record.jobs if job.id]
    jobs = ", ".join(f"{job.id} ({job.starts} starts)" if job.starts > 1 else job.id for job in known)
    return jobs, " ".join(annotations.tags), _short(annotations.note)


def rows(views: Iterable[Run]) -> list[tuple[str, ...]]:
    """Return one row per run, with the columns of HEADER."""
    return [tuple(clean_line(cell) for cell in _row(view)) for view in views]


def _row(view: Run) -> tuple[str, ...]:
    record = view.record
    ranks = str(record.world_size or "-")
    started, took = time_text(record.started_at) or "-", duration(view.duration_s)
    return (view.run_id, view.status_text, started, took, ranks, _result(view))


def _result(view: Run) -> str:
    """Return the result of a run in a few words: why it failed, its best checkpoint, or its last loss."""
    record = view.record
    if view.problem:
        return _short(view.problem.replace(str(view.run_json), view.run_json.name))
    if view.status == RunStatus.QUEUED and record.jobs:
        job = record.jobs[-1]
        return _short(f"{job.description} is {job.state}" if job.state else job.description)
    if record.failure is not None:
        rank = "" if record.failure.rank is None else f"rank {record.failure.rank}: "
        return _short(rank + record.failure.summary)
    if view.is_running and record.queued is not None:
        return record.queued.description
    if view.is_running and record.progress is not None and record.progress.share:
        return ", ".join(filter(None, (record.progress.share, _eta(record.progress), *_loss(record))))
    if record.best is not None:
        return f"best {record.best.metric} {number(record.best.value)} at step {record.best.step}"
    return "".join(_loss(record))


def _loss(record: RunRecord) -> list[str]:
    """Return the last loss, or another metric if there is none, as text; an empty list without metrics."""
    losses = [name for name in record.last_metrics if "loss" in name]
    name = next((name for name in ("val/loss", *losses, *record.last_metrics) if name in record.last_metrics), None)
    return [] if name is None else [f"{name} {number(record.numbers[name])}"]


def _eta(progress: ProgressRecord) -> str:
    return "" if progress.eta_s is None else f"ETA {duration(progress.eta_s)}"


def _progress(view: Run) -> str:
    """Return the progress of a running run, as "24 % of 12,500 images, ETA 3m 05s"."""
    progress = view.record.progress
    if progress is None or not view.is_running:
        return ""
    if not progress.total:
        done = f"{progress.done:,g} {progress.unit}"
    else:
        done = progress.share + ("" if "/" in progress.share else f" of {progress.total:,.0f} {progress.unit}")
    return ", ".join(filter(None, (done, _eta(progress))))


def _short(text: str) -> str:
    line = clean(text).split("\n")[0]
    return line if len(line) <= _RESULT_WIDTH else line[: _RESULT_WIDTH - 3] + "..."


def sections(view: Run) -> list[Section]:
    """Return everything about one run, as titled lists of names and values; empty ones are left out."""
    from ddptrain.results.system import read_system, use_lines
    from ddptrain.results.time_use import time_use_of

    record = view.record
    files = view.artifacts()
    best = record.best
    about = [
        ("status", view.status_text),
        ("waits", record.queued.description if view.is_running and record.queued is not None else ""),
        ("problem", view.problem),
        ("exit code", "" if record.exit_code is None or view.goes_on else str(record.exit_code)),
        ("directory", view.where),
        ("tags", " ".join(view.annotations.tags)),
        ("note", view.annotations.note),
        ("workload", record.workload),
        ("started", time_text(record.started_at) or "-"),
        ("ended", (time_text(record.ended_at) or "-") if record.ended_at else ""),
        ("duration", _duration(view)),
        ("ranks", str(record.world_size or "")),
        ("driver", record.driver.description if record.driver.host else ""),
        ("jobs", "\n".join(filter(None, map(_job, record.jobs)))),
        ("attempt", str(record.attempts[-1].attempt) if view.is_running and record.attempts else ""),
        ("progress", _progress(view)),
        ("driver's output", _path_of(view, view.driver_log)),
        ("log for bug reports", _path_of(view, view.decision_log)),
        ("git", _git(view)),
        ("best", f"{best.metric} {number(best.value)} at step {best.step}" if best else ""),
        ("checkpoints", ", ".join(record.checkpoints)),
        ("profile", _profiles(files)),
        ("result", "" if record.result is None else shorten(json.dumps(record.result), _RETURNED_WIDTH)),
    ]
    environment = [(name, f"{item.value} ({item.source})") for name, item in sorted(record.rank_environment.items())]
    all_sections = [
        (view.run_id, about),
        ("where the time went", spent.shown() if (spent := time_use_of(view)) else []),
        ("end" if record.failure and record.failure.is_order else "failure", _failure(record.failure)),
        ("failed attempts", record.failed_attempts),
        ("not finite", [(f"rank {bad.rank}", bad.description)] if (bad := record.not_finite) else []),
        *event_sections(view.events_jsonl),
        *(_attempt(attempt, len(record.attempts)) for attempt in record.attempts),
        ("use of hosts and GPUs", use_lines(read_system(view.system_jsonl))),
        ("last metrics", [(name, number(value)) for name, value in record.numbers.items()]),
        ("tracking", _tracking(view)),
        ("artifacts", _artifacts(files)),
        ("environment of the ranks", environment),
        ("versions", sorted(record.versions.items())),
    ]
    filled = ((title, [(clean(name), clean(value)) for name, value in lines if value]) for title, lines in all_sections)
    return [(clean(title), lines) for title, lines in filled if lines]


def event_sections(path: Path, last_bytes: int = LAST_BYTES) -> list[Section]:
    """Return the newest messages of events.jsonl, in the sections that the classes of the events name."""
    from ddptrain.protocol import events

    kinds = {kind: cls.section for kind, cls in events.KINDS.items() if cls.section}
    found: dict[str, list[tuple[str, str]]] = {section: [] for section in kinds.values()}
    for line in read_events(path, kinds, last_bytes):
        with suppress(events.EventFormatError):  # of another version, or damaged
            fields = {"event": line["event"], **line, "time_ns": line.get("rank_time_ns", 0)}
            event = events.decode(json.dumps(fields, separators=(",", ":")).encode())
            found[event.section].append((f"rank {line.get('rank')}", event.shown()[0]))
    return [(section, list(dict.fromkeys(lines))[-_MOST_MESSAGES:]) for section, lines in found.items()]


def _job(job: JobRecord) -> str:
    starts = f"{counted(job.starts, 'start')} of the driver" if job.starts else ""
    return ", ".join(filter(None, (job.description, job.state, starts)))


def _git(view: Run) -> str:
    git = view.record.git
    if git is None or not git.dirty:
        return "" if git is None else git.commit
    where = _path_of(view, view.git_diff)
    return f"{git.commit} with changes{f': {where}' if where else ''}"


def _profiles(files: Iterable[str]) -> str:
    """Return a line for each profile, such as "steps 10 to 13 of 2 ranks: artifacts/profile/steps-10-13"."""
    ranks: dict[tuple[int, int], int] = {}
    for match in filter(None, map(_TRACE.fullmatch, files)):
        steps = int(match[1]), int(match[2])
        ranks[steps] = ranks.get(steps, 0) + 1
    shown = sorted(ranks.items())[:_MAX_FILES]
    return "\n".join(
        f"steps {first} to {last} of {counted(count, 'rank')}: artifacts/profile/steps-{first}-{last}"
        for (first, last), count in shown
    )


def _path_of(layout: Run, path: Path) -> str:
    return layout.shown_path(path) if path.exists() else ""


def _duration(view: Run) -> str:
    total_s, earlier_s = view.duration_s, view.record.earlier_s
    last = f", {duration(max(0.0, total_s - earlier_s))} of it since it was resumed" if total_s and earlier_s else ""
    return duration(total_s) + last


def _failure(failure: FailureRecord | None) -> list[tuple[str, str]]:
    if failure is None:
        return []
    cause, message = root_cause(failure), failure.message
    more = message if message.strip() not in cause else ""  # it has several lines
    about = [("cause", cause), ("kind", failure.kind), ("message", more), ("log", failure.log)]
    return [*about, ("traceback", failure.traceback.rstrip())]


def _artifacts(sizes: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return one line per file; a folder with many files, such as the pictures of a long run, has one line."""
    below: dict[str, list[str]] = {}
    for path in sizes:
        below.setdefault(path.rpartition("/")[0], []).append(path)
    lines = []
    for folder, paths in below.items():
        if folder and len(paths) > _MAX_FILES:
            lines.append((f"{folder}/", f"{counted(len(paths), 'file')}, {size(sum(sizes[path] for path in paths))}"))
        else:
            lines += [(path, size(sizes[path])) for path in paths]
    return sorted(lines)


def _below_run(run_id: str, folder: str) -> str:
    """A tracker's folder relative to the run directory, also after that was moved; other folders are unchanged."""
    _, found, rest = folder.rpartition(f"/{run_id}/{TRACKING}/")
    return f"{TRACKING}/{rest}" if found else folder


def _tracking(view: Run) -> list[tuple[str, str]]:
    """Return the address or the folder of what each tracker has recorded, and how to upload an offline W&B run."""
    from ddptrain.tracking.wandb_files import unsent_parts  # not for a list of runs, as some below

    lines = []
    seen = set()
    for tracker, outputs in view.trackers().items():
        url = outputs.get("url")
        if url in seen:
            continue  # several ranks share a tracker's run
        seen |= {url} - {None}
        place = " ".join(filter(None, (outputs.get("mode"), _below_run(view.run_id, outputs.get("folder", "")))))
        lines.append((tracker, url or place or ", ".join(outputs.values())))
    if not view.is_running and unsent_parts(view.wandb_parts()):
        lines.append(("not sent", f"W&B lacks some of it: ddptrain results sync {view.argument}"))
    return lines


def _attempt(attempt: AttemptRecord, count: int) -> Section:
    title = "ranks" if count == 1 else f"attempt {attempt.attempt} ({attempt.outcome or 'running'})"
    return title, [(f"rank {rank.rank}", _rank(rank)) for rank in attempt.ranks]


def _rank(rank: RankRecord) -> str:
    from ddptrain.protocol.news import describe_status

    where = rank.host + (f", process {rank.pid}" if rank.pid is not None else "")
    gpu = f", GPU {rank.gpu}" if rank.gpu is not None else ""
    return where + gpu + (f", {describe_status(rank.exit)}" if rank.exit is not None else "")


def size(size_bytes: int) -> str:
    """Return a size as text, such as "999 B" or "2.1 MiB"."""
    value, units = float(size_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= _KIB and len(units) > 1:
        value /= _KIB
        units.pop(0)
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"


def print_table(table: Sequence[Sequence[str]], console: Console) -> None:
    """Print a table with a header on a terminal.

    On a narrow one, columns of less interest are left out. If that is not enough, rows are wrapped, and nothing is cut.
    """
    from rich.table import Table
    from rich.text import Text

    columns = [*zip(*table, strict=True)]
    for name in ("", *_LEFT_OUT):
        columns = [column for column in columns if column[0] != name]
        if sum(2 + max(map(columns_of, column)) for column in columns[:-1]) + _LEAST_RESULT <= console.width:
            break
    else:
        console.print(Text(plain_table(table)), soft_wrap=True)
        return
    titles, *rows = zip(*columns, strict=True)
    drawn = Table(box=None, pad_edge=False)
    for title in titles:
        drawn.add_column(Text(title), no_wrap=title not in _WRAPPED, overflow="fold")
    for row in rows:
        cells_of_row = zip(titles, row, strict=True)
        drawn.add_row(*(Text(cell, _style(cell) if title == "STATUS" else "") for title, cell in cells_of_row))
    console.print(drawn)


def _style(status: str) -> str:
    return _STATUS_STYLE.get(RunStatus(status), "") if status in set(RunStatus) else ""


def print_sections(parts: Sequence[Section], console: Console) -> None:
    """Print the sections on a terminal."""
    from rich.table import Table
    from rich.text import Text

    for title, lines in parts:
        console.print(Text(title, "bold"))
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True, style="dim")
        table.add_column(overflow="fold")
        for name, value in lines:
            table.add_row(Text(f"  {name}"), Text(value, _style(value) if name == "status" else ""))
        console.print(table)
        console.print()
