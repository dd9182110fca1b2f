"""When each rank of each attempt started, trained, saved and failed, from events.jsonl."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ddptrain.results.lookup import RunView, parse_time
from ddptrain.results.metrics import LAST_BYTES, read_events
from ddptrain.text_tables import duration

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
        *([] if rank.timed else _evaluations(evaluations, number, attempt.started, over, scale)),
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


def _evaluations(
    evaluations: Sequence[tuple[float, int]], rank: int, start: float, end: float, scale: _Scale
) -> Iterator[Mark]:
    times = [time_s for time_s, logged_by in evaluations if logged_by == rank and start <= time_s <= end]
    for time_s in times[:: max(1, -(-len(times) // _MOST_MARKS))]:
        yield Mark("evaluation", scale.x(time_s), "result of an evaluation")
