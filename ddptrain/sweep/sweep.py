"""A sweep, from its configuration to its exit code: its folder, its cluster, its trials, best.yaml."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddptrain.clusters.machine_slots import LocalResources, local_resources
from ddptrain.clusters.provider import Cluster
from ddptrain.clusters.scheduler import slots
from ddptrain.config.resolved import ResolvedConfig, resolve
from ddptrain.config.run_config import RunConfig
from ddptrain.config.sections.retraining import GateRule, RetrainConfig
from ddptrain.config.sections.sweeping import SweepConfig
from ddptrain.config.wording import counted
from ddptrain.driver.cluster_session import SharedRun, cluster_for
from ddptrain.driver.control.signals import Signals, signals_to
from ddptrain.driver.control.stop import stop_requests
from ddptrain.driver.display import Display
from ddptrain.driver.inbox import ResultsLost, SignalReceived
from ddptrain.driver.tracking.setup import check_trackers
from ddptrain.errors import ConfigError, DdptrainError, ExitCode, Interrupted, Problem, UsageError, one_line
from ddptrain.gpus import usable_cores
from ddptrain.log import Log
from ddptrain.notify.run_messages import RunMessages
from ddptrain.notify.sender import missing_variables
from ddptrain.optional_packages import require
from ddptrain.results.log_file import driver_log
from ddptrain.results.run import Run
from ddptrain.results.run_record import FailureRecord, RunStatus, utc_now
from ddptrain.results.secure_files import write_file
from ddptrain.results.sweep_record import SWEEP_JSON, SweepRecord, TrialRecord, TrialState, describe_space, read_sweep
from ddptrain.sweep import output
from ddptrain.sweep.home import BEST, SweepHome, opened
from ddptrain.sweep.trial import Trial, TrialPlan, run_with

if TYPE_CHECKING:
    from distributed import Client

    from ddptrain.driver.connect import Session
    from ddptrain.sweep.study import Study


_PLAIN = frozenset({"grid", "random", "tpe", "none", "median", "asha"})  # without options they need no early check
_TICK_S = 0.5
_SAVE_EVERY_S = 1.0
_UPLOAD_S = 2.0  # between two checks for signals while a point is uploaded
_log = Log(__name__)
_LOOK_EVERY_S = 1.0
_SAME_FAILURES = 3
_SLOTS_WAIT_S = 600.0  # a trial waits at least so long for slots that another run has taken


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """The options of the command line besides the configuration."""

    sweep_id: str | None = None
    resume: bool = False
    output: str = "auto"


@dataclass(frozen=True, slots=True)
class TrialEnded:
    """The thread of a trial has ended."""

    trial: Trial


Message = TrialEnded | SignalReceived | ResultsLost


def run_sweep(resolved: ResolvedConfig, options: SweepOptions) -> int:
    """Run the trials of a configuration, or continue a sweep; return the exit code (errors.ExitCode).

    Raises UsageError, RunLocked, ClusterError or ResultsError if the sweep could not begin.
    """
    if resolved.config.sweep is None:
        hint = "add one, with at least space and trials"
        raise ConfigError([Problem(str(resolved.path), "sweep", "the configuration has no such section", hint)])
    require("optuna", "sweep", "train single configurations with `ddptrain train`")
    check_trackers(resolved.config)
    if resolved.config.notify.urls:
        require("apprise", "notify", "leave out notify.urls")
    sweep = resolved.config.sweep
    if any(options or name not in _PLAIN for name, options in {**sweep.search, **sweep.prune}.items()):
        from ddptrain.sweep.study import check_choice

        check_choice(sweep)
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with (
        opened(resolved, options.sweep_id, resume=options.resume) as home,
        signals_to(inbox) as signals,
        stop_requests(home.writer, signals),
        driver_log(home.writer.layout.decision_log, home.sweep_id, resolved.secrets),
    ):
        return Sweep(resolved, sweep, options, home, inbox, signals).run()


class Sweep:
    """The driver of a sweep; its main thread starts trials and records their results."""

    def __init__(
        self,
        resolved: ResolvedConfig,
        sweep: SweepConfig,
        options: SweepOptions,
        home: SweepHome,
        inbox: queue.SimpleQueue[Message],
        signals: Signals,
    ) -> None:
        self.resolved, self.sweep, self.home, self.inbox, self.signals = resolved, sweep, home, inbox, signals
        self.options, self.folder = options, home.folder
        self.ranks = ranks_of(resolved.config, sweep)
        self.record = self._record()
        self.running: dict[int, Trial] = {}
        self.waiting: list[TrialRecord] = []
        self.failures: Counter[str] = Counter()  # of trials, by their root cause
        self.ending = False
        self.messages = RunMessages(resolved, tells_end=True) if resolved.config.notify.urls else None
        self.exit_code: int | None = None  # set as soon as it is known that the sweep ends early
        self._earlier_s = self.record.duration_s or 0.0
        self._began_s = time.monotonic()
        self._saved_s = 0.0

        def rows(status: str, elapsed_s: float, height: int) -> list[str]:
            return output.live_rows(self.record, self._shown(), status, elapsed_s, height)

        self.display: Display = Display(options.output, home.folder, "", rows=rows, elapsed_s=self._earlier_s)

        def lost(error: DdptrainError) -> None:
            inbox.put(ResultsLost(error))

        home.writer.begin_upload(lambda text: self.display.notice(text, level="warning"), lost)
        home.writer.keep_heartbeat(lost)

    def run(self) -> int:
        """Run to the end; write sweep.json and best.yaml, and show the result."""
        bug: BaseException | None = None
        try:
            with ExitStack() as stack:
                session, cluster, capacity = self._open(stack)
                from ddptrain.sweep.study import Study

                self._study = study = Study(self.sweep, self.record.trials, self._values_so_far)
                self._continue_trials()
                self._loop(self._plan(study, session, cluster), capacity)
        except Interrupted as error:
            self._end_early(error.signum)
        except DdptrainError as error:
            self._fail(one_line(error), error.exit_code)
        except BaseException as error:  # sweep.json must contain the end in every case; the error is raised below
            self._fail(f"a bug in ddptrain: {error!r}", ExitCode.INTERNAL)
            bug = error
        code = self._finish()
        if bug is not None:
            raise bug
        return code

    # --- the beginning ---

    def _record(self) -> SweepRecord:
        sweep, config = self.sweep, self.resolved.config
        planned = sweep.trials
        if (size := sweep.grid_size) is not None:
            planned = min(size, planned or size)
        source = str(self.resolved.path.absolute())
        record = SweepRecord(self.home.sweep_id, config.name, source, utc_now())
        if self.options.resume and (self.folder / SWEEP_JSON).exists():
            record = read_sweep(self.folder)
        record.metric, record.mode = sweep.metric, sweep.mode
        record.search, record.prune, record.space = sweep.searcher, sweep.pruner, describe_space(sweep)
        record.ranks, record.planned, record.for_s, record.source = self.ranks, planned, sweep.for_, source
        record.status, record.exit_code, record.message, record.ended_at = "running", None, "", None
        record.save(self.folder)
        return record

    def _open(self, stack: ExitStack) -> tuple[Session, Cluster, Capacity]:
        """Start or connect to the cluster. Raises ClusterError, Interrupted."""
        config = self.resolved.config
        machine = local_slots(config, self.sweep, self.ranks) if config.cluster.is_embedded else None
        cluster = cluster_for(config, machine, self.home.writer.layout.scratch_dir, self.display.notice)
        stack.callback(cluster.close)
        cluster.begin()  # first, so that its processes import torch while this one imports Dask
        what = counted(self.record.planned, "trial") if self.record.planned else "trials"
        self.display.notice(f"sweep {self.home.sweep_id} in {self.home.where}: {what} of {counted(self.ranks, 'rank')}")
        for problem in missing_variables(config.notify.urls):
            self.display.notice(f"notify.urls: {problem}", level="warning")
        self.display.status(f"connecting to {cluster.description}" if machine is None else "starting a local cluster")
        from ddptrain.driver.connect import open_session

        with self.signals.interrupting():
            session = stack.enter_context(open_session(cluster, config, self.display.status))
        if machine is not None:
            capacity = Capacity(machine.ranks // self.ranks, self.ranks, None)
        else:
            most = None if self.sweep.parallel == "auto" else self.sweep.parallel
            capacity = Capacity(most, self.ranks, session.client)
        return session, cluster, capacity

    def _values_so_far(self, trial: TrialRecord) -> list[float]:
        """Return the values of the metric in the first run of a trial, for the pruner."""
        view = self.home.trials.get(f"{self.home.sweep_id}-{trial.number:04d}")
        return [] if view is None else list(self.home.values(view, self.sweep.metric).values())

    def _continue_trials(self) -> None:
        """Put the trials of earlier drivers that have no result in line."""
        self.waiting = [trial for trial in self.record.trials if not trial.state.is_final]
        for trial in self.waiting:
            trial.state = TrialState.INTERRUPTED
        if self.record.trials:
            ended = len(self.record.trials) - len(self.waiting)
            text = f"continuing {self.home.sweep_id}: {counted(ended, 'trial')} ended, {len(self.waiting)} to continue"
            self.display.notice(text)
        self._save(now=True)

    def _plan(self, study: Study, session: Session, cluster: Cluster) -> TrialPlan:
        def config_of(point: Mapping[str, Any]) -> ResolvedConfig:
            return trial_config(self.resolved, point, self.home.where, self.home.sweep_id)

        mutex = threading.Lock()

        def shared(trial: Trial) -> SharedRun:
            return SharedRun(cluster, session, trial.signals, mutex)

        metric, mode, run = self.sweep.metric, self.sweep.mode, run_with(shared)
        plan = TrialPlan(self.home, metric, mode, config_of, study.report, run)
        if self.messages is not None:
            plan.on_event = self.messages.on_event
        return plan

    # --- the trials ---

    def _loop(self, plan: TrialPlan, capacity: Capacity) -> None:
        """Start trials and take their results until nothing is left to do."""
        self.display.status("")
        try:
            while self.running or not (self.ending or (not self.waiting and not self._may_choose())):
                room = capacity.trials(len(self.running)) - len(self.running)
                if room > 0 and not self.ending and (self.waiting or self._may_choose()):
                    self._start(plan)
                    capacity.started()
                    continue
                self._take_message()
                self._save()
        finally:  # wait for trials that still run after an error
            for trial in list(self.running.values()):
                trial.stop(signal.SIGTERM)
            while self.running:
                self._take_message()

    def _may_choose(self) -> bool:
        """Return whether another point may be chosen; a trial to be continued may start even after the time limit."""
        for_s, planned = self.sweep.for_, self.record.planned
        has_time = for_s is None or self._elapsed_s() < for_s
        return has_time and (planned is None or len(self.record.trials) < planned)

    def _start(self, plan: TrialPlan) -> None:
        if self.waiting:
            record = self.waiting.pop(0)
        else:
            record = self._study.ask()
            record.started_at = utc_now()
            self.record.trials.append(record)
            if not self._upload_point():
                self.waiting.append(record)
                record.state = TrialState.INTERRUPTED
                return
        record.error, record.ended_at = "", None
        trial = Trial(plan, record, lambda trial: self.inbox.put(TrialEnded(trial)))
        self.running[record.number] = trial
        self.record.parallel = max(self.record.parallel, len(self.running))
        trial.start()
        self.display.on_event(output.trial_event("trial_started", record))
        self._save()

    def _upload_point(self) -> bool:
        """Record the point that was chosen last, also in the store; return False if the sweep ends before."""
        self._save(now=True)
        while not self.ending:
            if not (why := self.home.writer.finish_upload(_UPLOAD_S)):
                return True
            _log.info("waiting for the upload of a point", reason=why)
            self._take_message(0.0)
        return False

    def _take_message(self, within_s: float = _TICK_S) -> None:
        try:
            message = self.inbox.get(timeout=within_s)
        except queue.Empty:
            return
        match message:
            case ResultsLost(error):
                self._fail(one_line(error), error.exit_code)
            case SignalReceived(signum):
                self._end_early(signum)
                for trial in list(self.running.values()):
                    trial.stop(signum)
            case TrialEnded(trial):
                self._trial_ended(trial)

    def _trial_ended(self, trial: Trial) -> None:
        trial.join()
        record = trial.record
        del self.running[record.number]
        record.ended_at = utc_now()
        if record.state.is_final:
            self._study.tell(record)
        best = self.record.find_best()
        self.record.best = best.number if best is not None else None
        self._save(now=True)
        self.display.on_event(output.trial_event("trial_ended", record))
        text, level = output.ended_notice(record, self.record)
        self.display.notice(text, level=level)
        if trial.bug is not None:
            raise trial.bug
        if record.state is TrialState.FAILED and not (trial.diverged and best):  # else it is a result of the point
            self.failures[record.cause] += 1
            if self.failures[record.cause] >= _SAME_FAILURES and not self.ending:
                text = f"{_SAME_FAILURES} trials have failed in the same way: {record.error}"
                log = f"{self.home.where}/{trial.run_id}/logs"
                self._fail(f"{text}; the log of the last one is in {log}", trial.exit_code)

    def _fail(self, text: str, exit_code: int) -> None:
        """End the sweep early because of an error; running trials save and end."""
        self.ending, self.exit_code = True, int(exit_code)
        self.record.message = text
        self.display.notice(text, level="error")
        _log.info("sweep ends early", reason=text, exit_code=int(exit_code))
        for trial in list(self.running.values()):
            trial.stop(signal.SIGTERM)

    def _end_early(self, signum: int) -> None:
        if self.exit_code is None:
            self.exit_code = int(ExitCode.PREEMPTED) if signum == signal.SIGTERM else 128 + signum
            self.record.message = f"the driver was sent {signal.Signals(signum).name}"
            running = counted(len(self.running), "trial")
            self.display.notice(
                f"{self.record.message}: {running} save and end; continue with --resume", level="warning"
            )
        self.ending = True

    # --- the end ---

    def _finish(self) -> int:
        """Write the end to sweep.json and best.yaml, show it, and return the exit code."""
        record = self.record
        for trial in record.trials:
            if trial.state is TrialState.RUNNING:
                trial.state = TrialState.INTERRUPTED
        best = record.find_best()
        if self.exit_code is None:
            self.exit_code = int(ExitCode.TRAINING_FAILED if best is None else ExitCode.SUCCEEDED)
            record.message = "no trial is complete" if best is None else ""
        record.status = str(_status(self.exit_code))
        record.exit_code, record.ended_at, record.duration_s = self.exit_code, utc_now(), round(self._elapsed_s(), 3)
        record.best = best.number if best is not None else None
        if best is not None:
            self._write_best(best)
        record.save(self.folder)
        status = RunStatus(record.status)
        failure = FailureRecord(kind="sweep", message=record.message) if record.message else None
        self.home.writer.finish(status, self.exit_code, failure)
        lines = output.summary_lines(record, self.home.where)
        self.display.close(lines, output.last_event(record, self.home.where))
        if self.messages is not None:
            self.messages.on_end(Run(self.home.writer.layout.root, self.home.writer.record))
        return self.exit_code

    def _write_best(self, best: TrialRecord) -> None:
        trials = counted(len(self.record.trials), "trial")
        comment = f"The best of {trials} of the sweep {self.home.sweep_id}: trial {best.number}, "
        comment += f"{self.record.metric} {best.value:.6g}."
        config = trial_config(self.resolved, best.params, self.home.where, self.home.sweep_id)
        write_file(self.folder / BEST, best_yaml(self.resolved, config, comment).encode())

    def _elapsed_s(self) -> float:
        return self._earlier_s + time.monotonic() - self._began_s

    def _shown(self) -> list[output.RunningTrial]:
        return [
            output.RunningTrial(trial.record, trial.done, trial.total, trial.shown_status)
            for trial in list(self.running.values())
        ]

    def _save(self, *, now: bool = False) -> None:
        if now or time.monotonic() - self._saved_s >= _SAVE_EVERY_S:
            self.record.duration_s = round(self._elapsed_s(), 3)
            self.record.save(self.folder)
            self._saved_s = time.monotonic()


def _status(exit_code: int) -> RunStatus:
    if exit_code == ExitCode.SUCCEEDED:
        return RunStatus.SUCCEEDED
    if exit_code == ExitCode.PREEMPTED:
        return RunStatus.PREEMPTED
    return RunStatus.CANCELLED if exit_code > 128 else RunStatus.FAILED


def local_slots(config: RunConfig, sweep: SweepConfig, ranks: int) -> LocalResources:
    """Return the slots of the embedded cluster of a sweep. Raises UsageError, ClusterError for too few GPUs."""
    gpus = local_resources(config.cluster.model_copy(update={"ranks": "auto"}), os.environ).gpus
    units = len(gpus) or usable_cores()
    parallel = max(1, units // ranks) if sweep.parallel == "auto" else sweep.parallel
    count = parallel * ranks
    if gpus and count > len(gpus):
        raise UsageError(
            f"{parallel} trials of {ranks} ranks at the same time need {count} GPUs, and there are {len(gpus)}: lower "
            "sweep.parallel or sweep.ranks, or set cluster.gpus to 0 to train on the CPU"
        )
    return LocalResources(count, gpus[:count], gpus)


class Capacity:
    """Counts the free slots of a cluster that other runs use too, at most once a second."""

    def __init__(self, most: int | None, ranks: int, client: Client | None) -> None:
        """Most trials at a time, and where free slots are counted.

        most: the largest number of trials; None for no limit. client: None if the cluster is this sweep's own and has
        slots for `most` trials.
        """
        self._most, self._ranks, self._client = most, ranks, client
        self._looked_at = 0.0
        self._found = 1

    def trials(self, running: int) -> int:
        """Return how many trials may run at the same time; at least 1, which waits for its slots.

        A trial that is started without free slots would fail after cluster.wait_s, also if trials of its own sweep
        have the slots.
        """
        if self._client is None:
            return self._most or 1
        if time.monotonic() - self._looked_at >= _LOOK_EVERY_S:
            try:
                overview = self._client.run_on_scheduler(slots.overview)
                self._looked_at = time.monotonic()
                free = sum(worker["slots"] - worker["held"] for worker in overview["workers"])
                self._found = 1 if overview["waiting"] else max(1, running + free // self._ranks)
                _log.info("capacity", trials=self._found, free_slots=free, waiting=len(overview["waiting"]))
            except Exception as error:  # Dask raises any type while a connection breaks; the trials report that
                _log.info("free slots are not known", reason=error)
        return min(self._found, self._most or self._found)

    def started(self) -> None:
        """Count a started trial, whose slots may not be reserved yet at the next count of free slots."""
        self._looked_at = time.monotonic()


def ranks_of(config: RunConfig, sweep: SweepConfig) -> int:
    """Return the number of ranks of a trial."""
    if sweep.ranks is not None:
        return sweep.ranks
    return config.cluster.ranks if isinstance(config.cluster.ranks, int) else 1


def trial_config(resolved: ResolvedConfig, point: Mapping[str, Any], runs_dir: str, group: str) -> ResolvedConfig:
    """Return the configuration of a point, whose run directory is made in `runs_dir`.

    Raises pydantic's ValidationError if the values do not fit together.
    """
    config, sweep = resolved.config, resolved.config.sweep
    assert sweep is not None
    data = config.model_dump()
    data |= {"sweep": None, "results": {**data["results"], "dir": runs_dir}}
    ranks = ranks_of(config, sweep)
    cluster = data["cluster"]
    cluster |= {"ranks": ranks, "wait_s": max(config.cluster.wait_s, _SLOTS_WAIT_S)}
    if isinstance(cluster["gpus"], int) and cluster["gpus"] > 0:
        cluster["gpus"] = ranks
    wandb = data["tracking"]["wandb"]
    wandb["group"] = wandb["group"] or group
    for name, value in point.items():
        _set(data, name, value)
    return resolve(RunConfig.model_validate(data), resolved.path)


def _set(data: dict[str, Any], name: str, value: Any) -> None:
    section, _, key = name.partition(".")
    if section == "args":
        # After --NAME, argparse takes a value such as -x or -1e-05 as an option.
        option = [f"--{key}={value}"] if str(value).startswith("-") else [f"--{key}", str(value)]
        data["workload"]["args"] = [*data["workload"]["args"], *option]
    elif section == "params":
        *path, last = key.split(".")
        params = data["params"] = dict(data["params"])
        for part in path:
            params[part] = dict(params.get(part) or {})
            params = params[part]
        params[last] = value
    else:
        data[section] = {**data[section], key: value}


def best_yaml(resolved: ResolvedConfig, trial: ResolvedConfig, comment: str) -> str:
    """Return the configuration of the best trial for `train` and `retrain`; `comment` is its first line.

    If it has no section retrain, it gets one: the model has the name of the configuration, and the gate compares the
    metric of the sweep.
    """
    sweep = resolved.config.sweep
    assert sweep is not None
    whole, best = resolved.config, trial.config
    changes = {
        "sweep": None,
        "results": whole.results,
        "cluster": whole.cluster.model_copy(update={"ranks": best.cluster.ranks}),
        "tracking": whole.tracking,
        "retrain": whole.retrain
        or RetrainConfig(model=whole.name, gate=[GateRule(metric=sweep.metric, mode=sweep.mode)]),
    }
    return f"# {comment}\n{resolve(best.model_copy(update=changes), resolved.path).changes}"
