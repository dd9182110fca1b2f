"""What reports show of a run and of the end of a command, read from its files once: the same facts for all forms."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any, Self

from ddptrain.errors import SIGNALLED, ConfigError, DdptrainError, ExitCode, Problem, one_line
from ddptrain.file_ops import open_regular
from ddptrain.model_registry.retrainings import GateOutcome, RetrainRecord
from ddptrain.redact import hide_credentials, hide_known
from ddptrain.results.metrics import LAST_BYTES, read_events
from ddptrain.results.run import Run, parse_time
from ddptrain.results.run_record import FailureRecord, root_cause
from ddptrain.results.show.log_follower import final_text
from ddptrain.text_tables import duration

_MOST_RANKS = 4  # whose last lines are shown
_LINES, _TAIL_BYTES = 30, 6000  # of one rank, so that a report fits into a comment
_LINE_CHARACTERS = 500
_READ_BYTES = 256 << 10  # the end of a log
_MOST_FRAMES = 20
_FRAME = re.compile(r'^[ |+]*File "(?P<file>[^"\n]{1,1000})", line (?P<line>\d{1,9})(?:, in (?P<name>[^\n]{1,300}))?')
_PLACE = re.compile(r"(.+):(\d{1,9})")
_INSTALLED = re.compile(r"/(?:site|dist)-packages/|<frozen")
_OURS = (Path(__file__).parents[1], Path(sysconfig.get_paths()["stdlib"]))
WIDTH = 1000  # of a row, in units of its drawing
_MOST_ROWS, _MOST_MARKS = 64, 300
_LEAST_WIDTH = 1.5  # of a span that is shown
_TIMED = {"evaluation": "evaluation", "checkpoint": "saving"}  # activities that ctx.timed() has measured
_KINDS = (
    "run_started", "rank_started", "entered", "finished", "rank_ended", "fault", "checkpoint_staged", "timed",
    "run_finished",
)  # fmt: skip
_NOT_WRONG = SIGNALLED | {ExitCode.REJECTED, ExitCode.DEADLINE, ExitCode.PREEMPTED}


@dataclass(frozen=True, slots=True)
class StageReport:
    """One stage of a retraining: status is done, skipped or failed; `detail` is one line."""

    name: str
    status: str
    duration_s: float | None = None
    detail: str = ""


@dataclass(frozen=True)
class RunReport:
    """The end of a command: that of its run, or the error that prevented it. It reads what the run has left.

    name: the same for each run of a configuration, as "petnames"; CI services compare test cases by it.
    status: succeeded, failed, promoted, rejected, ... reason: why it ended so, in one line; "" for the reasons of the
    gate, or the run's failure.
    view: the run; None if none was started. problems: of the configuration.
    retraining: its record, with the new version, the scores and the gate; stages: what was done.
    secrets: texts that are left out of the ranks' last lines.
    workspace: the checkout of the CI job, to which the names of source files are relative.
    """

    name: str
    status: str
    exit_code: int
    reason: str = ""
    view: Run | None = None
    problems: tuple[Problem, ...] = ()
    retraining: RetrainRecord | None = None
    stages: Sequence[StageReport] = ()
    secrets: Sequence[str] = field(default=(), repr=False)
    workspace: Path = Path()

    @classmethod
    def of_run(cls, view: Run, secrets: Sequence[str] = ()) -> Self:
        """Return the report of a run that has ended."""
        record = view.record
        exit_code = ExitCode.INTERNAL if record.exit_code is None else record.exit_code
        return cls(record.name or view.run_id, str(view.status), exit_code, view=view, secrets=secrets)

    @classmethod
    def of_error(cls, name: str, error: DdptrainError) -> Self:
        """Return the report of an error before a run began."""
        problems = error.problems if isinstance(error, ConfigError) else ()
        what = f"the configuration has {len(problems)} problems" if len(problems) > 1 else one_line(error)
        return cls(name, "failed", error.exit_code, what, problems=problems)

    @property
    def model(self) -> str:
        """The model that was retrained, or ""."""
        return self.retraining.model if self.retraining else ""

    @property
    def version(self) -> int | None:
        """The version that a retraining has made."""
        return self.retraining.version if self.retraining else None

    @property
    def gate(self) -> Sequence[GateOutcome]:
        """The conditions of the gate."""
        return self.retraining.gate if self.retraining else ()

    @property
    def level(self) -> str:
        """The level of its annotation: error, warning (it ended early or was rejected), or "" if all is well."""
        if self.exit_code == ExitCode.SUCCEEDED:
            return ""
        return "warning" if self.exit_code in _NOT_WRONG else "error"

    @property
    def failure(self) -> FailureRecord | None:
        """The root cause of its run."""
        return self.view.record.failure if self.view is not None else None

    @property
    def cause(self) -> str:
        """Why it did not succeed, in one line; "" if it did and no reason was given."""
        refused = [each.reason for each in self.gate if not each.passed]
        if self.reason or refused:
            return self.reason or "; ".join(refused)
        return root_cause(self.failure) or (self.view.problem if self.view is not None else "")

    @cached_property
    def ranks(self) -> list[RankResult]:
        """How the ranks ended."""
        return rank_results(self.view) if self.view is not None else []

    @cached_property
    def tails(self) -> dict[int, list[str]]:
        """The last lines of the first ranks that failed, one for each message; that of the root cause comes first."""
        view, failure = self.view, self.failure
        if view is None:
            return {}
        first = failure.rank if failure is not None else None
        failed = sorted((each for each in self.ranks if each.failed), key=lambda each: (each.rank != first, each.rank))
        # A mistake that fails on every rank counts once.
        by_message = {each.message: each.rank for each in reversed(failed)}
        shown = [each.rank for each in failed if by_message[each.message] == each.rank][:_MOST_RANKS]
        logs = view.logs()
        return {r: last_lines(logs[r], _LINES, _TAIL_BYTES, self.secrets) for r in shown if r in logs}

    @cached_property
    def source(self) -> Frame | None:
        """The last line of the traceback that is a file in the workspace and no installed package.

        Files of uploaded code are found in the folder that they come from.
        """
        code = self.view.record.code if self.view is not None else None
        for frame in reversed(user_frames(self.failure)):
            _, found, rest = frame.file.partition(f"/{code.hash}/" if code is not None and code.hash else "\0")
            file = f"{code.folder}/{rest}" if code is not None and code.folder and found else frame.file
            if inside := _in_workspace(file, self.workspace):
                return Frame(inside, frame.line)
        return None


def last_lines(path: Path, most: int, room_bytes: int, secrets: Sequence[str] = ()) -> list[str]:
    """Return the last lines of a log as a terminal shows them, without credentials; none if it cannot be read."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _READ_BYTES))
            lines = file.read(_READ_BYTES).decode("utf-8", "replace").split("\n")
    except OSError:
        return []
    kept: list[str] = []
    for line in reversed((lines if lines[-1] else lines[:-1])[-most:]):
        text = final_text(line if line.count("\r") < 1000 else line.rpartition("\r")[2])[: 2 * _LINE_CHARACTERS]
        shown = str(hide_credentials(hide_known(text, secrets)))
        shown = shown if len(shown) <= _LINE_CHARACTERS else f"{shown[:_LINE_CHARACTERS]}..."
        room_bytes -= len(shown.encode(errors="replace")) + 1
        if room_bytes < 0:
            break
        kept.append(shown)
    return kept[::-1]


# --- How the ranks ended ---


@dataclass(frozen=True, slots=True)
class RankResult:
    """A rank of the last attempt: outcome is passed, failed, or stopped (with `message`: why)."""

    rank: int
    host: str
    outcome: str
    message: str = ""

    @property
    def failed(self) -> bool:
        """Whether it failed by itself."""
        return self.outcome == "failed"


def rank_results(view: Run) -> list[RankResult]:
    """Return how the ranks of the last attempt ended, in the order of ranks; none if no rank was started."""
    failure = view.record.failure
    root, by_order = (None, False) if failure is None else (failure.rank, failure.is_order)
    faults: dict[int, dict[str, Any]] = {}
    stopped: set[int] = set()
    for event in read_events(view.events_jsonl, ("run_started", "fault", "rank_ended"), LAST_BYTES):
        if event["event"] == "run_started":
            faults, stopped = {}, set()
        elif isinstance(rank := event.get("rank"), int):
            if event["event"] == "fault":
                faults.setdefault(rank, event)
            elif event.get("stopped"):
                stopped.add(rank)
    results = []
    for rank in view.record.attempts[-1].ranks if view.record.attempts else ():
        fault = faults.get(rank.rank)
        outcome, message = "passed", ""
        if fault is not None and (rank.rank == root or not fault.get("victim")):
            outcome, message = "failed", str(fault.get("message", ""))
        elif failure is not None and rank.rank == root:
            outcome, message = "failed", failure.message
        elif fault is not None:
            outcome, message = "stopped", f"lost its connection: {fault.get('message', '')}"
        elif rank.rank in stopped or (failure is not None and (rank.exit is None or (rank.exit and by_order))):
            outcome, message = "stopped", "stopped because the run ended"
        elif rank.exit:
            outcome, message = "failed", f"exit code {rank.exit}"
        if by_order and outcome == "failed":
            outcome = "stopped"  # nothing is wrong: somebody has asked the run to end
        results.append(RankResult(rank.rank, rank.host, outcome, message))
    return results


# --- Where in the user's code it failed ---


@dataclass(frozen=True, slots=True)
class Frame:
    """A line of the user's code, from 1; `code` is its text if a traceback has it."""

    file: str
    line: int
    function: str = ""
    code: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def user_frames(failure: FailureRecord | None) -> list[Frame]:
    """Return the last 20 frames of a traceback that are neither in the standard library nor in installed packages."""
    lines = failure.traceback[-100_000:].splitlines() if failure is not None else []
    frames = []
    for text, below in pairwise([*lines, ""]):
        if (match := _FRAME.match(text)) and not _is_installed(match["file"]):
            code = below.strip() if below.startswith("    ") and not _FRAME.match(below) else ""
            frames.append(Frame(match["file"], int(match["line"]), match["name"] or "", code))
    return frames[-_MOST_FRAMES:]


def line_of_problem(problem: Problem, workspace: Path, folder: Path) -> Frame | None:
    """Return the line of a configuration that a problem is at; `folder` is the one that its path is relative to."""
    match = _PLACE.fullmatch(problem.where)
    found = _in_workspace(str(folder / match[1]), workspace) if match else ""
    return Frame(found, int(match[2])) if match and found else None


def _is_installed(file: str) -> bool:
    return bool(_INSTALLED.search(file)) or any(Path(file).is_relative_to(folder) for folder in _OURS)


def _in_workspace(file: str, workspace: Path) -> str:
    """Return the path relative to the workspace; "" if it is elsewhere, or not the user's code."""
    try:
        path, root = Path(file).resolve(), workspace.resolve()
        is_inside = not _is_installed(file) and path.is_file() and path.is_relative_to(root)
    except (OSError, ValueError, RuntimeError):  # ValueError: a NUL character; RuntimeError: a circle of links
        return ""
    return str(PurePosixPath(path.relative_to(root))) if is_inside else ""


# --- The time line: when each rank of each attempt waited, started, trained, saved and failed ---


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a row, in units of its drawing: waiting, start, training, end, evaluation or saving.

    A moment, which is a checkpoint or a failure, has the width 0.
    """

    kind: str
    x: float
    width: float
    text: str


@dataclass(frozen=True, slots=True)
class Row:
    """One rank of one attempt; `text` says the same as the drawing."""

    attempt: int
    rank: int
    host: str
    spans: Sequence[Span]
    text: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """All rows; ticks: times since the start of the run, at equal distances. hidden: rows that are left out."""

    rows: Sequence[Row]
    ticks: Sequence[str]
    hidden: int = 0


@dataclass(slots=True)
class _Rank:
    """What the events say about one rank of one attempt; times in seconds since 1970."""

    attempt: int
    rank: int
    waits_since: float
    started: float
    host: str = ""
    entered: float | None = None
    finished: float | None = None
    ended: float | None = None
    failed: float | None = None
    cause: str = ""
    checkpoints: list[tuple[float, Any]] = field(default_factory=list)
    timed: list[tuple[str, float, float]] = field(default_factory=list)  # kind, start, end

    def note(self, event: Mapping[str, Any], time_s: float) -> None:
        """Take in an event."""
        match event:
            case {"event": "rank_started"}:
                self.host = str(event.get("host", ""))
            case {"event": "entered"}:
                self.entered = time_s
            case {"event": "finished"}:
                self.finished = time_s
            case {"event": "rank_ended"}:
                self.ended = time_s
            case {"event": "fault"} if self.failed is None:
                self.failed, self.cause = time_s, str(event.get("message", ""))[:300]
            case {"event": "checkpoint_staged"} if len(self.checkpoints) < _MOST_MARKS:
                self.checkpoints.append((time_s, event.get("step")))
            case {"event": "timed", "activity": str(name), "seconds": int() | float() as seconds}:
                if name in _TIMED and 0 <= seconds <= time_s and len(self.timed) < _MOST_MARKS:
                    self.timed.append((_TIMED[name], time_s - seconds, time_s))


def read_timeline(view: Run) -> Timeline | None:
    """Return the time line of a run; None if no rank was started. An attempt waits since the end of the one before."""
    began = parse_time(view.record.started_at)
    attempts: list[dict[int, _Rank]] = []
    starts: list[tuple[int, float, float]] = []  # number, since when it waits, start
    first = last = began.timestamp() if began else None
    for event in read_events(view.events_jsonl, _KINDS, LAST_BYTES):
        time_s = float(event["time_s"])
        first, last = (time_s, time_s) if first is None or last is None else (first, last)
        if event["event"] == "run_started":
            number = event.get("attempt")
            starts.append((number if isinstance(number, int) else len(starts) + 1, last, time_s))
            attempts.append({})
        elif attempts and isinstance(rank := event.get("rank"), int):
            attempts[-1].setdefault(rank, _Rank(starts[-1][0], rank, *starts[-1][1:])).note(event, time_s)
        last = max(last, time_s)
    count = sum(map(len, attempts))
    if not count or first is None or last is None:
        return None
    if view.is_running and view.duration_s is not None:
        last = max(last, first + view.duration_s)
    ends = [waits for _, waits, _ in starts[1:]] + [last]
    ranks = [(own[rank], end) for own, end in zip(attempts, ends, strict=True) for rank in sorted(own)]
    length = max(last - first, 1e-3)
    rows = [_row(rank, end, first, length) for rank, end in ranks[:_MOST_ROWS]]
    ticks = ["0 s", *(duration(length * part / 4) for part in range(1, 5))]
    return Timeline(rows, ticks, max(0, count - _MOST_ROWS))


def _row(rank: _Rank, end: float, origin: float, length: float) -> Row:
    def x(time_s: float) -> float:
        return round(min(1.0, max(0.0, (time_s - origin) / length)) * WIDTH, 1)

    def span(kind: str, start: float, stop: float, text: str = "") -> Span:
        return Span(kind, x(start), round(x(stop) - x(start), 1), text or f"{kind} {duration(stop - start)}")

    over = rank.ended if rank.ended is not None else end
    stopped = min(time_s for time_s in (rank.finished, rank.failed, over) if time_s is not None)
    trains = stopped if rank.entered is None else rank.entered
    phases = [
        ("waiting", rank.waits_since, rank.started),
        ("start", rank.started, min(stopped, trains)),
        ("training", trains, stopped),
        ("end", stopped, over),
    ]
    spans = [span(*phase) for phase in phases if phase[2] > phase[1]]
    texts = [each.text for each in spans] + [f"{len(rank.checkpoints)} checkpoints"] * bool(rank.checkpoints)
    spans = [each for each in spans if each.width >= _LEAST_WIDTH]
    spans += [Span(one.kind, one.x, max(_LEAST_WIDTH, one.width), one.text) for one in (span(*t) for t in rank.timed)]
    spans += [span("checkpoint", at, at, f"checkpoint at step {step}") for at, step in rank.checkpoints]
    if rank.failed is not None:
        spans.append(span("failure", rank.failed, rank.failed, f"failed: {rank.cause}"))
        texts.append(spans[-1].text)
    return Row(rank.attempt, rank.rank, rank.host, spans, "; ".join(texts))
