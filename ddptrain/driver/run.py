"""One run, from its configuration to its exit code: run directory, cluster, attempts, end-of-run summary."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddptrain.clusters import record
from ddptrain.clusters.provider import Cluster
from ddptrain.config.plugin_names import prepare_target
from ddptrain.config.resolved import ResolvedConfig
from ddptrain.config.run_config import RunConfig
from ddptrain.config.wording import counted
from ddptrain.config.workload_check import check_workload
from ddptrain.driver.cluster_session import LocalResources, SharedRun, cluster_for, local_resources, resource_warnings
from ddptrain.driver.control.signals import Signals, signals_to
from ddptrain.driver.control.stop import stop_requests
from ddptrain.driver.display import RunDisplay, open_display, summary
from ddptrain.driver.failure import run_end as run_ends
from ddptrain.driver.inbox import Inbox, ResultsLost
from ddptrain.driver.observers import OPENED, InstalledObservers, RunObserver
from ddptrain.driver.recorder import Recorder
from ddptrain.driver.tracking.setup import check_trackers
from ddptrain.driver.transfer.starting_weights import fetch_weights
from ddptrain.errors import ClusterError, DdptrainError, ExitCode, Interrupted, UsageError
from ddptrain.file_ops import hash_file
from ddptrain.gpus import usable_cores
from ddptrain.log import Log
from ddptrain.protocol import deadlines
from ddptrain.protocol.exec_env import without_working_directory
from ddptrain.protocol.news import describe_status
from ddptrain.protocol.rank_spec import FILE as WEIGHTS
from ddptrain.results.errors import ResultsError, results_errors
from ddptrain.results.layout import RunLayout, check_run_id, new_run_id
from ddptrain.results.log_file import driver_log
from ddptrain.results.lookup import RunView
from ddptrain.results.run_record import RunStatus
from ddptrain.results.run_writer import RunWriter
from ddptrain.results.runs import LocalRuns, RunUpload, open_runs_dir
from ddptrain.results.secure_files import make_folder, write_file
from ddptrain.sanitize import sanitized

if TYPE_CHECKING:
    from ddptrain.driver.rank_specs import EvaluationPlan
    from ddptrain.driver.ranks import RankPlace
    from ddptrain.driver.resume import Choice
    from ddptrain.driver.transfer.starting_weights import FetchedWeights
    from ddptrain.driver.workers import Workers


_log = Log(__name__)
CONTENTS = "contents.json"  # names and hashes of the files; a worker that sees the same file sees the same folder
_END_S = 5.0
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
    shared: SharedRun | None = None  # the run is one of several in this process, each in a thread


def train(resolved: ResolvedConfig, options: LaunchOptions) -> int:
    """Run the configuration to its end; return the exit code (errors.ExitCode).

    Raises UsageError, RunLocked or ClusterError if the run could not begin; nothing was started then.
    """
    config, shared, plan = resolved.config, options.shared, options.evaluation
    prepared_by = plan.prepare if plan is not None else _prepared_by(config)
    check_trackers(config)
    machine = local_resources(config.cluster, os.environ) if config.cluster.is_embedded and shared is None else None
    if options.run_id is not None:
        check_run_id(options.run_id)  # before it becomes part of a path
    runs = open_runs_dir(config.results.dir)
    choice = None
    if options.resume is not None:
        from ddptrain.driver.resume import choose

        folder = runs.candidates(config.name, options.resume, options.run_id)
        choice = choose(folder, options.resume, resolved, allow_changes=options.allow_changes, run_id=options.run_id)
        if choice.done is not None:
            return _already_done(choice.done, choice.reason, options)
    check_workload(resolved)
    resumed = choice.folder if choice is not None else None
    resolved, weights = fetch_weights(resolved, resumed) if plan is None else (resolved, None)
    inbox: Inbox = queue.SimpleQueue()
    run_id = resumed.name if resumed else options.run_id or new_run_id(config.name)
    with runs.keeping(run_id, resumed=resumed is not None) as keeping, ExitStack() as stack:  # it is locked
        folder = (resumed.parent if resumed and isinstance(runs, LocalRuns) else runs.folder) / run_id
        if choice is not None and resumed is not None:
            seen = choice.driver if isinstance(runs, LocalRuns) else None  # a copy may be older
            writer = RunWriter.reopen(folder, resolved.yaml_text, seen)
        else:
            writer = RunWriter.create(folder.parent, run_id, config.name, resolved.yaml_text, config.workload_name)
        writer.secrets = resolved.secrets
        stack.enter_context(writer)
        signals = stack.enter_context(signals_to(inbox, passes_on=True)) if shared is None else shared.signals(inbox)
        stack.enter_context(stop_requests(writer, signals))
        log = writer.layout.decision_log
        stack.enter_context(driver_log(log, run_id, writer.secrets, only_own=shared is not None))
        if choice is not None:
            _log.info("resume chosen", reason=choice.reason, asked=options.resume)
        writer.save_git_diff()
        keeping.begin()
        _opened(options, writer.layout, choice.reason if choice else "", done=False)
        inputs = RunInputs(prepared_by, writer.layout.inputs_dir, weights)
        return Run(resolved, options, writer, inbox, signals, machine, choice, keeping, inputs).run()


def _opened(options: LaunchOptions, layout: RunLayout, reason: str, *, done: bool) -> None:
    """Send the observers the first event: the directory of the run exists; `done`: the run has already succeeded."""
    where = {"run_id": layout.root.name, "run_dir": layout.where, "folder": str(layout.root)}
    for observer in options.observers:
        observer.on_event({"event": OPENED, **where, "reason": reason, "done": done})


def _already_done(view: RunView, reason: str, options: LaunchOptions) -> int:
    """Report the end of a run that has already succeeded; return the exit code."""
    _opened(options, view.layout, reason, done=True)
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
    """One run and its parts; `machine` are the resources of the embedded cluster, None for other clusters."""

    resolved: ResolvedConfig
    options: LaunchOptions
    writer: RunWriter
    inbox: Inbox
    signals: Signals
    machine: LocalResources | None
    choice: Choice | None
    keeping: RunUpload
    inputs: RunInputs

    def __post_init__(self) -> None:
        self.config: RunConfig = self.resolved.config
        self.warned = False  # that the run could not be uploaded completely
        self.ended = False  # and the display is closed
        shared, layout = self.options.shared, self.writer.layout
        self.display: RunDisplay = self._open_display() if shared is None else shared.display
        self.log_sizes = {rank: path.stat().st_size for rank, path in layout.logs().items()}
        self.cluster: Cluster = (
            cluster_for(self.config, self.machine, layout.scratch_dir, self.display.notice)
            if shared is None
            else shared.cluster
        )
        is_training = self.options.evaluation is None
        nan = self.config.failure.nan if is_training else "ignore"  # a score may be NaN
        activity = "training" if is_training else "evaluating"
        installed = [InstalledObservers(self._warn)] if is_training else []
        self.observers: list[RunObserver] = [*self.options.observers, *installed]
        self.recorder = Recorder(
            self.writer, self.display, self.config.checkpoint.metric, activity, nan, observers=self.observers
        )
        self.keeping.listen(self.recorder.warn, self._abort)
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

    def _open_display(self) -> RunDisplay:
        return open_display(
            self.options.output,
            self.writer.layout.logs_dir,
            self.writer.run_id,
            stdout=sys.stderr if self.options.to_stderr else None,
            all_ranks=self.options.all_ranks,
            stage=_EVALUATION if self.options.evaluation is not None else "",
        )

    def run(self) -> int:
        """Train, write the end to run.json, and show it. Exceptions that are bugs are then raised again."""
        try:
            run_end = self._train()
        except BaseException as error:  # run.json must contain the end in every case
            run_end = self._end(run_ends.judge_error(error, self.writer))
            if not isinstance(error, DdptrainError):
                raise
        else:
            run_end = self._end(run_end)
        return int(run_end.exit_code)

    def _train(self) -> run_ends.RunEnd:
        with ExitStack() as stack:
            stack.callback(self.cluster.close)
            stack.callback(self.inputs.close)
            self.cluster.begin()  # first, so that its processes import torch while this one imports Dask
            plan = self.options.evaluation
            prepared = plan.request if plan is not None else self.config.params
            self.inputs.begin(prepared, without_working_directory({**os.environ, **self.config.env}))
            self._show_start()
            # These import Dask. A signal may interrupt the block below, and must not interrupt an import.
            from ddptrain.driver.attempts import Attempts
            from ddptrain.driver.connect import open_session
            from ddptrain.driver.workers import Workers

            with self.signals.interrupting():
                if self.machine is None:
                    self.inputs.wait(self.display.notice)  # before a cluster is started: the data may not exist
                if self.options.shared is not None:
                    session = self.options.shared.session
                else:
                    session = stack.enter_context(open_session(self.cluster, self.config, self.recorder.status))
                lost_after_s, foreign = self.config.failure.lost_after_s, session.target.foreign
                workers = Workers(
                    session.client, self.writer.run_id, self.inbox, lost_after_s, foreign=foreign, news=session.news
                )
                stack.enter_context(workers)
                workers.subscribe()
                self.inputs.wait(self.display.notice)
            return Attempts(self, session, workers).run()

    def _show_start(self) -> None:
        if self.options.evaluation is not None:
            self.display.notice(f"evaluating {self.options.evaluation.description}")
        else:
            self.display.notice(f"run {self.writer.run_id} in {self.writer.layout.where}")
        if self.choice is not None:
            self.display.notice(self.choice.reason)
        if self.machine is not None:
            self.display.expect(self.machine.ranks, self.log_sizes)
            for warning in resource_warnings(self.machine, usable_cores()) if self.options.shared is None else ():
                self.display.notice(warning, level="warning")
            self.recorder.status(f"starting {counted(self.machine.ranks, 'rank')} on a local cluster")
        else:
            self.recorder.status(f"connecting to {self.cluster.description}")

    def _end(self, run_end: run_ends.RunEnd) -> run_ends.RunEnd:
        """Write the end to run.json, then show it, so that the file is complete when the last line appears.

        Return another run_end if a run that succeeded could not be stored.
        """
        run_end = self._flushed(run_ends.name_stop_command(run_end) if self.signals.asked else run_end)
        _log.info("run ends", status=run_end.status, exit_code=int(run_end.exit_code), cause=run_end.line or None)
        last_event = self._finish(run_end)
        if (kept := self._flushed(run_end)) is not run_end:
            run_end, last_event = kept, self._finish(kept)
        display = self.display
        if run_end.line and self.options.evaluation is None:  # the caller of an evaluation gets its error
            level = "error" if run_end.status == RunStatus.FAILED else "warning"
            display.notice(f"run {self.writer.run_id} {self.writer.record.status_text}: {run_end.line}", level=level)
        sizes = {rank: path.stat().st_size for rank, path in self.writer.layout.logs().items()}
        plan = self.options.evaluation
        lines = summary.summary_lines if plan is None else summary.evaluation_lines
        view = RunView(self.writer.layout, self.writer.record)
        display.close(sizes, lines(view), last_event)
        self.ended = True
        for observer in self.observers:
            observer.on_end(view)
        return run_end

    def _finish(self, run_end: run_ends.RunEnd) -> dict[str, Any]:
        """Write the end of the run; return the last event."""
        self.writer.finish(run_end.status, run_end.exit_code, run_end.failure)
        last_event = summary.last_event(self.writer)
        self.writer.event(last_event)
        return last_event

    def _flushed(self, run_end: run_ends.RunEnd) -> run_ends.RunEnd:
        """Finish the uploads; return the run_end, or a failure if a run that succeeded could not be stored."""
        is_stopping = bool(self.signals.taken) or run_end.status == RunStatus.PREEMPTED
        deadline_s = self.config.failure.grace_s if is_stopping else deadlines.UPLOAD_S
        try:
            with nullcontext() if self.signals.taken else self.signals.interrupting():
                problem = self.keeping.flush(deadline_s)
        except Interrupted:
            problem = self.keeping.flush(0.0)
        if not problem and self.writer.loss is not None and run_end.exit_code == ExitCode.SUCCEEDED:
            return run_ends.judge_error(self.writer.loss, self.writer)
        if not problem:
            return run_end
        was_warned, self.warned = self.warned, True
        if run_end.exit_code == ExitCode.SUCCEEDED:
            return run_ends.judge_error(ResultsError(problem), self.writer)
        if not was_warned:
            self.display.notice(problem, level="warning")
        return run_end


class RunInputs:
    """The inputs/ folder of a run. There is none if the workload prepares nothing, or writes no file.

    The process may use threads and libraries that must not be in the driver, has the run's own environment, and can be
    killed at any time.
    """

    def __init__(self, target: str, folder: Path, weights: FetchedWeights | None = None) -> None:
        """`weights` are put into the folder before the function is called."""
        self._target = target
        self._folder = folder
        self._weights = weights
        self._process: subprocess.Popen[str] | None = None
        self._files: tuple[str, ...] = ()

    def begin(self, params: Mapping[str, object], environ: Mapping[str, str]) -> None:
        """Start preparing, in the background. Raises ResultsError; UsageError if the weights have changed."""
        if self._weights is not None:
            self._weights.put(self._folder)
        if not self._target:
            return
        make_folder(self._folder)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "ddptrain.driver.transfer.inputs_process"],
            env=dict(environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C must reach the driver only
            text=True,
            encoding="utf-8",
        )
        assert self._process.stdin is not None
        request = {"target": self._target, "params": dict(params), "folder": str(self._folder)}
        with contextlib.suppress(BrokenPipeError):  # the process has died: wait() reports it
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def wait(self, tell: Callable[[str], None]) -> None:
        """Wait until everything is prepared; pass the lines of the workload's function to `tell`.

        Raises the error of the function: UsageError, ClusterError or another DdptrainError; RuntimeError for a bug.
        """
        if self._process is None:
            if not self._files and (self._folder / WEIGHTS).exists():
                self._write_contents()
            return
        assert self._process.stdout is not None
        done = False
        for line in self._process.stdout:
            message = json.loads(line)
            if "tell" in message:
                tell(str(message["tell"]))
            elif "failed" in message:
                raise _error(message["failed"])
            else:
                done = True
        status = self._process.wait()
        if not done:
            raise ClusterError(f"the process that prepares the run's inputs has ended: {describe_status(status)}")
        self.close()
        if self._folder.exists():
            self._write_contents()

    def _write_contents(self) -> None:
        with results_errors(self._folder):
            files = sorted(path for path in self._folder.iterdir() if path.is_file() and path.name != CONTENTS)
            listed = {
                path.name: {"size_bytes": path.stat().st_size, "sha256": hash_file(path)[1]}
                for path in files
                if not path.name.startswith(".")
            }
        self._files = (*listed, CONTENTS)
        write_file(self._folder / CONTENTS, (json.dumps({"files": listed}, indent=2) + "\n").encode())

    def place(self, worker_group: Workers, places: Sequence[RankPlace]) -> list[str]:
        """Return the folder of the inputs on each place's worker: this one, or a copy; "" if there are no inputs.

        Raises ClusterError.
        """
        if not self._files:
            return [""] * len(places)
        return worker_group.place(places, self._folder, self._files, CONTENTS, "the inputs")

    def close(self) -> None:
        """Kill the process if it still runs, and remove the folder if it is empty."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        with contextlib.suppress(OSError):
            process.stdin.close()
        process.stdout.close()
        with contextlib.suppress(OSError):
            self._folder.rmdir()


def _error(failed: Mapping[str, object]) -> Exception:
    """Return the error of the process, as an exception of the same kind."""
    message, exit_code = str(failed["message"]), int(str(failed["exit_code"]))
    if exit_code == ExitCode.INTERNAL:
        return RuntimeError(message)
    kinds: dict[int, type[DdptrainError]] = {ExitCode.USAGE: UsageError, ExitCode.CLUSTER: ClusterError}
    error = kinds.get(exit_code, DdptrainError)(message)
    error.exit_code = exit_code
    return error
