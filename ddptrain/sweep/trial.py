"""One trial: its repeats are ordinary runs of this process, one after the other, in a thread of the trial."""

from __future__ import annotations

import math
import signal
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import ValidationError

from ddptrain.config.resolved import ResolvedConfig
from ddptrain.driver.cluster_session import SharedRun
from ddptrain.driver.control.signals import ThreadSignals
from ddptrain.driver.inbox import Inbox
from ddptrain.errors import DdptrainError, ExitCode, RunLocked, UsageError, one_line
from ddptrain.log import Log, own_context
from ddptrain.protocol.events import CheckpointSaved, Metrics, Progress
from ddptrain.results.lookup import RunView
from ddptrain.results.run_record import RunStatus
from ddptrain.results.sweep_record import TrialRecord, TrialState
from ddptrain.sweep.home import LiveMetric, SweepHome, best_value

# Failures of a run that say nothing about its point: such a run is continued.
_NOT_OF_THE_POINT = frozenset({"preempted", "interrupted", "worker_lost", "driver", "infrastructure"})
_STOPPED = frozenset({RunStatus.PREEMPTED, RunStatus.CANCELLED})
# The sweep's own lock is held, so a driver that holds a trial's run is dead: its lease of at most 180 s ends.
_PATIENCE_S, _LOCKED_PAUSE_S = 240.0, 3.0
_log = Log(__name__)


class RunTrial(Protocol):
    """Runs one configuration to its end in this thread: driver/run.py; another function in tests."""

    def __call__(self, config: ResolvedConfig, run_id: str, *, resume: bool, trial: Trial) -> int:
        """Return the exit code. Raises DdptrainError if the run could not begin."""


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """What all trials of a sweep share.

    home: where the sweep and its runs are. config: returns the configuration of a repeat of a point. report: takes the
    number of a trial, the index of a value of the metric (from 1), and the value; returns whether to end the trial.
    """

    home: SweepHome
    metric: str
    mode: str
    seeds: int
    config: Callable[[Mapping[str, Any], int], ResolvedConfig]
    report: Callable[[int, int, float], bool]
    run: RunTrial


class Trial:
    """A trial that runs. Its thread calls `ended` once, with the trial, whose record has the result.

    exit_code: that of a run that failed. diverged: it ran, but no value of the metric is a finite number.
    bug: an exception of another type than DdptrainError.
    """

    def __init__(self, plan: TrialPlan, record: TrialRecord, ended: Callable[[Trial], object]) -> None:
        self.plan, self.record = plan, record
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
        """Ask the running run to save and end (a second time: to end at once), and start no further repeat."""
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

    def wait(self, seconds: float) -> None:
        """Wait in the thread of the trial, or until it is asked to end."""
        self._asked_to_end.wait(seconds)

    def prune(self) -> None:
        """End the trial because others are better: its run saves and ends."""
        with self._mutex:
            self.pruned = True
            if self._signals is not None:
                self._signals.send(signal.SIGTERM)

    def run_id(self, repeat: int) -> str:
        """Return the run id of a repeat."""
        return f"{self.plan.home.sweep_id}-{self.record.number:04d}" + (f"-s{repeat}" if repeat else "")

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
        record, plan = self.record, self.plan
        record.values = []
        for repeat in range(plan.seeds):
            run_id = self.run_id(repeat)
            if run_id not in record.run_ids:
                record.run_ids.append(run_id)
            if not self._repeat(repeat, run_id):
                return
            if self.pruned and repeat + 1 < plan.seeds:  # the pruner decided at the last value: no further repeats
                record.value, record.state = statistics.fmean(record.values), TrialState.PRUNED
                return
        record.value = statistics.fmean(record.values)
        record.spread = statistics.stdev(record.values) if len(record.values) > 1 else None
        record.state = TrialState.COMPLETE

    def _repeat(self, repeat: int, run_id: str) -> bool:
        """Run a repeat, or take the result of one that has ended; return whether the trial continues."""
        view = self.plan.home.find_trial(run_id)
        if view is not None and repeat == 0:
            self._report_again(view)
        if view is not None and (_has_result(view) or (self.pruned and view.status in _STOPPED)):
            return self._judge(view)
        if self.stopped:
            return self._interrupt()
        try:
            config = self.plan.config(self.record.params, repeat)
            self.exit_code = self.plan.run(config, run_id, resume=view is not None, trial=self)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            text = one_line(f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
            return self._fail(f"the values of the trial are not valid: {text}", ExitCode.USAGE)
        except DdptrainError as error:
            if self.stopped and not isinstance(error, UsageError):
                return self._interrupt()
            return self._fail(one_line(error), error.exit_code)
        if (view := self.plan.home.find_trial(run_id)) is None:
            return self._fail(f"the directory of run {run_id} has been deleted", ExitCode.CLUSTER)
        return self._judge(view)

    def _report_again(self, view: RunView) -> None:
        """Report what an earlier driver has not reported; it may have decided to prune."""
        for index, value in enumerate(self.plan.home.values(view, self.plan.metric).values(), 1):
            if self.plan.report(self.record.number, index, value):
                self.pruned = True

    def _judge(self, view: RunView) -> bool:
        """Take the result of a run that has ended; return whether the trial continues."""
        values = self.plan.home.values(view, self.plan.metric)
        value = best_value(values.values(), self.plan.mode)
        if values:
            self.record.step = round(max(values))
        if view.status == RunStatus.SUCCEEDED:
            if value is None:
                self.diverged = bool(values)
                return self._fail(_no_value(self.plan.metric, values, view), ExitCode.TRAINING_FAILED)
            self.record.values.append(value)
            return True
        self.record.value = value
        if self.pruned:
            self.record.state = TrialState.PRUNED
        elif self.stopped:
            self.record.state = TrialState.INTERRUPTED
        elif view.status in _STOPPED and value is not None:
            self.record.state = TrialState.PRUNED  # by `ddptrain stop`
        else:
            failure = view.record.failure
            text = (
                one_line(failure.summary) if failure else ""
            )  # not the rank and its host, which differ from trial to trial
            return self._fail(text or f"the run is {view.status}", view.record.exit_code or self.exit_code)
        return False

    def _interrupt(self) -> bool:
        self.record.state = TrialState.INTERRUPTED
        return False

    def _fail(self, text: str, exit_code: int) -> bool:
        self.record.state, self.record.error = TrialState.FAILED, text
        self.exit_code = int(exit_code) or int(ExitCode.TRAINING_FAILED)
        return False


def _has_result(view: RunView) -> bool:
    """Return whether a run has ended with a result of its point, not because of a lost worker or the like."""
    if view.status == RunStatus.SUCCEEDED:
        return True
    failure = view.record.failure
    return view.status == RunStatus.FAILED and failure is not None and failure.kind not in _NOT_OF_THE_POINT


def _no_value(metric: str, values: Mapping[float, float], view: RunView) -> str:
    if values:
        return f"no value of {metric} is a finite number"
    logged = ", ".join(sorted(view.record.last_metrics)[:20]) or "none"
    return f"the run has logged no metric {metric}; it has logged: {logged}"


class TrialDisplay:
    """The display of a trial's run, a run observer: passes metrics to the pruner, the rest to the sweep's display."""

    def __init__(
        self,
        trial: Trial,
        *,
        reports: bool,
        index: int = 0,
        last_step: float = -math.inf,
        usual: frozenset[int] = frozenset(),
    ) -> None:
        """`reports`: whether the pruner gets the values; `index` values were reported before, up to `last_step`.

        `usual`: the ranks that log the metric, if that is known.
        """
        self._trial, self._reports, self._index = trial, reports, index
        self._live = LiveMetric(usual=usual)
        self._live.last_step = last_step

    @property
    def usual(self) -> frozenset[int]:
        """The ranks that log the metric; none if that is not known yet."""
        return self._live.usual

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Take the status, the metric of all ranks, and the progress."""
        match event:
            case {"event": "ranks", "count": count}:
                self._live.world_size = count
            case {"event": "numbers", "rank": rank, "numbers": numbers}:
                for each in numbers:
                    self._number(rank, each)
            case {"event": "rank_started"}:
                self._trial.status = "training"
            case {"event": "status", "message": str(text)}:
                self._trial.status = text
            case {"event": "notice" | "message", "message": text, "level": "warning" | "error"}:
                _log.info("notice of a trial", trial=self._trial.record.number, message=text)

    def on_end(self, run: RunView) -> None:
        """Do nothing."""

    def _number(self, rank: int, event: Metrics | Progress | CheckpointSaved) -> None:
        metric, trial = self._trial.plan.metric, self._trial
        match event:
            case Metrics() if (value := event.values.get(metric)) is not None:
                self._take(self._live.logged(rank, event.step, value))
            case CheckpointSaved() if (value := event.metrics.get(metric)) is not None:
                self._take(self._live.saved(event.step, value))
            case Progress() if rank == 0:
                trial.done, trial.total = event.done, event.total

    def _take(self, complete: Sequence[tuple[float, float]]) -> None:
        trial = self._trial
        for step, value in complete:
            trial.record.step, trial.record.value = round(step), value
            self._index += 1
            if self._reports and not trial.pruned and trial.plan.report(trial.record.number, self._index, value):
                trial.prune()


def run_with(shared: Callable[[Trial], SharedRun]) -> RunTrial:
    """Return the function that trains the runs of trials (driver/run.py), on a cluster that they share."""
    usual: frozenset[int] = frozenset()  # the ranks that log the metric: the same in all trials

    def run(config: ResolvedConfig, run_id: str, *, resume: bool, trial: Trial) -> int:
        nonlocal usual
        from ddptrain.driver.run import LaunchOptions, train

        index, last_step = 0, -math.inf
        home = trial.plan.home
        if resume and (view := home.find_trial(run_id)) is not None:
            values = home.values(view, trial.plan.metric)
            index, last_step = len(values), max(values, default=-math.inf)
        reports = run_id == trial.run_id(0)
        display = TrialDisplay(trial, reports=reports, index=index, last_step=last_step, usual=usual)
        resumes = "auto" if resume else None
        options = LaunchOptions(run_id=run_id, resume=resumes, observers=[display], shared=shared(trial))
        code = _when_unlocked(trial, lambda: train(config, options)) if resume else train(config, options)
        usual = display.usual or usual
        return code

    return run


def _when_unlocked(trial: Trial, work: Callable[[], int], patience_s: float = _PATIENCE_S) -> int:
    """Do the work; wait while the lock of a killed driver has not expired yet. Raises RunLocked."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return work()
        except RunLocked as error:
            if trial.stopped or time.monotonic() >= deadline:
                raise
            trial.status = "waiting for the lock of its earlier driver to expire"
            _log.info("run is locked", trial=trial.record.number, reason=error)
            trial.wait(_LOCKED_PAUSE_S)
