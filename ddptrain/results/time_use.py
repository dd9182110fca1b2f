"""Where the time of a run went: waiting, starting, training, checkpoints, evaluation, failures.

Each event has `run_s`: the seconds of the run so far, by a monotonic clock of its driver. They go on where a run is
resumed, so that the time between its parts does not count. Parts of the time are between two events: driver_started,
run_started (of an attempt), entered, checkpoint_staged, finished, attempt_ended, run_finished.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ddptrain.results.metrics import is_time, read_events
from ddptrain.results.run import Run
from ddptrain.results.run_record import AttemptRecord, RunRecord, RunStatus
from ddptrain.text_tables import duration

_KINDS = (
    "driver_started", "run_started", "entered", "finished", "checkpoint_staged", "timed", "attempt_ended",
    "run_finished",
)  # fmt: skip
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
    """Return where the time of a run went, as it was recorded at its end; None if that is not known."""
    if not view.is_running and (recorded := view.record.time_use_s):
        return TimeUse(**{name: recorded.get(name) or 0.0 for name in TimeUse.__dataclass_fields__})
    if (duration_s := view.duration_s) is None:
        return None
    return time_use(view.record, timed_events(view), duration_s)


def timed_events(layout: Run) -> Iterator[dict[str, Any]]:
    """Yield the events of a run that matter here; those of earlier versions have no `run_s`."""
    events = read_events(layout.events_jsonl, _KINDS)
    return (event for event in events if is_time(event.get("seconds", 0)) and is_time(event.get("run_s")))


def time_use(record: RunRecord, events: Iterable[Mapping[str, Any]], duration_s: float) -> TimeUse:
    """Divide the duration of a run into its parts; their sum is the duration.

    Events may be missing: the rest is `other`.
    """
    if not record.attempts:
        return TimeUse(queue=duration_s)
    parts = dict.fromkeys(TimeUse.__dataclass_fields__, 0.0)

    def add(name: str, seconds: float) -> None:
        parts[name] += max(0.0, seconds)

    if not (attempts := _attempts(record, events, duration_s)):
        return TimeUse(other=duration_s)
    before: _Attempt | None = None
    for attempt, following in zip(attempts, (*attempts[1:], None), strict=True):
        is_restart = before is not None and before.part_ended is None
        if before is None or before.part_ended is not None:
            add("queue", attempt.began - attempt.part_began)
        else:
            add("restarts", attempt.began - before.ended)
        trains_from = attempt.ended
        if 0 < attempt.record.world_size <= len(attempt.entered):
            trains_from = min(max(attempt.entered), attempt.ended)
        add("restarts" if is_restart else "start", trains_from - attempt.began)
        if following is not None and attempt.record.outcome not in _KEPT:
            saved = attempt.staged.get(following.record.resumed_from)
            kept_until = trains_from if saved is None else min(max(saved, trains_from), attempt.ended)
            trained_until = attempt.ended
            add("lost", trained_until - kept_until)
        else:
            last = max([trains_from, *(attempt.finished or [attempt.ended])])
            trained_until = kept_until = min(last, attempt.ended)
        left_s = kept_until - trains_from
        for activity, name in _ACTIVITIES.items():
            inside_s = min(_inside(attempt.timed, activity, trains_from, kept_until), left_s)
            left_s -= inside_s
            add(name, inside_s)
        add("training", left_s)
        add("end", max(attempt.ended, attempt.part_ended or 0.0) - trained_until)
        before = attempt
    return _fitted(TimeUse(**parts), duration_s)


@dataclass(slots=True)
class _Attempt:
    """When events of an attempt happened, in seconds of the run.

    part_ended: when the run ended, or its driver: it goes on in another part, whose driver began at its `part_began`.
    """

    record: AttemptRecord
    part_began: float
    began: float
    ended: float = -1.0
    part_ended: float | None = None
    entered: list[float] = field(default_factory=list)
    finished: list[float] = field(default_factory=list)
    staged: dict[int | None, float] = field(default_factory=dict)  # by the step of the checkpoint
    timed: list[tuple[str, float, float]] = field(default_factory=list)  # activity, end, seconds


def _attempts(record: RunRecord, events: Iterable[Mapping[str, Any]], duration_s: float) -> list[_Attempt]:
    records = {attempt.attempt: attempt for attempt in record.attempts}
    found: dict[int, _Attempt] = {}
    now: _Attempt | None = None
    part_began = last = 0.0
    for event in events:
        at = float(event["run_s"])
        match event:
            case {"event": "driver_started"}:
                part_began = at
                if now is not None and now.part_ended is None:  # the driver before was killed
                    now.part_ended = last
            case {"event": "run_started", "attempt": int(number)} if number in records:
                now = found[number] = _Attempt(records[number], part_began, at)
            case {"event": "run_finished"} if now is not None:
                now.part_ended = at
            case {"event": "attempt_ended"} if now is not None:
                now.ended = at
            case {"event": "entered" | "finished" as kind} if now is not None:
                getattr(now, kind).append(at)
            case {"event": "checkpoint_staged", "step": int(step)} if now is not None:
                now.staged[step] = at
            case {"event": "timed", "activity": str(activity), "seconds": int() | float() as seconds} if (
                now is not None
            ):
                now.timed.append((activity, at, float(seconds)))
        last = max(last, at)
    attempts = [*found.values()]
    if attempts and record.ended_at is not None:
        attempts[-1].part_ended = duration_s
    for attempt in attempts:
        if attempt.ended < 0:  # it has not ended, or its driver was killed
            attempt.ended = duration_s if attempt.part_ended is None else attempt.part_ended
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
