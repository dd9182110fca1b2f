"""Where the time of a run went: waiting, starting, training, checkpoints, evaluation, failures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ddptrain.results.metrics import is_time, read_events
from ddptrain.results.run import Run, parse_time
from ddptrain.results.run_record import RunRecord, RunStatus
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


def time_use_of(view: Run) -> TimeUse | None:
    """Return where the time of a run went; None if its duration is not known."""
    if (duration_s := view.duration_s) is None:
        return None
    return time_use(view.record, timed_events(view), duration_s)


def timed_events(layout: Run) -> Iterator[dict[str, Any]]:
    """Yield the events of a run that matter here."""
    return (event for event in read_events(layout.events_jsonl, _KINDS) if is_time(event.get("seconds", 0)))


def time_use(record: RunRecord, events: Iterable[Mapping[str, Any]], duration_s: float) -> TimeUse:
    """Divide the duration of a run into its parts; their sum is the duration.

    Events may be missing: the rest is `other`.
    """
    if not record.attempts:
        return TimeUse(queue=duration_s)
    parts = dict.fromkeys(TimeUse.__dataclass_fields__, 0.0)

    def add(name: str, seconds: float) -> None:
        parts[name] += max(0.0, seconds)

    by_attempt = _by_attempt(events)
    started, resumed = _seconds(record.started_at), _seconds(record.resumed_at)
    part_began = started if resumed is None else resumed
    now = (part_began or 0.0) + duration_s - record.earlier_s  # the end of the run, or the time now
    before: tuple[float, bool] | None = None  # when the attempt before ended, and whether the run did, too
    for attempt, following in zip(record.attempts, (*record.attempts[1:], None), strict=True):
        if (began := _seconds(attempt.started_at)) is None:
            continue
        ended = now if (end := _seconds(attempt.ended_at)) is None else end
        own = by_attempt.get(attempt.attempt, _AttemptEvents())
        is_restart = False
        if before is None:
            add("queue", began - (began if started is None else started))
        elif resumed is not None and before[0] <= resumed <= began:
            add("queue", began - resumed)
        elif not before[1]:  # otherwise an earlier driver resumed the run; when it began is not known
            is_restart = True
            add("restarts", began - before[0])
        trains_from = ended
        if 0 < attempt.world_size <= len(own.entered):
            trains_from = min(max(own.entered), ended)
        add("restarts" if is_restart else "start", trains_from - began)
        if following is not None and attempt.outcome not in _KEPT:
            saved = own.staged.get(following.resumed_from)
            kept_until = trains_from if saved is None else min(max(saved, trains_from), ended)
            trained_until = ended
            add("lost", trained_until - kept_until)
        else:
            trained_until = kept_until = min(max([trains_from, *(own.finished or [ended])]), ended)
        left_s = kept_until - trains_from
        for activity, name in _ACTIVITIES.items():
            inside_s = min(_inside(own.timed, activity, trains_from, kept_until), left_s)
            left_s -= inside_s
            add(name, inside_s)
        add("training", left_s)
        run_ended = [now] if following is None and record.ended_at is not None else own.run_finished[-1:]
        add("end", max([ended, *run_ended]) - trained_until)
        before = ended, bool(own.run_finished)
    return _fitted(TimeUse(**parts), duration_s)


@dataclass(slots=True)
class _AttemptEvents:
    """When events of an attempt happened, in seconds since 1970 by the clock of the driver."""

    entered: list[float] = field(default_factory=list)
    finished: list[float] = field(default_factory=list)
    run_finished: list[float] = field(default_factory=list)
    staged: dict[int | None, float] = field(default_factory=dict)  # by the step of the checkpoint
    timed: list[tuple[str, float, float]] = field(default_factory=list)  # activity, end by the rank's clock, seconds


def _by_attempt(events: Iterable[Mapping[str, Any]]) -> dict[int, _AttemptEvents]:
    attempts: dict[int, _AttemptEvents] = {}
    now = _AttemptEvents()
    for event in events:
        time_s = float(event["time_s"])
        match event:
            case {"event": "run_started", "attempt": int(number)}:
                now = attempts[number] = _AttemptEvents()
            case {"event": "entered" | "finished" | "run_finished" as kind}:
                getattr(now, kind).append(time_s)
            case {"event": "checkpoint_staged", "step": int(step)}:
                now.staged[step] = time_s
            case {"event": "timed", "activity": str(activity), "seconds": int() | float() as seconds}:
                now.timed.append((activity, time_s, float(seconds)))
    return attempts


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
