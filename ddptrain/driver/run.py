"""One run, from its configuration to its exit code: make the run directory, start the cluster, train, tell."""

from __future__ import annotations

import json
import os
import queue
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddptrain.clusters import state
from ddptrain.clusters.backends.attached import AttachedCluster
from ddptrain.clusters.backends.embedded import EmbeddedCluster
from ddptrain.clusters.provider import Cluster
from ddptrain.config.models import RankRange, RunConfig
from ddptrain.config.registry import is_built_in, prepare_target, workload_target
from ddptrain.config.resolved import ResolvedConfig
from ddptrain.driver.control.detach import tell_begun, tell_done
from ddptrain.driver.control.signals import Signals, signals_to
from ddptrain.driver.control.stop import stop_requests
from ddptrain.driver.display import open_display
from ddptrain.driver.failure import outcome as verdicts
from ddptrain.driver.failure import summary
from ddptrain.driver.local_resources import Offer, offer
from ddptrain.driver.messages import Inbox, ResultsLost
from ddptrain.driver.recorder import Telling
from ddptrain.driver.tracking.setup import check_trackers
from ddptrain.driver.transfer.inputs import Inputs
from ddptrain.errors import DdptrainError, ExitCode, Interrupted
from ddptrain.protocol.exec_env import without_working_directory
from ddptrain.results.errors import ResultsError
from ddptrain.results.layout import new_run_id
from ddptrain.results.ownership.claim import check_run_id
from ddptrain.results.record import DriverRecord, RunStatus
from ddptrain.results.remote.runs import RunsDir, open_runs_dir
from ddptrain.results.run_store import Keeping, LocalRuns
from ddptrain.results.writer import RunWriter

if TYPE_CHECKING:
    from distributed import Client

    from ddptrain.clusters.resolve import Target
    from ddptrain.driver.reservation import Watchers, Wish
    from ddptrain.driver.resume import Choice
    from ddptrain.driver.worker_group import Gang, Place
    from ddptrain.results.checkpoint_verification import VerifiedCheckpoint
    from ddptrain.results.lookup import RunView

_KEEP_S = 900.0  # for what is still to be uploaded when a run ends


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """What the command line says beyond the configuration."""

    run_id: str | None = None
    output: str = "auto"
    resume: str | None = None
    allow_changes: bool = False
    ready_fd: int | None = None  # of a detached driver: where to tell that the run has begun
    full_traceback: bool = False  # in the ranks' logs; run.json has all of it anyway


def train(resolved: ResolvedConfig, options: LaunchOptions) -> int:
    """Run the configuration to its end; return the exit code of the contract.

    Raises:
        UsageError, RunLocked, ClusterError: the run could not be begun; nothing was started.
    """
    config = resolved.config
    prepared_by = _prepared_by(config)
    check_trackers(config)
    machine = offer(config.cluster, os.environ) if config.cluster.is_embedded else None
    inbox: Inbox = queue.SimpleQueue()
    runs = open_runs_dir(config.results.dir)
    choice = _choice(resolved, options, runs)
    if choice is not None and choice.done is not None:
        return _already_done(choice.done, choice.reason, options)
    seen = choice.driver if choice is not None and isinstance(runs, LocalRuns) else None  # a store's copy may be older
    with (
        _kept(config, options, choice, runs) as (folder, keeping),
        _opened(resolved, folder, choice, seen) as writer,
        signals_to(inbox) as signals,
        stop_requests(writer, signals),
    ):
        keeping.begin()
        if options.ready_fd is not None:
            tell_begun(options.ready_fd, writer.layout, choice.reason if choice else "")
        inputs = Inputs(prepared_by, writer.layout.inputs_dir)
        return _Run(resolved, options, writer, inbox, signals, machine, choice, keeping, inputs).run()


def _choice(resolved: ResolvedConfig, options: LaunchOptions, runs: RunsDir) -> Choice | None:
    if options.resume is None:
        return None
    from ddptrain.driver.resume import choose

    if options.run_id is not None:
        check_run_id(options.run_id)
    folder = runs.candidates(resolved.config.name, options.resume, options.run_id)
    return choose(folder, options.resume, resolved, allow_changes=options.allow_changes, run_id=options.run_id)


def _already_done(view: RunView, reason: str, options: LaunchOptions) -> int:
    """Say that there is nothing left to do, in the way in which a run would have told its end; the exit code."""
    if options.ready_fd is not None:
        tell_done(options.ready_fd, view.layout, reason)
    if options.output == "json":
        print(json.dumps(summary.event_of(view)), flush=True)
    else:
        print(f"ddptrain: {reason}", file=sys.stderr, flush=True)
    return ExitCode.SUCCEEDED


@contextmanager
def _kept(
    config: RunConfig, options: LaunchOptions, choice: Choice | None, runs: RunsDir
) -> Iterator[tuple[Path, Keeping]]:
    """The folder to write the run into, and what keeps it where it belongs; of a run in a store, its lock as well."""
    if options.run_id is not None:
        check_run_id(options.run_id)  # before it is part of any path
    resumed = choice.folder if choice is not None else None
    run_id = resumed.name if resumed else options.run_id or new_run_id(config.name)
    with runs.keeping(run_id, resumed=resumed is not None, max_failures=config.checkpoint.max_failures) as keeping:
        yield (resumed.parent if resumed and isinstance(runs, LocalRuns) else runs.folder) / run_id, keeping


def _opened(resolved: ResolvedConfig, folder: Path, choice: Choice | None, seen: DriverRecord | None) -> RunWriter:
    config = resolved.config
    if choice is not None and choice.folder is not None:
        writer = RunWriter.reopen(folder, resolved.yaml_text, seen)
    else:
        writer = RunWriter.create(folder.parent, folder.name, config.name, resolved.yaml_text, config.workload_name)
    writer.secrets = resolved.secrets
    return writer


def _prepared_by(config: RunConfig) -> str:
    """What prepares or checks the workload's inputs before there are ranks. Raises ClusterNotFound."""
    name = config.cluster.name
    backend = config.cluster.backend if name is None else state.find(name).record.backend
    here = backend == "local"  # elsewhere a path may be another file, and a URL may be open
    return prepare_target(config.workload, config.params, here=here) if isinstance(config.workload, str) else ""


def _module_needed(config: RunConfig) -> str:
    """The workload's module:attr, which workers are asked for; a script needs none."""
    if isinstance(config.workload, str):
        return workload_target(config.workload)
    return f"{config.workload.module or 'runpy'}:"


class _Run:
    """One run and its parts; `machine` is what an embedded cluster is made of, None where we attach to another."""

    def __init__(
        self,
        resolved: ResolvedConfig,
        options: LaunchOptions,
        writer: RunWriter,
        inbox: Inbox,
        signals: Signals,
        machine: Offer | None,
        choice: Choice | None,
        keeping: Keeping,
        inputs: Inputs,
    ) -> None:
        self.resolved, self.options, self.writer, self.inbox, self.signals = resolved, options, writer, inbox, signals
        self.config: RunConfig = resolved.config
        self.machine = machine
        self.choice = choice
        self.keeping = keeping
        self.warned = False  # that not everything is where it belongs
        self.display = open_display(options.output, writer.layout.logs_dir, 0, writer.run_id)
        self.log_sizes = {rank: path.stat().st_size for rank, path in writer.layout.logs().items()}
        self.cluster = self._cluster()
        self.inputs = inputs
        keeping.listen(Telling(writer, self.display).warn, self._lose)
        writer.keep_heartbeat(self._lose)

    def _lose(self, error: DdptrainError) -> None:
        """End the run: what it writes is no longer kept, or is another driver's."""
        self.inbox.put(ResultsLost(error))

    def _cluster(self) -> Cluster:
        if self.machine is not None:
            scratch = self.writer.layout.scratch_dir
            environ = without_working_directory(os.environ) if is_built_in(self.config.workload) else os.environ
            return EmbeddedCluster(self.machine.ranks, self.machine.gpus, scratch, environ)
        if self.config.cluster.is_attached:
            return AttachedCluster(self.config.cluster)
        from ddptrain.clusters.backends.per_run import RunCluster

        return RunCluster(self.config.cluster, self.display.notice)

    def run(self) -> int:
        """Train, write how it ended, and tell it. Raises what is a bug of ours, once run.json is true."""
        try:
            verdict = self._train()
        except BaseException as error:
            verdict = self._end(verdicts.of_error(error, self.writer))
            if not isinstance(error, DdptrainError):
                raise
        else:
            verdict = self._end(verdict)
        return int(verdict.exit_code)

    def _train(self) -> verdicts.Verdict:
        with ExitStack() as stack:
            stack.callback(self.cluster.close)
            stack.callback(self.inputs.close)
            self.cluster.begin()  # first of all: everything below imports while torch is being imported there
            self.inputs.begin(self.config.params, without_working_directory({**os.environ, **self.config.env}))
            self._greet()
            # All of Dask, before anything may be interrupted.
            from ddptrain.driver.attempts import Scene, Series
            from ddptrain.driver.connect import connected
            from ddptrain.driver.worker_group import Gang

            with self.signals.interrupting():
                if self.machine is None:
                    self.inputs.wait(self.display.notice)  # rather than a cluster for data that are not there
                target = self.cluster.connect()
                lost_after_s = self.config.failure.lost_after_s
                client = stack.enter_context(
                    connected(target, self.config.cluster.start_timeout_s, self.display.status, lost_after_s)
                )
                gang = stack.enter_context(
                    Gang(client, self.writer.run_id, self.inbox, lost_after_s, foreign=target.foreign)
                )
                gang.subscribe()
                self.inputs.wait(self.display.notice)
            watchers = self._watchers(client, target)
            scene = Scene(
                self.resolved,
                self.writer,
                self.display,
                self.signals,
                self.cluster,
                gang,
                lambda: self._reserved(gang, watchers),
                self.inputs,
                self.options.full_traceback,
            )
            return Series(scene, self._checkpoint()).run()

    def _checkpoint(self) -> VerifiedCheckpoint | None:
        """What the first attempt goes on from; said, where the run is not new."""
        if self.choice is None or self.choice.folder is None:
            return None
        from ddptrain.results.checkpoint_verification import newest_verified

        found = newest_verified(self.writer.layout, lambda text: self.display.notice(text, level="warning"))
        whence = f"from {found.words}" if found else "from the start: it has no checkpoint"
        self.display.notice(f"resuming {whence}")
        return found

    def _reserved(self, gang: Gang, watchers: Watchers) -> list[Place]:
        with self.signals.interrupting():
            places = gang.reserve(self._wish(), watchers)
        self.display.expect(len(places), self.log_sizes)
        if self.machine is None:
            self.display.status(f"starting {len(places)} ranks on {self.cluster.words}")
        return places

    def _wish(self) -> Wish:
        from ddptrain.driver.reservation import Wish

        cluster = self.config.cluster
        most = cluster.ranks.max if isinstance(cluster.ranks, RankRange) else cluster.ranks
        ranks = None if most == "auto" else most
        gpus = 0 if cluster.gpus == "auto" else int(cluster.gpus)
        if self.machine is not None:
            return Wish(self.machine.ranks, False, cluster.start_timeout_s, cluster.wait_s)
        least = cluster.ranks.min if isinstance(cluster.ranks, RankRange) else None
        gather_s = self.config.failure.rejoin_wait_s if least is not None else 0.0
        asked = ranks or gpus or None
        return Wish(asked, gpus > 0, cluster.start_timeout_s, cluster.wait_s, least, gather_s)

    def _watchers(self, client: Client, target: Target) -> Watchers:
        from ddptrain.driver.reservation import Watchers

        return Watchers(
            check=self._check_of(client) if target.foreign else None,
            worker_fault=self.cluster.worker_fault,
            last_words=self.cluster.last_words,
            tell=self.display.status,
            cluster=target.name,
        )

    def _check_of(self, client: Client) -> Callable[[Sequence[str]], None]:
        from ddptrain.clusters.compatibility import Needs, check_cluster
        from ddptrain.driver.transfer.code_package import project_of

        goes_along = project_of(self.resolved) is not None
        # What goes along has not arrived yet.
        module = "ddptrain:" if goes_along else _module_needed(self.config)
        needs = Needs(module, self.resolved.import_folders)
        return lambda workers: check_cluster(client, workers, needs)

    def _greet(self) -> None:
        self.display.notice(f"run {self.writer.run_id} in {self.writer.layout.where}")
        if self.choice is not None:
            self.display.notice(self.choice.reason)
        if self.machine is not None:
            self.display.expect(self.machine.ranks, self.log_sizes)
            self.display.status(f"starting {self.machine.ranks} ranks on a local cluster")
        else:
            self.display.status(f"connecting to {self.cluster.words}")

    def _end(self, verdict: verdicts.Verdict) -> verdicts.Verdict:
        """Write the end into run.json, then show it: whoever sees the last line finds the file true.

        The verdict changes where a run that has succeeded can't be kept where it belongs.
        """
        verdict = self._flushed(verdicts.asked(verdict) if self.signals.asked else verdict)
        last_event = self._finish(verdict)
        if (kept := self._flushed(verdict)) is not verdict:
            verdict, last_event = kept, self._finish(kept)
        duration_s = float(last_event["duration_s"])
        display = self.display
        if verdict.cause:
            display.notice(f"run {self.writer.run_id} {verdict.status}: {verdict.cause}", level="error")
        sizes = {rank: path.stat().st_size for rank, path in self.writer.layout.logs().items()}
        display.close(sizes, summary.lines(self.writer, verdict, duration_s), last_event)
        return verdict

    def _finish(self, verdict: verdicts.Verdict) -> dict[str, Any]:
        """Write how the run ended; return the last event."""
        self.writer.finish(verdict.status, verdict.exit_code, verdict.failure)
        last_event = summary.last_event(self.writer, verdict, self.writer.record.duration_s or 0.0)
        self.writer.event(last_event)
        return last_event

    def _flushed(self, verdict: verdicts.Verdict) -> verdicts.Verdict:
        """The verdict once everything is where it belongs, or a failure where it would be a success and is not."""
        asked_to_go = bool(self.signals.taken) or verdict.status == RunStatus.PREEMPTED
        deadline_s = self.config.failure.grace_s if asked_to_go else _KEEP_S
        try:
            with nullcontext() if self.signals.taken else self.signals.interrupting():
                problem = self.keeping.flush(deadline_s)
        except Interrupted:
            problem = self.keeping.flush(0.0)
        if not problem and self.writer.loss is not None and verdict.exit_code == ExitCode.SUCCEEDED:
            return verdicts.of_error(self.writer.loss, self.writer)
        if not problem:
            return verdict
        told, self.warned = self.warned, True
        if verdict.exit_code == ExitCode.SUCCEEDED:
            return verdicts.of_error(ResultsError(problem), self.writer)
        if not told:
            self.display.notice(problem, level="warning")
        return verdict
