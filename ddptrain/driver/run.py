"""One run, from its configuration to its exit code.

    train    check the configuration ─ choose or create the run directory, and lock it ─ Run.run
    Run.run  start or join the cluster ─ (reserve slots ─ copy files to hosts ─ an attempt)* ─ the end

Dask is imported when the worker process has been started, so that both start at the same time.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ddptrain.clusters import record
from ddptrain.clusters.backends.embedded import EmbeddedCluster
from ddptrain.clusters.machine_slots import LocalResources, crowding, local_resources
from ddptrain.clusters.provider import Cluster
from ddptrain.config.plugin_names import prepare_target
from ddptrain.config.resolved import ResolvedConfig
from ddptrain.config.run_config import RunConfig
from ddptrain.config.wording import counted
from ddptrain.config.workload_check import check_workload
from ddptrain.driver.cluster_session import SharedRun, cluster_for
from ddptrain.driver.control.debugger import DebuggerTerminal, check_debug
from ddptrain.driver.control.signals import Signals, signals_to
from ddptrain.driver.control.stop import stop_requests
from ddptrain.driver.display import Display, summary
from ddptrain.driver.inbox import Inbox, ResultsLost
from ddptrain.driver.observers import OPENED, InstalledObservers, RunObserver
from ddptrain.driver.recorder import Recorder
from ddptrain.driver.run_end import (
    RestartPolicy,
    RunEnd,
    describe_fault,
    judge_attempt,
    judge_error,
    name_stop_command,
)
from ddptrain.driver.tracking.setup import TrackingSetup, check_trackers
from ddptrain.driver.transfer.environment import Environment, environment_of
from ddptrain.driver.transfer.inputs import RunInputs
from ddptrain.driver.transfer.starting_weights import fetch_weights
from ddptrain.errors import ClusterError, DdptrainError, ExitCode, Interrupted
from ddptrain.gpus import usable_cores
from ddptrain.log import Log, set_context
from ddptrain.protocol import deadlines
from ddptrain.protocol.exec_env import JOB, without_working_directory
from ddptrain.results.checkpoints.run_checkpoints import CheckpointPolicy
from ddptrain.results.checkpoints.verification import VerifiedCheckpoint, newest_verified
from ddptrain.results.errors import ResultsError
from ddptrain.results.layout import check_run_id, new_run_id
from ddptrain.results.log_file import driver_log
from ddptrain.results.run import Run as RecordedRun
from ddptrain.results.run_record import JobRecord, RunStatus, utc_now
from ddptrain.results.run_writer import RunWriter
from ddptrain.results.runs import LocalRuns, open_runs_dir
from ddptrain.results.time_use import time_use, timed_events
from ddptrain.sanitize import sanitized
from ddptrain.worker.environment import python_of

if TYPE_CHECKING:
    from ddptrain.driver.connect import Session
    from ddptrain.driver.rank_specs import EvaluationPlan
    from ddptrain.driver.ranks import AttemptEnd, RankPlace
    from ddptrain.driver.resume import Choice
    from ddptrain.driver.workers import Workers
    from ddptrain.protocol.rank_spec import Debug, RankSpec


_log = Log(__name__)
_EVALUATION = "evaluate"  # the stage of such a run in the events of JSON output


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """The options of the command line that are not in the configuration."""

    run_id: str | None = None
    output: str = "auto"
    resume: str | None = None
    allow_changes: bool = False
    full_traceback: bool = False  # in the ranks' logs; run.json always has all frames
    all_ranks: bool = False  # each rank is shown separately, even if there are many
    shows: Callable[[int], bool] | None = None  # whether the output of this local rank is shown; None: of all
    evaluation: EvaluationPlan | None = None  # the ranks score checkpoints instead of training
    to_stderr: bool = False  # where everything is shown, because stdout is for the result of the command
    observers: Sequence[RunObserver] = ()
    inputs: Mapping[str, bytes] = field(default_factory=dict)  # files for the ranks, by name: in ctx.inputs
    debug: Debug | None = None  # the rank that is debugged
    shared: SharedRun | None = None  # the run is one of several in this process, each in a thread; without a display


def train(resolved: ResolvedConfig, options: LaunchOptions) -> int:
    """Run the configuration to its end; return the exit code (errors.ExitCode).

    Raises UsageError, RunLocked or ClusterError if the run could not begin; nothing was started then.
    """
    config, shared, plan = resolved.config, options.shared, options.evaluation
    prepared_by = plan.prepare if plan is not None else _prepared_by(config)
    check_trackers(config)
    environment = environment_of(resolved)
    machine = local_resources(config.cluster, os.environ) if config.cluster.is_embedded and shared is None else None
    check_debug(options.debug, machine.ranks if machine is not None else config.cluster.slots)
    if options.run_id is not None:
        check_run_id(options.run_id)  # before it becomes part of a path
    runs = open_runs_dir(config.results.dir)
    choice = None
    if options.resume is not None:
        from ddptrain.driver.resume import choose

        choice = choose(runs, options.resume, resolved, allow_changes=options.allow_changes, run_id=options.run_id)
        if choice.done is not None:
            return _already_done(choice.done, choice.reason, options)
    check_workload(resolved)
    resumed = choice.folder if choice is not None else None
    resolved, weights = fetch_weights(resolved, resumed) if plan is None else (resolved, None)
    inbox: Inbox = queue.SimpleQueue()
    run_id = resumed.name if resumed else options.run_id or new_run_id(config.name)
    with runs.claim(run_id, resumed=resumed is not None) as upload, ExitStack() as stack:  # it is locked
        folder = (resumed.parent if resumed and isinstance(runs, LocalRuns) else runs.folder) / run_id
        if choice is not None and resumed is not None:
            seen = choice.driver if isinstance(runs, LocalRuns) else None  # a copy may be older
            writer = RunWriter.reopen(folder, resolved.yaml_text, seen)
        else:
            writer = RunWriter.create(folder.parent, run_id, config.name, resolved.yaml_text, config.workload_name)
        writer.secrets, writer.upload = resolved.secrets, upload
        stack.enter_context(writer)
        signals = stack.enter_context(signals_to(inbox, passes_on=True)) if shared is None else shared.signals(inbox)
        stack.enter_context(stop_requests(writer, signals))
        log = writer.layout.decision_log
        stack.enter_context(driver_log(log, run_id, writer.secrets, only_own=shared is not None))
        if choice is not None:
            _log.info("resume chosen", reason=choice.reason, asked=options.resume)
        writer.save_git_diff()
        _opened(options, writer.layout, choice.reason if choice else "", done=False)
        inputs = RunInputs(prepared_by, writer.layout.inputs_dir, weights, options.inputs)
        return Run(resolved, options, choice, machine, environment, writer, inputs, inbox, signals).run()


def _opened(options: LaunchOptions, layout: RecordedRun, reason: str, *, done: bool) -> None:
    """Send the observers the first event: the directory of the run exists; `done`: the run has already succeeded."""
    where = {"run_id": layout.root.name, "run_dir": layout.where, "folder": str(layout.root)}
    for observer in options.observers:
        observer.on_event({"event": OPENED, **where, "reason": reason, "done": done})


def _already_done(view: RecordedRun, reason: str, options: LaunchOptions) -> int:
    """Report the end of a run that has already succeeded; return the exit code."""
    _opened(options, view, reason, done=True)
    if options.output == "json":
        print(json.dumps(summary.finished_event(view)), flush=True)
    elif options.shared is None:
        print(f"ddptrain: {reason}", file=sys.stderr, flush=True)
    for observer in options.observers:
        observer.on_end(view)
    return ExitCode.SUCCEEDED


def _prepared_by(config: RunConfig) -> str:
    """Return the name of the function that prepares or checks the workload's inputs, or "". Raises ClusterNotFound."""
    name = config.cluster.name
    backend = config.cluster.backend if name is None else record.find(name).backend
    here = backend == "local"  # on other hosts a path may be another file
    return prepare_target(config.workload, config.params, here=here) if isinstance(config.workload, str) else ""


@dataclass
class Run:
    """One run: its directory, its cluster, its attempts and its end.

    machine: the resources of the embedded cluster, None for other clusters.
    """

    resolved: ResolvedConfig
    options: LaunchOptions
    choice: Choice | None
    machine: LocalResources | None
    environment: Environment | None
    writer: RunWriter
    inputs: RunInputs
    inbox: Inbox
    signals: Signals

    def __post_init__(self) -> None:
        self.config: RunConfig = self.resolved.config
        self.warned = self.ended = False  # that the run could not be uploaded completely; the display has ended
        shared, layout, is_training = self.options.shared, self.writer.layout, self.options.evaluation is None
        self.log_sizes = {rank: path.stat().st_size for rank, path in layout.logs().items()}
        self.observers: list[RunObserver] = [*self.options.observers]
        debug, debugger = self.options.debug, None
        if debug is not None and not debug.port:
            debugger = DebuggerTerminal(debug.rank, self.signals, self.inbox)
            self.observers.insert(0, debugger)
        if shared is None:
            display = Display(
                self.options.output,
                layout.logs_dir,
                self.writer.run_id,
                stdout=sys.stderr if self.options.to_stderr else None,
                all_ranks=self.options.all_ranks,
                stage="" if is_training else _EVALUATION,
                debugger=debugger,
            )
            self.observers.insert(0, display)
        if is_training:
            self.observers.append(InstalledObservers(self._warn))
        nan = self.config.failure.nan if is_training else "ignore"  # a score may be NaN
        changes: dict[str, object] = {"nan": nan}
        if debug is not None:  # its end is the end of the run
            changes = {"nan": "warn" if nan == "stop" else nan, "max_restarts": 0, "max_losses": 0}
        self.failure = self.config.failure.model_copy(update=changes)
        activity = "training" if is_training else "evaluating"
        self.recorder = Recorder(self.writer, self.observers, self.config.checkpoint.metric, activity, self.failure)
        python = python_of(self.environment.digest) if self.environment is not None else ""
        self.cluster: Cluster = (
            cluster_for(self.config, self.machine, layout.scratch_dir, self.recorder.show, python)
            if shared is None
            else shared.cluster
        )
        self.writer.begin_upload(self.recorder.warn, self._abort)
        self.writer.keep_heartbeat(self._abort)

    def _abort(self, error: DdptrainError) -> None:
        """End the run: its results can no longer be written, or another driver owns it."""
        self.inbox.put(ResultsLost(error))

    def _warn(self, text: str) -> None:
        """Show a warning of an observer, from any thread."""
        if self.ended:
            print(f"ddptrain: warning: {sanitized(text)}", file=sys.stderr, flush=True)
        else:
            self.recorder.warn(text)

    def run(self) -> int:
        """Train, write the end to run.json, and show it. Exceptions that are bugs are then raised again."""
        try:
            run_end = self._train()
        except BaseException as error:  # run.json must contain the end in every case
            run_end = self._end(judge_error(error, self.writer))
            if not isinstance(error, DdptrainError):
                raise
        else:
            run_end = self._end(run_end)
        return int(run_end.exit_code)

    def _train(self) -> RunEnd:
        shared, plan = self.options.shared, self.options.evaluation
        with ExitStack() as stack:
            if shared is None:
                stack.callback(self.cluster.close)
            stack.callback(self.inputs.close)
            if shared is None:
                self._wait_for_room()
                self.cluster.begin()  # first, so that its processes import torch while this one imports Dask
            prepared = plan.request if plan is not None else self.config.params
            self.inputs.begin(prepared, without_working_directory({**os.environ, **self.config.env}))
            self._show_start()
            # All that imports Dask. A signal may interrupt the blocks below, and must not interrupt an import.
            from ddptrain.driver import attempt, rank_specs, reservation  # noqa: F401  # later methods use them
            from ddptrain.driver.connect import open_session
            from ddptrain.driver.workers import Workers

            with self.signals.interrupting():
                if self.machine is None:
                    self.inputs.wait(self.recorder.show)  # before a cluster is started: the data may not exist
                if shared is not None:
                    session = shared.session
                else:
                    session = stack.enter_context(open_session(self.cluster, self.config, self.recorder.status))
                lost_after_s, foreign = self.config.failure.lost_after_s, session.target.foreign
                workers = Workers(
                    session.client, self.writer.run_id, self.inbox, lost_after_s, foreign=foreign, news=session.news
                )
                stack.enter_context(workers)
                workers.subscribe()
                self.inputs.wait(self.recorder.show)
            return self._run_attempts(session, workers)

    def _wait_for_room(self) -> None:
        """Wait until other runs leave enough slots of this machine, if the run waits for them. Raises ClusterError."""
        if not (isinstance(self.cluster, EmbeddedCluster) and self.config.cluster.wait_s):
            return
        from ddptrain.driver.reservation import SlotQueue, WaitHooks, request_for

        hooks = WaitHooks(self.recorder.status, lambda queued: self.writer.update(queued=queued))
        with self._in_line():
            queue = SlotQueue(request_for(self.config, self.cluster.slots), hooks)
            while (refusal := self.cluster.wait_for_room(self.config.cluster.priority)) is not None:
                queue.wait(refusal)

    @contextmanager
    def _in_line(self) -> Iterator[None]:
        """A wait that signals interrupt; after it the run is not queued."""
        try:
            with self.signals.interrupting():
                yield
        finally:
            if self.writer.record.queued is not None:
                self.writer.update(queued=None)

    def _show_start(self) -> None:
        if self.options.evaluation is not None:
            self.recorder.show(f"evaluating {self.options.evaluation.description}")
        else:
            self.recorder.show(f"run {self.writer.run_id} in {self.writer.layout.where}")
        if self.choice is not None:
            self.recorder.show(self.choice.reason)
        if self.machine is not None:
            self.recorder.ranks(self.machine.ranks, self.log_sizes)
            if warning := crowding(self.machine, usable_cores()):
                self.recorder.show(warning, "warning")
            self.recorder.status(f"starting {counted(self.machine.ranks, 'rank')} on a local cluster")
        else:
            self.recorder.status(f"connecting to {self.cluster.description}")

    # --- attempts ---

    def _run_attempts(self, session: Session, workers: Workers) -> RunEnd:
        """Run attempts, each from the newest checkpoint, until one ends the run; return how it ends."""
        from ddptrain.driver.rank_specs import RankSpecs

        settings = self.config.checkpoint
        policy = CheckpointPolicy(
            settings.keep, settings.metric, settings.mode, ignore_nan=self.failure.nan == "ignore"
        )
        tracking = TrackingSetup(self.resolved, self.writer, os.environ, self.recorder.notice)
        specs = RankSpecs(
            self.resolved,
            self.writer,
            workers,
            self.inputs,
            tracking,
            self.options.evaluation,
            self.options.full_traceback,
            self.options.debug,
            self.recorder.status,
        )
        restarts = RestartPolicy(self.failure)
        checkpoint = self._resumed()
        while True:
            places = self._reserve(session, workers)
            check_debug(self.options.debug, len(places))
            number = len(self.writer.record.attempts) + 1
            set_context(attempt=number)
            self.writer.go_on_from(checkpoint, policy)
            tracking.go_on_from(checkpoint)
            with self.signals.interrupting():  # it may copy a checkpoint, inputs and code to the hosts
                if self.environment is not None:
                    self.environment.install(workers, places, self.config.env, self.recorder)
                built = specs.build(number, places, checkpoint)
            workers.give(built, places)
            self._record_start(checkpoint, len(places))
            end = self._attempt(built, places, workers, policy)
            run_end = judge_attempt(end, self.writer)
            self._record_end(end, run_end)
            fault, step = end.fault, end.ranks[end.fault.rank].step if end.fault is not None else None
            if step is None and fault is not None and checkpoint is not None:
                step = checkpoint.step
            again = restarts.after(end, step, scheduler_is_there=workers.connected)
            cause = {"cause_rank": fault.rank, "cause": f"{fault.kind}: {fault.line}"} if fault is not None else {}
            _log.info("attempt ended", status=run_end.status, **cause, step=step, then=again)
            if isinstance(again, str):
                if again:
                    self.recorder.warn(f"not started again: {again}")
                if workers.rejected:
                    self.recorder.warn(
                        f"{workers.rejected} messages of workers were not valid and were ignored; the first: "
                        f"{workers.first_rejected}"
                    )
                if fault is not None and not fault.victim and fault.line not in run_end.line:
                    # The run ends for another reason, such as a signal.
                    self.recorder.show_cause(fault, describe_fault(fault, end.ranks))
                return run_end
            if fault is not None:
                self.recorder.show_cause(fault, describe_fault(fault, end.ranks))
            self.recorder.attempt_over()
            workers.end_attempt()
            self.writer.update(waiting=True)
            with self.signals.interrupting():
                checkpoint = newest_verified(self.writer.layout, self.recorder.warn)
            start = "from the start: there is no checkpoint yet"
            if checkpoint is not None:
                start = f"with the checkpoint of {checkpoint.description}"
            elif self.config.script is not None:  # the driver does not see state that a script has saved itself
                start = "the script starts again"
            pause = f" in {again.pause_s:g} s" if again.pause_s else ""
            self.recorder.warn(f"starting the ranks again{pause}, {start} ({again.count})")
            self.signals.pause(again.pause_s)
            shared = self.options.shared  # other runs may be saving on a worker that is about to end
            with nullcontext() if shared is None else shared.mutex:
                self.cluster.replace_workers(leaving=end.leaving and shared is None)

    def _resumed(self) -> VerifiedCheckpoint | None:
        """Return the checkpoint that a resumed run starts from, or None, and show it to the user."""
        if self.choice is None or self.choice.folder is None or not self.writer.record.attempts:
            return None
        with self.signals.interrupting():
            checkpoint = newest_verified(self.writer.layout, lambda text: self.recorder.show(text, "warning"))
        from_start = ": the script starts again" if self.config.script else " from the start: it has no checkpoint"
        with_checkpoint = f" with the checkpoint of {checkpoint.description}" if checkpoint else from_start
        self.recorder.show(f"resuming{with_checkpoint}")
        return checkpoint

    def _reserve(self, session: Session, workers: Workers) -> list[RankPlace]:
        """Reserve the slots of an attempt, all or none. Raises ClusterError."""
        from ddptrain.clusters.compatibility import check_cluster
        from ddptrain.driver.reservation import WaitHooks, request_for

        def worker_fault() -> str | None:
            self.signals.check()  # a run in a thread gets its signals here
            return self.cluster.worker_fault()

        target, slots = session.target, self.machine.ranks if self.machine is not None else None
        hooks = WaitHooks(
            check=partial(check_cluster, session.client, own=self.environment is not None) if target.foreign else None,
            worker_fault=worker_fault,
            last_words=self.cluster.last_words,
            tell=self.recorder.status,
            queued=lambda queued: self.writer.update(queued=queued),
            cluster=target.name,
            fixed=target.fixed,
        )
        with self._in_line():
            places = workers.reserve(request_for(self.config, slots), hooks)
        shows = self.options.shows or (lambda local_rank: True)
        hidden = {place.rank for place in places if not shows(place.placement.local_rank)}
        self.recorder.ranks(len(places), self.log_sizes, hidden)
        if self.machine is None:
            self.recorder.status(f"starting {counted(len(places), 'rank')} on {self.cluster.description}")
        return places

    def _record_start(self, checkpoint: VerifiedCheckpoint | None, ranks: int) -> None:
        attempt = self.writer.next_attempt(checkpoint, ranks)
        self.recorder.event(
            "run_started",
            run_id=self.writer.run_id,
            run_dir=self.writer.layout.where,
            world_size=ranks,
            attempt=attempt.attempt,
            resumed_from=attempt.resumed_from,
        )
        self.writer.update(world_size=ranks, attempts=(*self.writer.record.attempts, attempt), waiting=False)

    def _attempt(
        self, specs: Sequence[RankSpec], places: Sequence[RankPlace], workers: Workers, policy: CheckpointPolicy
    ) -> AttemptEnd:
        from ddptrain.driver.attempt import Attempt, AttemptLoop, now
        from ddptrain.driver.output import RankOutput
        from ddptrain.driver.ranks import Rank
        from ddptrain.driver.transfer.transfer_queue import TransferQueue
        from ddptrain.driver.watchdog import new_watchdog

        ranks = [Rank(spec, place) for spec, place in zip(specs, places, strict=True)]
        logs = [self.writer.layout.log(place.rank) for place in places]
        output = RankOutput(ranks, logs, self.inbox, workers.fetch, workers.has)
        transfer = TransferQueue(self.writer, policy, self.inbox, output.source)
        limit_s = None if self.options.debug else self.config.failure.hang_timeout_s
        watchdog = new_watchdog(limit_s, self.config.cluster.start_timeout_s)
        attempt = Attempt(ranks, workers, output, transfer, self.recorder, watchdog, now())
        try:
            return AttemptLoop(attempt, self.inbox, self.cluster.worker_fault).run()
        except BaseException:
            transfer.stop_retrying()  # a full disk or a lost run directory is a frequent reason
            raise
        finally:
            transfer.close(deadlines.CLOSE_SILENCE_S)  # the attempt itself has waited, and has reported what is missing

    def _record_end(self, end: AttemptEnd, run_end: RunEnd) -> None:
        *others, last = self.writer.record.attempts
        ranks = tuple(rank.record() for rank in end.ranks)
        failure = dataclasses.replace(run_end.failure, traceback="") if run_end.failure else None
        ended = dataclasses.replace(last, ended_at=utc_now(), outcome=str(run_end.status), ranks=ranks, failure=failure)
        self.recorder.event("attempt_ended", attempt=last.attempt, status=ended.outcome)
        self.writer.update(attempts=(*others, ended))

    # --- the end ---

    def _end(self, run_end: RunEnd) -> RunEnd:
        """Write the end to run.json, then show it, so that the file is complete when the last line appears.

        Return another run_end if a run that succeeded could not be stored.
        """
        run_end = self._flushed(name_stop_command(run_end) if self.signals.asked else run_end)
        job = None
        if run_end.status == RunStatus.PREEMPTED and JOB in os.environ:
            from ddptrain.driver.submit import job_to_restart

            if (job := job_to_restart(self.writer.run_id, run_end.failure, self.recorder.warn)) is not None:
                run_end = dataclasses.replace(
                    run_end, status=RunStatus.QUEUED, more=f"; {job.description} starts again"
                )
        _log.info("run ends", status=run_end.status, exit_code=int(run_end.exit_code), cause=run_end.line or None)
        view = self._finish(run_end)
        if (kept := self._flushed(run_end)) is not run_end:
            run_end, view = kept, self._finish(kept)
        if run_end.line and self.options.evaluation is None:  # the caller of an evaluation gets its error
            level = "error" if run_end.status == RunStatus.FAILED else "warning"
            self.recorder.show(f"run {self.writer.run_id} {view.record.status_text}: {run_end.line}", level)
        for observer in self.observers:
            observer.on_end(view)
            self.ended = True  # the first one is the display
        if job is not None:
            self._restart(job, run_end)
        elif JobRecord.submitted(self.writer.run_id) and run_end.failure and run_end.failure.is_users_order:
            run_end = dataclasses.replace(run_end, exit_code=ExitCode.TERMINATED)  # after 75 Kubernetes goes on
        return run_end

    def _restart(self, job: JobRecord, run_end: RunEnd) -> None:
        """Have the job of this driver started again: the run is in the queue then."""
        from ddptrain.driver.submit import restart

        try:
            restart(job)
        except ClusterError as error:
            self._warn(f"the run is not queued: {error}")
            self.writer.update(status=RunStatus.PREEMPTED)

    def _finish(self, run_end: RunEnd) -> RecordedRun:
        """Write the end of the run, the use of its time, and the last event; return the run."""
        writer = self.writer
        writer.finish(run_end.status, run_end.exit_code, run_end.failure)
        spent = time_use(writer.record, timed_events(writer.layout), writer.record.duration_s or 0.0)
        writer.update(time_use_s=spent.as_dict(), goodput=spent.goodput)
        view = RecordedRun(writer.layout.root, writer.record)
        writer.event(summary.finished_event(view))
        return view

    def _flushed(self, run_end: RunEnd) -> RunEnd:
        """Finish the uploads; return the run_end, or a failure if a run that succeeded could not be stored."""
        is_stopping = bool(self.signals.taken) or run_end.status == RunStatus.PREEMPTED
        deadline_s = self.config.failure.grace_s if is_stopping else deadlines.UPLOAD_S
        try:
            with nullcontext() if self.signals.taken else self.signals.interrupting():
                problem = self.writer.finish_upload(deadline_s)
        except Interrupted:
            problem = self.writer.finish_upload(0.0)
        error = ResultsError(problem) if problem else self.writer.loss
        if error is not None and run_end.exit_code == ExitCode.SUCCEEDED:
            run_end = judge_error(error, self.writer)
        elif problem and not self.warned:
            self.recorder.show(problem, "warning")
        self.warned = self.warned or bool(problem)
        return run_end
