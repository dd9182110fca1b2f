"""One run, from its configuration to its exit code: make the run directory, start the cluster, train, tell."""

from __future__ import annotations

import dataclasses
import os
import queue
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ddptrain.clusters import state
from ddptrain.clusters.attached import AttachedCluster
from ddptrain.clusters.embedded import EmbeddedCluster
from ddptrain.clusters.protocol import Cluster
from ddptrain.config import RunConfig
from ddptrain.configfile import LoadedConfig, dump_config, resolved_config
from ddptrain.driver import summary
from ddptrain.driver import verdict as verdicts
from ddptrain.driver.display import open_display
from ddptrain.driver.inbox import Inbox
from ddptrain.driver.machine import Offer, offer
from ddptrain.driver.signals import Signals, signals_to
from ddptrain.errors import DdptrainError
from ddptrain.registry import workload_target
from ddptrain.results.checkpoints import CheckpointPolicy
from ddptrain.results.layout import new_run_id
from ddptrain.results.record import AttemptRecord
from ddptrain.results.writer import RunWriter, utc_now
from ddptrain.spec import RankSpec

if TYPE_CHECKING:
    from distributed import Client

    from ddptrain.clusters.find import Target
    from ddptrain.driver.gang import Gang, Place, Watchers, Wish

_PORTER_DEADLINE_S = 600.0
_FIRST_ATTEMPT = 1


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """What the command line says beyond the configuration."""

    run_id: str | None = None
    output: str = "auto"


def train(loaded: LoadedConfig, options: LaunchOptions) -> int:
    """Run the configuration to its end; return the exit code of the contract.

    Raises:
        UsageError, RunLocked, ClusterError: the run could not be begun; nothing was started.
    """
    config = loaded.config
    if config.cluster.name is not None:
        state.find(config.cluster.name)
    machine = offer(config.cluster, os.environ) if config.cluster.is_embedded else None
    inbox: Inbox = queue.SimpleQueue()
    run_id = options.run_id or new_run_id(config.name)
    runs_dir = Path(config.results.dir)
    with (
        RunWriter.create(
            runs_dir, run_id, config.name, dump_config(resolved_config(config)), config.workload
        ) as writer,
        signals_to(inbox) as signals,
    ):
        return _Run(loaded, options, writer, inbox, signals, machine).run()


class _Run:
    """One run and its parts; `machine` is what an embedded cluster is made of, None where we attach to another."""

    def __init__(
        self,
        loaded: LoadedConfig,
        options: LaunchOptions,
        writer: RunWriter,
        inbox: Inbox,
        signals: Signals,
        machine: Offer | None,
    ) -> None:
        self.loaded, self.options, self.writer, self.inbox, self.signals = loaded, options, writer, inbox, signals
        self.config: RunConfig = loaded.config
        self.machine = machine
        self.display = open_display(options.output, writer.layout.logs_dir, 0, writer.run_id)
        self.cluster = self._cluster()
        self.began = time.monotonic()

    def _cluster(self) -> Cluster:
        if self.machine is not None:
            scratch = self.writer.layout.scratch_dir
            return EmbeddedCluster(self.machine.ranks, self.machine.gpus, scratch, os.environ)
        if self.config.cluster.is_attached:
            return AttachedCluster(self.config.cluster)
        from ddptrain.clusters.forrun import RunCluster

        return RunCluster(self.config.cluster, self.display.notice)

    def run(self) -> int:
        """Train, write how it ended, and tell it. Raises what is a bug of ours, once run.json is true."""
        try:
            verdict = self._train()
        except BaseException as error:
            verdict = verdicts.of_error(error)
            self._end(verdict)
            if not isinstance(error, DdptrainError):
                raise
        else:
            self._end(verdict)
        return int(verdict.exit_code)

    def _train(self) -> verdicts.Verdict:
        with ExitStack() as stack:
            stack.callback(self.cluster.close)
            self.cluster.begin()  # first of all: everything below imports while torch is being imported there
            self._greet()
            # All of Dask, before anything may be interrupted.
            from ddptrain.driver.connect import connected
            from ddptrain.driver.gang import Gang

            with self.signals.interrupting():
                target = self.cluster.connect()
                client = stack.enter_context(
                    connected(target, self.config.cluster.start_timeout_s, self.display.status)
                )
                gang = stack.enter_context(Gang(client, self.writer.run_id, self.inbox))
                places = gang.reserve(self._wish(), self._watchers(client, target))
                gang.subscribe()
            return self._attempt(gang, places)

    def _wish(self) -> Wish:
        from ddptrain.driver.gang import Wish

        cluster = self.config.cluster
        ranks = None if cluster.ranks == "auto" else int(cluster.ranks)
        gpus = 0 if cluster.gpus == "auto" else int(cluster.gpus)
        if self.machine is not None:
            return Wish(self.machine.ranks, False, cluster.start_timeout_s, cluster.wait_s)
        return Wish(ranks or gpus or None, gpus > 0, cluster.start_timeout_s, cluster.wait_s)

    def _watchers(self, client: Client, target: Target) -> Watchers:
        from ddptrain.driver.gang import Watchers

        return Watchers(
            check=self._check_of(client) if target.foreign else None,
            worker_fault=self.cluster.worker_fault,
            last_words=self.cluster.last_words,
            tell=self.display.status,
            cluster=target.name,
        )

    def _check_of(self, client: Client) -> Callable[[Sequence[str]], None]:
        from ddptrain.clusters.check import Needs, check_cluster

        needs = Needs(workload=workload_target(self.config.workload), sys_path=self._sys_path())
        return lambda workers: check_cluster(client, workers, needs)

    def _greet(self) -> None:
        self.display.notice(f"run {self.writer.run_id} in {self.writer.layout.root}")
        if self.machine is not None:
            self.display.expect(self.machine.ranks)
            self.display.status(f"starting {self.machine.ranks} ranks on a local cluster")
        else:
            self.display.status(f"connecting to {self.cluster.words}")

    def _attempt(self, gang: Gang, places: Sequence[Place]) -> verdicts.Verdict:
        from ddptrain.driver.attempt import Attempt
        from ddptrain.driver.porter import Porter
        from ddptrain.driver.telling import Telling

        if self.machine is None:
            self.display.expect(len(places))
            self.display.status(f"starting {len(places)} ranks on {self.cluster.words}")
        telling = Telling(self.writer, self.display)
        specs = [(self._spec(place, places), place, self.writer.layout.log(place.rank)) for place in places]
        telling.event(
            "run_started", run_id=self.writer.run_id, run_dir=str(self.writer.layout.root), world_size=len(places)
        )
        attempt = AttemptRecord(attempt=_FIRST_ATTEMPT, started_at=utc_now(), world_size=len(places))
        self.writer.update(world_size=len(places), attempts=(attempt,))
        checkpoint = self.config.checkpoint
        policy = CheckpointPolicy(checkpoint.keep, checkpoint.metric, checkpoint.mode)
        porter = Porter(self.writer, policy, self.inbox)
        try:
            start_timeout_s = self.config.cluster.start_timeout_s
            fault = self.cluster.worker_fault
            outcome = Attempt(gang, specs, porter, telling, self.inbox, fault, start_timeout_s).run()
        finally:
            porter.close(_PORTER_DEADLINE_S)
        verdict = verdicts.of_outcome(outcome, self.writer.layout)
        ranks = tuple(watch.record() for watch in outcome.ranks)
        ended = dataclasses.replace(attempt, ended_at=utc_now(), outcome=str(verdict.status), ranks=ranks)
        self.writer.update(attempts=(ended,))
        return verdict

    def _spec(self, place: Place, places: Sequence[Place]) -> RankSpec:
        config = self.config
        return RankSpec(
            run_id=self.writer.run_id,
            attempt=_FIRST_ATTEMPT,
            rank=place.rank,
            world_size=len(places),
            local_rank=place.local_rank,
            local_world_size=place.local_world_size,
            node_rank=place.node_rank,
            slot=place.slot.index,
            workload=workload_target(config.workload),
            params=dict(config.params),
            dist_backend=self._dist_backend(places),
            dist_timeout_s=config.dist.timeout_s,
            grace_s=config.failure.grace_s,
            every_epochs=config.checkpoint.every_epochs,
            workdir=os.getcwd(),
            sys_path=self._sys_path(),
            master_addr=places[0].slot.host,
            shared=place.shared,
            use_gpu=self.config.cluster.gpus != 0,
            env=dict(config.env),
        )

    def _sys_path(self) -> tuple[str, ...]:
        return (str(self.loaded.path.resolve().parent), os.getcwd())

    def _dist_backend(self, places: Sequence[Place]) -> str:
        chosen = self.config.dist.backend
        if chosen != "auto":
            return chosen
        on_gpus = self.config.cluster.gpus != 0 and all(place.slot.gpu for place in places)
        return "nccl" if on_gpus else "gloo"

    def _end(self, verdict: verdicts.Verdict) -> None:
        """Write the end into run.json, then show it: whoever sees the last line finds the file true."""
        self.writer.finish(verdict.status, verdict.exit_code, verdict.failure)
        duration_s = time.monotonic() - self.began
        last_event = summary.last_event(self.writer, verdict, duration_s)
        self.writer.event(last_event)
        display = self.display
        if verdict.cause:
            display.notice(f"run {self.writer.run_id} {verdict.status}: {verdict.cause}", level="error")
        sizes = {rank: path.stat().st_size for rank, path in self.writer.layout.logs().items()}
        display.close(sizes, summary.lines(self.writer, verdict, duration_s), last_event)
