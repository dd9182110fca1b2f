"""The time line of a run: when each rank of each attempt waited, started, trained, saved and failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddptrain.results.metrics import LAST_BYTES, read_events
from ddptrain.results.run import Run, parse_time
from ddptrain.text_tables import duration

WIDTH = 1000  # of a row, in units of its drawing
_MOST_ROWS, _MOST_MARKS = 64, 300
_LEAST_WIDTH = 1.5  # of a span that is shown
_TIMED = {"evaluation": "evaluation", "checkpoint": "saving"}  # activities that ctx.timed() has measured
_KINDS = (
    "run_started", "rank_started", "entered", "finished", "rank_ended", "fault", "checkpoint_staged", "timed",
    "run_finished",
)  # fmt: skip


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
