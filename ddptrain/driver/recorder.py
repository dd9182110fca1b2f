"""Records what happens in a run in its directory, and passes it to the observers: display, reports, notifications."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ddptrain.config.run_config import CheckpointConfig, FailureConfig
from ddptrain.config.wording import listed, nearest, shorten
from ddptrain.driver.display.facts import Pace
from ddptrain.driver.fault import Fault
from ddptrain.driver.observers import RunObserver
from ddptrain.log import Log
from ddptrain.protocol import events
from ddptrain.protocol.news import SystemSample
from ddptrain.results.run_record import (
    EnvironmentValue,
    NotFiniteRecord,
    ProgressRecord,
    RankRecord,
    as_json_data,
)
from ddptrain.results.run_writer import RunWriter

_MOST_RETURNED = 1 << 16  # characters of a return value
_MOST_FOUND, _MOST_FOUND_KEYS = 2_000, 20
_MOST_NAMES = 20
_PROGRESS_EVERY_S = 2.0
_DECIDING = ("ddptrain", "torch", "python")
_DEFAULT_METRIC = CheckpointConfig().metric
_NOT_LOGGED = frozenset({"traceback", "rank_time_ns", "run_id"})
_OF_EACH_RANK = frozenset({"rank_started", "entered", "finished", "rank_ended"})  # its worker has logged its start, end
_log = Log(__name__)
_NOT_FOUND = frozenset({"base_url"})  # only the driver sets it: `results sync` sends the key to that server


class Recorder:
    """Has a method for each kind of fact, which writes the fact to all places where it belongs."""

    def __init__(
        self,
        writer: RunWriter,
        observers: Sequence[RunObserver] = (),
        metric: str | None = None,
        activity: str = "training",
        failure: FailureConfig | None = None,
    ) -> None:
        """`metric` decides which checkpoint is best; None: no metric does.

        `activity`: the status of a running attempt. `failure`: when to end the run; by default as the configuration.
        """
        self.verdict: tuple[int, str] | None = None  # a rank, and the reason why the run must end
        self._failure = failure or FailureConfig()
        self._observers = observers
        self._is_finite = True  # all values of this attempt so far
        self._activity = activity
        self.writer = writer
        self._paces: dict[int, Pace] = {}  # of the ranks of this attempt
        self._progress_at = 0.0  # monotonic seconds, when the progress is due in run.json
        self._status = ""
        self._metric = metric
        self._logged: set[str] = set()
        self._spikes = LossSpikes()
        self._failed = False  # a rank has failed in this attempt, and not as a consequence
        self._shown: Fault | None = None  # the root cause, if it was shown

    def event(self, kind: str, /, **fields: Any) -> None:
        """Write a line of events.jsonl, and pass it on."""
        self._pass(self.writer.event({"event": kind, "time_s": round(time.time(), 3), **fields}))
        if kind not in _OF_EACH_RANK:
            logged = {name: value for name, value in fields.items() if name not in _NOT_LOGGED}
            _log.info(kind.replace("_", " "), **logged)

    def _pass(self, event: Mapping[str, Any]) -> None:
        for observer in self._observers:
            observer.on_event(event)

    def show(self, text: str, level: str = "info") -> None:
        """Show a message that is not recorded."""
        self._pass({"event": "message", "level": level, "message": text})

    def ranks(self, count: int, offsets: Mapping[int, int], hidden: Collection[int] = ()) -> None:
        """Show the output of so many ranks: of their logs what follows after `offsets`, and not that of `hidden`."""
        self._pass({"event": "ranks", "count": count, "offsets": offsets, "hidden": hidden})

    def log_grew(self, rank: int) -> None:
        """Show what the rank has printed."""
        self._pass({"event": "log_grew", "rank": rank})

    def silence(self, text: str) -> None:
        """Show for how long a rank has not reported; "": all report."""
        self._pass({"event": "silence", "message": text})

    def asks_for_line(self, rank: int, log_size: int) -> None:
        """Let the user type a line for the debugger, after the log was shown up to this size in bytes."""
        self._pass({"event": "asks_for_line", "rank": rank, "log_size": log_size})

    def status(self, text: str, *, announced: bool = False) -> None:
        """Show and record what the run waits for; `announced`: a notice says it, too."""
        if text != self._status:
            self._status = text
            self.event("status", message=text, **({"announced": True} if announced else {}))

    def hang_suspected(self, silent: str) -> None:
        """Show and record that the ranks are asked for their stacks; `silent` is the reason."""
        self.status(f"{silent}: asking the ranks where they are")
        self.event("hang_suspected", message=silent)

    def notice(self, text: str, level: str = "info") -> None:
        """Show and record a message; level is "info", "warning" or "error". `ddptrain watch` shows what is recorded."""
        self.event("notice", level=level, message=text)

    def training(self, ranks: tuple[RankRecord, ...]) -> None:
        """Record in run.json where each rank runs, when every rank has entered the workload.

        The status is not shown after a fault, which may arrive before the last rank has entered.
        """
        attempts = self.writer.record.attempts
        self.writer.update(attempts=(*attempts[:-1], dataclasses.replace(attempts[-1], ranks=ranks)))
        if not self._failed:
            self.status(self._activity)

    def warn(self, text: str) -> None:
        """Show and record a warning."""
        self.notice(text, "warning")

    def flush(self) -> None:
        """Write the buffered metrics into the run directory."""
        self.writer.flush()

    def rank_numbers(self, rank: int, numbers: Sequence[events.Event]) -> None:
        """Show and record metrics, or progress, that a rank sent in a row; metrics are written with flush()."""
        metrics = [event for event in numbers if isinstance(event, events.Metrics)]
        if metrics:
            self.writer.add_metrics(metrics, rank)
        for each in metrics:
            self._logged |= each.values.keys()
            if rank == 0 and (spike := self._spikes.add(each)) is not None:
                self.rank_event(rank, spike)
        self._pass({"event": "numbers", "rank": rank, "numbers": numbers})
        if progress := [event for event in numbers if isinstance(event, events.Progress)]:
            self._progress(rank, progress[-1])
        for each in metrics:
            self._check_finite(rank, each)

    def _progress(self, rank: int, event: events.Progress) -> None:
        self._paces.setdefault(rank, Pace()).update(event)
        if time.monotonic() < self._progress_at:
            return
        self._progress_at = time.monotonic() + _PROGRESS_EVERY_S
        ranks = {str(rank): pace.done for rank, pace in self._paces.items() if pace.done is not None}
        slowest = min(self._paces.values(), key=lambda pace: (pace.fraction or 0.0, pace.done or 0.0))
        record = ProgressRecord(
            time.time(), slowest.done or 0.0, slowest.total, shorten(slowest.unit), slowest.eta_s, ranks
        )
        self.writer.set_progress(record)

    def rank_event(self, rank: int, event: events.Event) -> None:
        """Show and record an event that a rank sent, as its class says."""
        if event.recorded:
            self.event(event.kind, rank=rank, **_fields(event))
        text, level = event.shown()
        if text:
            self.notice(f"rank {rank}: {text}", level)
        match event:
            case events.Started():
                self._started(rank, event)
            case events.CheckpointSaved():
                self.event("checkpoint_staged", rank=rank, step=event.step, epoch=event.epoch)
                self._pass({"event": "numbers", "rank": rank, "numbers": [event]})
                self._check_metric(event)
                self._check_finite(rank, events.Metrics(event.time_ns, event.metrics, event.step, event.epoch))
            case events.Returned():
                self._returned(rank, event)
            case events.Epochs(total=total) if rank == 0:
                self.event("epochs", total=total, epoch=event.epoch)
            case events.Tracked():
                self._tracked(rank, event)
            case events.Timed():
                fields = {"activity": shorten(event.activity), "seconds": event.seconds}
                self.writer.event({"event": "timed", "time_s": event.time_ns / 1e9, "rank": rank, **fields})
            case events.TrackerFailed():
                self.event("tracker_failed", rank=rank, **_fields(event))

    def _check_metric(self, saved: events.CheckpointSaved) -> None:
        problem = metric_problem(self._metric, saved, self._logged)
        if problem:
            self.warn(problem)
        if problem or self._metric in saved.metrics:
            self._metric = None

    def _check_finite(self, rank: int, logged: events.Metrics) -> None:
        """Record and show the first value of an attempt that is not finite; the run ends if failure.nan says so."""
        nan, values = self._failure.nan, logged.values
        if not self._is_finite or nan == "ignore" or all(map(math.isfinite, values.values())):
            return
        self._is_finite = False
        name, value = next((name, value) for name, value in values.items() if not math.isfinite(value))
        found = NotFiniteRecord(rank, shorten(name), str(value), logged.step, logged.epoch)
        self.writer.update(not_finite=found)
        self.event("not_finite", **dataclasses.asdict(found))
        if nan == "stop":
            self.verdict = rank, f"{found.description} (failure.nan is stop)"
        else:
            self.warn(f"rank {rank}: {found.description} (failure.nan is warn: the run goes on)")

    def _returned(self, rank: int, event: events.Returned) -> None:
        if rank != 0 or len(event.value) > _MOST_RETURNED:
            return
        try:
            result = json.loads(event.value)
        except (ValueError, RecursionError):
            return  # not JSON: a rank is not trusted
        self.writer.update(result=result)
        self.event("returned", rank=rank, result=as_json_data(result))

    def _tracked(self, rank: int, event: events.Tracked) -> None:
        """Record what a rank's tracker has created, for rank 0 under the tracker's name without a suffix."""
        name = event.tracker if rank == 0 else f"{event.tracker}/rank_{rank}"
        given = [(key, text[:_MOST_FOUND]) for key, text in event.found.items() if key not in _NOT_FOUND]
        found = dict(given[:_MOST_FOUND_KEYS])
        tracking = self.writer.record.tracking
        self.writer.update(tracking={**tracking, name: {**tracking.get(name, {}), **found}})
        self.event("tracked", rank=rank, tracker=event.tracker, found=found)

    def _started(self, rank: int, event: events.Started) -> None:
        if rank == 0:
            environment = {
                name: EnvironmentValue(str(item.get("value", "")), str(item.get("source", "")))
                for name, item in event.environment.items()
            }
            versions = {**self.writer.record.versions, **event.versions}
            self.writer.update(rank_environment=environment, versions=versions)
            if problem := other_versions(self.writer.last_versions, versions):
                self.warn(problem)
            self.writer.last_versions = versions
        self.event("rank_started", rank=rank, host=event.host, pid=event.pid, device=event.device)

    def rank_ended(self, record: RankRecord, *, ok: bool, stopped: bool) -> None:
        """Record the end of a rank's process; `stopped`: the driver stopped it."""
        self.event("rank_ended", ok=ok, stopped=stopped, **dataclasses.asdict(record))

    def fault(self, fault: Fault) -> None:
        """Record the fault of a rank. The end of the run names the root cause, so that nothing is shown here."""
        self.event("fault", rank=fault.rank, kind=fault.kind, message=fault.line, victim=fault.victim)
        self._failed = self._failed or not fault.victim

    def attempt_over(self) -> None:
        """Prepare for another attempt."""
        self._failed, self._shown, self._is_finite, self.verdict = False, None, True, None
        self._paces.clear()
        self._spikes.forget()
        self.writer.set_progress(None)

    def show_cause(self, fault: Fault, text: str) -> None:
        """Show the root cause of an attempt as `text`, once."""
        if self._shown is None or self._shown.line != fault.line:
            self._shown = fault
            self.notice(text, "error")

    def system(self, sample: SystemSample) -> None:
        """Record and show the use of a host and its ranks."""
        self.writer.system(sample)
        self._pass({"event": "system", "sample": sample})

    def stored(self, rank: int, path: str, step: int | None) -> None:
        """Record that a checkpoint (with its step) or another file of a rank is in the run directory."""
        if step is not None:
            best = self.writer.record.best
            self.event("checkpoint_saved", rank=rank, step=step, path=path, best=best and dataclasses.asdict(best))
        else:
            self.event("artifact_saved", rank=rank, path=path)


class LossSpikes:
    """Finds values of train/loss far above their median: by 10 standard deviations, which the MAD estimates.

    The deviation counts as at least 5 % of the median, so that a loss which hardly varies may rise by half; and the
    value must be a quarter above the largest one of the window, because the loss of small batches has a long tail.
    """

    WINDOW, LEAST, EVERY, MOST = 100, 50, 10, 3  # values; values between two medians; spikes of a run
    _DEVIATIONS, _LEAST_SHARE, _OF_MAD, _OVER_MAX = 10.0, 0.05, 1.4826, 1.25

    def __init__(self) -> None:
        self.found = 0
        self.forget()

    def forget(self) -> None:
        """Begin a new window, as the values may be of an earlier step."""
        self._values: deque[float] = deque(maxlen=self.WINDOW)
        self._new, self._median, self._limit = 0, 0.0, math.inf

    def add(self, row: events.Metrics) -> events.LossSpike | None:
        """Take a row of rank 0; return the spike if its loss is one."""
        value = row.values.get("train/loss")
        if value is None or not math.isfinite(value) or self.found >= self.MOST:
            return None
        if value > self._limit:
            self.found += 1
            spike = events.LossSpike(row.time_ns, value, self._median, self._limit, row.step, row.epoch)
            self.forget()  # what follows belongs to this spike until the window is filled again
            return spike
        self._values.append(value)
        self._new += 1
        if self._new >= self.EVERY and len(self._values) >= self.LEAST:
            self._new, middle = 0, len(self._values) // 2
            self._median = sorted(self._values)[middle]
            mad = sorted(abs(each - self._median) for each in self._values)[middle]
            deviation = max(self._OF_MAD * mad, self._LEAST_SHARE * abs(self._median))
            self._limit = max(self._median + self._DEVIATIONS * deviation, self._OVER_MAX * max(self._values))
        return None


def metric_problem(metric: str | None, saved: events.CheckpointSaved, logged: Collection[str]) -> str:
    """Return why a checkpoint cannot be the best one, with the metrics that exist; "" if there is no reason to warn.

    A checkpoint in the middle of an epoch may have no metrics. A workload that never logs the default metric gets no
    warning about it.
    """
    if metric is None or metric in saved.metrics:
        return ""
    in_mid_epoch = saved.epoch is not None and not float(saved.epoch).is_integer()
    if not saved.metrics and (in_mid_epoch or (metric == _DEFAULT_METRIC and metric not in logged)):
        return ""
    match = nearest(metric, saved.metrics)
    name = shorten(metric)
    return (
        f"checkpoint.metric is {name}, and the checkpoint of step {saved.step} has no such metric: no checkpoint is "
        f"the best so far. Given to ctx.checkpoint: {_listed(saved.metrics)}; logged with ctx.log: {_listed(logged)}. "
        + (f"Did you mean {shorten(match)}? " if match else "")
        + f'Call ctx.checkpoint(..., metrics={{"{name}": ...}}), or set checkpoint.metric to another one, or to null'
    )


def other_versions(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return a warning if important versions differ from those before the resume; "" if they are equal or unknown."""
    changed = [name for name in _DECIDING if before.get(name, now.get(name)) != now.get(name)]
    if not changed:
        return ""
    had, has = (", ".join(f"{name} {versions.get(name, '?')}" for name in changed) for versions in (before, now))
    return f"the run was trained with {had} so far and continues with {has}: results may differ"


def _listed(names: Collection[str]) -> str:
    return listed(sorted(names), _MOST_NAMES, 60) or "none"


def _fields(event: events.Event) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(event).items() if name != "time_ns"} | {
        "rank_time_ns": event.time_ns
    }
