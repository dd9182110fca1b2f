"""One trial: an ordinary run of this process, in a thread of the trial, whose metric goes to the pruner."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from ddptrain.config.resolved import ResolvedConfig
from ddptrain.driver.cluster_session import SharedRun
from ddptrain.driver.control.signals import ThreadSignals
from ddptrain.driver.inbox import Inbox
from ddptrain.errors import DdptrainError, ExitCode, RunLocked, UsageError, one_line
from ddptrain.log import Log, own_context
from ddptrain.protocol.events import CheckpointSaved, Metrics, Progress
from ddptrain.results.run import Run
from ddptrain.results.run_record import RunStatus
from ddptrain.results.sweep_record import TrialRecord, TrialState
from ddptrain.sweep.home import SweepHome

# Failures of a run that say nothing about its point: such a run is continued.
_NOT_OF_THE_POINT = frozenset({"preempted", "interrupted", "worker_lost", "driver", "infrastructure"})
_STOPPED = frozenset({RunStatus.PREEMPTED, RunStatus.CANCELLED})
# The sweep's own lock is held, so a driver that holds a trial's run is dead: its lease of at most 180 s ends.
_PATIENCE_S, _LOCKED_PAUSE_S = 240.0, 3.0
_log = Log(__name__)


@dataclass(slots=True)
class TrialPlan:
    """What all trials of a sweep share.

    home: where the sweep and its runs are. config: returns the configuration of a point. report: takes the number of a
    trial, the index of a value of the metric (from 1), and the value; returns whether to end the trial. run: trains a
    configuration with a run id, or resumes it, and returns the exit code. on_event: takes what users are notified of.
    loggers: the ranks that log the metric, the same in all trials; none if that is not known yet.
    """

    home: SweepHome
    metric: str
    mode: str
    config: Callable[[Mapping[str, Any]], ResolvedConfig]
    report: Callable[[int, int, float], bool]
    run: Callable[[ResolvedConfig, str, bool, Trial], int]
    on_event: Callable[[Mapping[str, Any]], None] = lambda event: None
    loggers: frozenset[int] = frozenset()


class Trial:
    """A trial that runs. Its thread calls `ended` once, with the trial, whose record has the result.

    exit_code: that of a run that failed. diverged: it ran, but no value of the metric is a finite number.
    bug: an exception of another type than DdptrainError.
    """

    def __init__(self, plan: TrialPlan, record: TrialRecord, ended: Callable[[Trial], object]) -> None:
        self.plan, self.record = plan, record
        self.run_id = f"{plan.home.sweep_id}-{record.number:04d}"
        self.exit_code: int = ExitCode.SUCCEEDED
        self.bug: BaseException | None = None
        self.status = "starting"
        self.done: float | None = None  # the progress of rank 0, of `total`
        self.total: float | None = None
        self.pruned = self.diverged = False
        self.stopped: list[int] = []  # the signals that ask it to end
        self._signals: ThreadSignals | None = None
        self._ended = ended
        self._mutex = threading.Lock()
        self._asked_to_end = threading.Event()
        self._began_s = time.monotonic()
        self._earlier_s = record.duration_s or 0.0
        self._thread = threading.Thread(target=self._main, name=f"ddptrain-trial-{record.number}", daemon=True)

    @property
    def shown_status(self) -> str:
        """What the trial does; "" while it trains."""
        return "ending" if self.pruned or self.stopped else "" if self.status == "training" else self.status

    def start(self) -> None:
        """Start the thread."""
        self.record.state = TrialState.RUNNING
        self._thread.start()

    def join(self) -> None:
        """Wait for the end of the thread, which has called `ended`."""
        self._thread.join()

    def stop(self, signum: int) -> None:
        """Ask the run to save and end (a second time: to end at once)."""
        with self._mutex:
            self.stopped.append(signum)
            self._asked_to_end.set()
            if self._signals is not None:
                self._signals.send(signum)

    def signals(self, inbox: Inbox) -> ThreadSignals:
        """Return the signals of the run that begins now."""
        with self._mutex:
            self._signals = ThreadSignals(inbox)
            for signum in [*self.stopped, *([signal.SIGTERM] if self.pruned else [])]:
                self._signals.send(signum)
            return self._signals

    def report(self, index: int, value: float) -> None:
        """Pass a value of the metric to the pruner. If others are better, the run saves and ends."""
        if not self.pruned and self.plan.report(self.record.number, index, value):
            with self._mutex:
                self.pruned = True
                if self._signals is not None:
                    self._signals.send(signal.SIGTERM)

    def _main(self) -> None:
        with own_context():
            try:
                self._run()
            except BaseException as error:  # the sweep ends with it; this thread has no other way to report it
                self.bug = error
                self._fail(f"{type(error).__name__}: {error}", ExitCode.INTERNAL)
            self.record.duration_s = round(self._earlier_s + time.monotonic() - self._began_s, 3)
            self._signals = None
            self._ended(self)

    def _run(self) -> None:
        """Run, or take the result of a run that has ended."""
        record, plan = self.record, self.plan
        record.run_ids = [self.run_id]
        view = plan.home.trials.get(self.run_id)
        if view is not None:  # an earlier driver may not have reported all of it, or may have decided to prune
            for index, value in enumerate(plan.home.values(view, plan.metric).values(), 1):
                self.report(index, value)
            if _has_result(view) or (self.pruned and view.status in _STOPPED):
                return self._judge(view)
        if self.stopped:
            record.state = TrialState.INTERRUPTED
            return None
        try:
            self.exit_code = self._train(plan.config(record.params), resume=view is not None)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            text = one_line(f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
            return self._fail(f"the values of the trial are not valid: {text}", ExitCode.USAGE)
        except DdptrainError as error:
            if self.stopped and not isinstance(error, UsageError):
                record.state = TrialState.INTERRUPTED
                return None
            return self._fail(one_line(error), error.exit_code)
        if (view := plan.home.trials.get(self.run_id)) is None:
            return self._fail(f"the directory of run {self.run_id} has been deleted", ExitCode.CLUSTER)
        return self._judge(view)

    def _train(self, config: ResolvedConfig, *, resume: bool) -> int:
        """Train; wait while the lock of a killed driver has not expired yet. Raises RunLocked."""
        deadline = time.monotonic() + (_PATIENCE_S if resume else 0.0)
        while True:
            try:
                return self.plan.run(config, self.run_id, resume, self)
            except RunLocked as error:
                if self.stopped or time.monotonic() >= deadline:
                    raise
                self.status = "waiting for the lock of its earlier driver to expire"
                _log.info("run is locked", trial=self.record.number, reason=error)
                self._asked_to_end.wait(_LOCKED_PAUSE_S)

    def _judge(self, view: Run) -> None:
        """Take the result of a run that has ended."""
        record = self.record
        values = self.plan.home.values(view, self.plan.metric)
        finite = [value for value in values.values() if math.isfinite(value)]
        best = min if self.plan.mode == "min" else max
        record.value = best(finite, default=None)
        record.step = round(max(values)) if values else record.step
        if view.status == RunStatus.SUCCEEDED and record.value is None:
            self.diverged = bool(values)
            logged = ", ".join(sorted(view.record.last_metrics)[:20]) or "none"
            missing = f"the run has logged no metric {self.plan.metric}; it has logged: {logged}"
            text = f"no value of {self.plan.metric} is a finite number" if values else missing
            self._fail(text, ExitCode.TRAINING_FAILED)
        elif view.status == RunStatus.SUCCEEDED:
            record.state = TrialState.COMPLETE
        elif self.pruned:
            record.state = TrialState.PRUNED
        elif self.stopped:
            record.state = TrialState.INTERRUPTED
        elif view.status in _STOPPED and record.value is not None:
            record.state = TrialState.PRUNED  # by `ddptrain stop`
        else:
            failure = view.record.failure  # not the rank and its host, which differ from trial to trial
            text = one_line(failure.summary) if failure else ""
            self._fail(text or f"the run is {view.status}", view.record.exit_code or self.exit_code)

    def _fail(self, text: str, exit_code: int) -> None:
        self.record.state, self.record.error = TrialState.FAILED, text
        self.exit_code = int(exit_code) or int(ExitCode.TRAINING_FAILED)


def _has_result(view: Run) -> bool:
    """Return whether a run has ended with a result of its point, not because of a lost worker or the like."""
    if view.status == RunStatus.SUCCEEDED:
        return True
    failure = view.record.failure
    return view.status == RunStatus.FAILED and failure is not None and failure.kind not in _NOT_OF_THE_POINT


def run_with(shared: Callable[[Trial], SharedRun]) -> Callable[[ResolvedConfig, str, bool, Trial], int]:
    """Return the function that trains the runs of trials (driver/run.py), on a cluster that they share."""

    def run(config: ResolvedConfig, run_id: str, resume: bool, trial: Trial) -> int:
        from ddptrain.driver.run import LaunchOptions, train

        stream = MetricStream(trial)
        if resume and (view := trial.plan.home.trials.get(run_id)) is not None:
            stream.reported(trial.plan.home.values(view, trial.plan.metric))
        resumes = "auto" if resume else None
        return train(config, LaunchOptions(run_id=run_id, resume=resumes, observers=[stream], shared=shared(trial)))

    return run


class MetricStream:
    """An observer of a trial's run: joins what ranks log to one value of the metric a step, as soon as it is complete.

    A step is complete if a checkpoint has the value, if all ranks have logged it, if all those have logged it that
    logged the step before, or if a later step begins. The value is that of the checkpoint, else the mean of the ranks.
    """

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._world_size = 0
        self._index, self._last_step = 0, -math.inf  # of what the pruner knows
        self._step: float | None = None
        self._values: dict[int, float] = {}
        self._counts: dict[int, int] = defaultdict(int)

    def reported(self, values: Mapping[float, float]) -> None:
        """Take the values, by step, that the pruner knows already."""
        self._index, self._last_step = len(values), max(values, default=-math.inf)

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Take the status, the metric of all ranks, and the progress."""
        trial = self._trial
        match event:
            case {"event": "alert" | "hang_suspected"}:
                trial.plan.on_event(event)
            case {"event": "ranks", "count": count}:
                self._world_size = count
            case {"event": "numbers", "rank": rank, "numbers": numbers}:
                for each in numbers:
                    self._number(rank, each)
            case {"event": "rank_started"}:
                trial.status = "training"
            case {"event": "status", "message": str(text)}:
                trial.status = text
            case {"event": "notice" | "message", "message": text, "level": "warning" | "error"}:
                _log.info("notice of a trial", trial=trial.record.number, message=text)

    def on_end(self, run: Run) -> None:
        """Do nothing."""

    def _number(self, rank: int, event: Metrics | Progress | CheckpointSaved) -> None:
        metric, plan = self._trial.plan.metric, self._trial.plan
        match event:
            case Metrics() if (value := event.values.get(metric)) is not None:
                self._counts[rank] += 1
                if self._begin(self._counts[rank] if event.step is None else event.step):
                    self._values[rank] = value
                    if len(self._values) == self._world_size or (plan.loggers and plan.loggers <= self._values.keys()):
                        self._complete()
            case CheckpointSaved() if (value := event.metrics.get(metric)) is not None:
                if self._begin(event.step):
                    loggers, self._values = plan.loggers, {-1: value}
                    self._complete()
                    plan.loggers = loggers  # a checkpoint does not say which ranks log
            case Progress() if rank == 0:
                self._trial.done, self._trial.total = event.done, event.total

    def _begin(self, at: int) -> bool:
        """Return whether a value belongs to the present step, which may begin now; a restart repeats earlier ones."""
        if at <= self._last_step or (self._step is not None and at < self._step):
            return False
        if at != self._step:
            self._complete()
            self._step = at
        return True

    def _complete(self) -> None:
        if self._step is None or not self._values:
            return
        value = sum(self._values.values()) / len(self._values)
        self._trial.record.step, self._trial.record.value = round(self._step), value
        self._trial.plan.loggers, self._last_step = frozenset(self._values), self._step
        self._step, self._values = None, {}
        self._index += 1
        self._trial.report(self._index, value)
