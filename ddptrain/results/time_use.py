"""Where the time of a run went: waiting, starting, training, checkpoints, evaluation, failures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ddptrain.results.layout import RunLayout
from ddptrain.results.lookup import RunView, parse_time
from ddptrain.results.metrics import is_time, read_events
from ddptrain.results.run_record import AttemptRecord, RunRecord, RunStatus
from ddptrain.text_tables import duration

_KINDS = ("run_started", "entered", "finished", "checkpoint_staged", "timed", "run_finished")
_LEAST_SHOWN_S = 0.05
_KEPT = (RunStatus.SUCCEEDED, RunStatus.PREEMPTED)


@dataclass(frozen=True, slots=True)
class TimeUse:
    """Seconds of a run, without the time between its parts if it was resumed.

    queue: from the beginning of the run to the start of its ranks: data are prepared, a cluster starts, slots are
    taken. start: until all ranks have entered the training function. first_step: until the first gradients of all ranks
    are there, with compilation. training: the rest of the training function. data: rank 0 waited for a batch of a
    DataLoader. ranks: rank 0 waited for the gradients of other ranks, with their exchange. checkpoints: rank 0 was in
    ctx.checkpoint. evaluation: rank 0 was in `ctx.timed("evaluation")`. lost: training that was repeated after a
    failure, or not continued from. restarts: from the end of an attempt until the ranks of the next one train. end:
    from the end of training to the end of the run: uploads, and the end of ranks and cluster. other: not known.
    """

    queue: float = 0.0
    start: float = 0.0
    first_step: float = 0.0
    training: float = 0.0
    data: float = 0.0
    ranks: float = 0.0
    checkpoints: float = 0.0
    evaluation: float = 0.0
    lost: float = 0.0
    restarts: float = 0.0
    end: float = 0.0
    other: float = 0.0

    def as_dict(self) -> dict[str, float]:
        """Return the seconds by name, rounded to milliseconds."""
        return {name: round(seconds, 3) for name, seconds in asdict(self).items()}

    @property
    def goodput(self) -> float | None:
        """Training divided by all; None for no time at all."""
        whole = sum(asdict(self).values())
        return self.training / whole if whole else None

    def shown(self) -> list[tuple[str, str]]:
        """Return the parts of at least 0.05 s as text: the duration, and its share of the whole."""
        whole = sum(asdict(self).values())
        return [(name, f"{duration(seconds)} ({seconds / whole:.0%})") for name, seconds in self._long_parts()]

    def line(self) -> str:
        """Return the parts in one line, as "queue 3.4 s, start 6.1 s, training 2m 05s"; "" if all are short."""
        return ", ".join(f"{name} {duration(seconds)}" for name, seconds in self._long_parts())

    def _long_parts(self) -> list[tuple[str, float]]:
        parts = asdict(self).items()
        return [(_NAMES.get(name, name), seconds) for name, seconds in parts if seconds >= _LEAST_SHOWN_S]


_NAMES = {
    "first_step": "first step",
    "data": "waiting for data",
    "ranks": "waiting for ranks",
    "lost": "lost to failures",
}
# Activities of rank 0 -> the part of the time that they are. The first one wins where they overlap.
_ACTIVITIES = {
    "checkpoint": "checkpoints",
    "evaluation": "evaluation",
    "first step": "first_step",
    "data": "data",
    "ranks": "ranks",
}
_TAKEN_FIRST = ("other", "end", "restarts", "queue", "start", "lost", "training", *reversed(_ACTIVITIES.values()))


@dataclass(slots=True)
class _AttemptEvents:
    """The events of one attempt; times in seconds since 1970."""

    stamps: list[tuple[str, int, float]] = field(default_factory=list)  # kind, step, time of the driver; in their order
    timed: list[tuple[str, float, float]] = field(default_factory=list)  # activity, end by the rank's clock, seconds

    def times(self, kind: str) -> list[float]:
        return [time_s for name, _, time_s in self.stamps if name == kind]

    @property
    def staged(self) -> dict[int, float]:
        """By step."""
        return {step: time_s for name, step, time_s in self.stamps if name == "checkpoint_staged"}

    def add_record(self, attempt: AttemptRecord) -> None:
        """Add when the attempt began and ended."""
        if (ended := _seconds(attempt.ended_at)) is not None:
            at = len(self.stamps) - len(self.times("run_finished"))  # these are the last
            self.stamps.insert(at, ("ended", 0, ended))
        if (began := _seconds(attempt.started_at)) is not None:
            self.stamps.insert(0, ("began", 0, began))


def time_use_of(view: RunView) -> TimeUse | None:
    """Return where the time of a run went; None if its duration is not known."""
    if (duration_s := view.duration_s) is None:
        return None
    return time_use(view.record, timed_events(view.layout), duration_s)


def timed_events(layout: RunLayout) -> Iterator[dict[str, Any]]:
    """Yield the events of a run that matter here."""
    return (event for event in read_events(layout.events_jsonl, _KINDS) if is_time(event.get("seconds", 0)))


def time_use(record: RunRecord, events: Iterable[Mapping[str, Any]], duration_s: float) -> TimeUse:
    """Divide the duration of a run into its parts; their sum is the duration.

    Events may be missing: the rest is `other`.
    """
    spans = _Spans(record, duration_s)
    by_attempt = _by_attempt(events)
    all_events = [by_attempt.get(attempt.attempt, _AttemptEvents()) for attempt in record.attempts]
    for attempt, own in zip(record.attempts, all_events, strict=True):
        own.add_record(attempt)
    for number, own in enumerate(all_events):
        spans.add(number, record.attempts[number], own)
    if not record.attempts:
        return TimeUse(queue=duration_s)
    return _fitted(TimeUse(**spans.seconds), duration_s)


def _by_attempt(events: Iterable[Mapping[str, Any]]) -> dict[int, _AttemptEvents]:
    attempts: dict[int, _AttemptEvents] = {}
    now = _AttemptEvents()
    for event in events:
        time_s = float(event["time_s"])
        match event:
            case {"event": "run_started", "attempt": int(number)}:
                now = attempts[number] = _AttemptEvents()
            case {"event": "entered" | "finished" | "run_finished" as kind}:
                now.stamps.append((kind, 0, time_s))
            case {"event": "checkpoint_staged", "step": int(step)}:
                now.stamps.append(("checkpoint_staged", step, time_s))
            case {"event": "timed", "activity": str(activity), "seconds": int() | float() as seconds}:
                now.timed.append((activity, time_s, float(seconds)))
    return attempts


class _Spans:
    """Adds up the seconds of each part, attempt by attempt."""

    def __init__(self, record: RunRecord, duration_s: float) -> None:
        self._record = record
        self._started = _seconds(record.started_at)
        self._resumed = _seconds(record.resumed_at)
        part_began = self._started if self._resumed is None else self._resumed
        self._now = (part_began or 0.0) + duration_s - record.earlier_s  # the end of the run, or the time now
        self._before: tuple[float, bool] | None = None  # when the attempt before ended, and whether the run did, too
        self.seconds: dict[str, float] = dict.fromkeys(TimeUse.__dataclass_fields__, 0.0)

    def add(self, number: int, attempt: AttemptRecord, events: _AttemptEvents) -> None:
        if not (starts := events.times("began")):
            return
        began, ended = starts[0], max(events.times("ended"), default=self._now)
        run_ended = events.times("run_finished")
        is_last = number + 1 == len(self._record.attempts)
        is_restart = self._add_wait(began)
        entered = events.times("entered")
        all_entered = 0 < attempt.world_size <= len(entered)
        trains_from = min(max(entered), ended) if all_entered else ended
        self._add("restarts" if is_restart else "start", trains_from - began)
        following = None if is_last else self._record.attempts[number + 1]
        trained_until = self._add_training(attempt, events, trains_from, ended, following)
        over = [self._now] if is_last and self._record.ended_at is not None else run_ended[-1:]
        self._add("end", max([ended, *over]) - trained_until)
        self._before = ended, bool(run_ended)

    def _add_wait(self, began: float) -> bool:
        """Add the time before an attempt; return whether it restarts the ranks after a failure."""
        if self._before is None:
            self._add("queue", began - (began if self._started is None else self._started))
            return False
        before, run_ended = self._before
        if self._resumed is not None and before <= self._resumed <= began:
            self._add("queue", began - self._resumed)
            return False
        if run_ended:  # an earlier driver resumed the run; when it began is not known
            return False
        self._add("restarts", began - before)
        return True

    def _add_training(
        self,
        attempt: AttemptRecord,
        events: _AttemptEvents,
        trains_from: float,
        ended: float,
        following: AttemptRecord | None,
    ) -> float:
        """Add what an attempt did until its ranks had finished; return when that was."""
        if following is not None and attempt.outcome not in _KEPT:
            saved = None if following.resumed_from is None else events.staged.get(following.resumed_from)
            kept_until = trains_from if saved is None else min(max(saved, trains_from), ended)
            until = ended
            self._add("lost", until - kept_until)
        else:
            until = kept_until = max(events.times("finished"), default=ended)
        until, kept_until = min(max(until, trains_from), ended), min(max(kept_until, trains_from), ended)
        aside = 0.0
        for activity, name in _ACTIVITIES.items():
            inside = _inside(events.timed, activity, trains_from, kept_until)
            inside = min(inside, kept_until - trains_from - aside)
            aside += inside
            self._add(name, inside)
        self._add("training", kept_until - trains_from - aside)
        return until

    def _add(self, name: str, seconds: float) -> None:
        self.seconds[name] += max(0.0, seconds)


def _inside(timed: Sequence[tuple[str, float, float]], activity: str, begin: float, end: float) -> float:
    """Return the seconds of an activity between two points in time."""
    spans = [(until - max(0.0, seconds), until) for name, until, seconds in timed if name == activity]
    return sum(max(0.0, min(until, end) - max(since, begin)) for since, until in spans)


def _fitted(use: TimeUse, duration_s: float) -> TimeUse:
    """Return parts whose sum is `duration_s`: missing time becomes `other`; the least certain parts lose a surplus."""
    parts = asdict(use)
    rest = duration_s - sum(parts.values())
    if rest >= 0:
        return replace(use, other=rest)
    for name in _TAKEN_FIRST:
        taken = min(parts[name], -rest)
        parts[name] -= taken
        rest += taken
    return TimeUse(**parts)


def _seconds(text: str | None) -> float | None:
    time = parse_time(text)
    return None if time is None else time.timestamp()
