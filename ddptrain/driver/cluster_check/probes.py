"""Runs the measuring ranks in the slots of a worker group, with a deadline, and reads their measurements."""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ddptrain.driver.attempt import inbox
from ddptrain.driver.cluster_check.readings import RankReading
from ddptrain.driver.rank_specs import all_placements
from ddptrain.driver.worker_group.rank_place import RankPlace
from ddptrain.driver.worker_group.worker_group import WorkerGroup
from ddptrain.errors import ClusterError, DdptrainError
from ddptrain.log import Log
from ddptrain.protocol.cluster_check import ProbePlan, lines_of
from ddptrain.protocol.rank_spec import Checkpointing, Code, Placement, ProcessGroup, RankSpec, Supervision
from ddptrain.protocol.worker_notices import Broken, RankExit, StoreOpened
from ddptrain.worker.spool import READ_LIMIT_BYTES, rank_spool

_MODULE = "ddptrain.rank.cluster_check.process"
_FIRST_ATTEMPT = 1_000_000  # no attempt of a run has such a number, so their messages cannot be confused
_attempts = itertools.count(_FIRST_ATTEMPT)
_TICK_S = 0.1
_END_S = 2.0  # time for ranks to end after SIGKILL
_log = Log(__name__)


@dataclass(slots=True)
class _Watch:
    """The ranks of one check: which ranks have ended, and their errors."""

    attempt: int
    specs: Sequence[RankSpec]
    places: Sequence[RankPlace]
    submitted: bool = False
    errors: dict[int, str] = field(default_factory=dict)
    over: set[int] = field(default_factory=set)

    def handle(self, message: inbox.InboxMessage) -> int | None:
        """Handle a message; return the port of the store if the message reports it, else None.

        Raises the error of a run whose results can't be written.
        """
        match message:
            case StoreOpened(attempt=attempt, port=port) if attempt == self.attempt:
                return port
            case RankExit() if message.attempt == self.attempt:
                self._end(message.rank, "" if message.status == 0 else message.text)
            case Broken() | inbox.TaskFailed() if message.attempt == self.attempt:
                self._end(message.rank, message.message)
            case inbox.WorkerLost(address=address):
                for place in self.places:
                    if place.slot.worker == address:
                        self._end(place.rank, "its worker was lost")
            case inbox.ResultsLost(error=error):
                raise error
            case _:
                pass  # output, and messages of other attempts
        return None

    def _end(self, rank: int, error: str) -> None:
        if rank not in self.over:
            self.over.add(rank)
            self.errors[rank] = error

    @property
    def waiting(self) -> bool:
        """Whether a rank may still measure. If rank 0 ends before it has opened the store, no other rank is started."""
        return len(self.over) < len(self.places) and (self.submitted or 0 not in self.over)


def run_probes(
    worker_group: WorkerGroup,
    places: Sequence[RankPlace],
    plan: ProbePlan,
    env: Mapping[str, str],
    deadline_s: float,
    check: Callable[[], None],
) -> list[RankReading]:
    """Run one measuring rank in each place; return their readings in the order of places.

    Ranks that have not ended after `deadline_s` are killed; their earlier measurements count. `check` is called about
    ten times per second and may raise an exception. Raises ClusterError if the scheduler is lost.
    """
    attempt = next(_attempts)
    placements = all_placements(places, use_gpu=plan.gpu)
    address = places[0].slot.host
    plain = [
        _spec(worker_group.run_id, attempt, place.rank, placement, address, plan, env)
        for place, placement in zip(places, placements, strict=True)
    ]
    specs = worker_group.sealed(plain, places)
    watch = _Watch(attempt, specs, places)
    deadline = time.monotonic() + deadline_s
    try:
        worker_group.submit(specs[:1], [places[0].slot])
        _wait(worker_group, watch, deadline, check)
        if not worker_group.connected:
            raise ClusterError("the Dask scheduler is gone, or the network to it")
        return [_reading(worker_group, watch, place, deadline_s) for place in places]
    finally:
        worker_group.stop([spec for spec in specs if spec.rank not in watch.over], 0.0)
        _wait(worker_group, watch, time.monotonic() + _END_S, lambda: None)
        worker_group.end_attempt()


def _wait(worker_group: WorkerGroup, watch: _Watch, deadline: float, check: Callable[[], None]) -> None:
    while watch.waiting and time.monotonic() < deadline and worker_group.connected:
        check()
        try:
            message = worker_group.inbox.get(timeout=_TICK_S)
        except queue.Empty:
            continue
        port = watch.handle(message)
        if port is not None and not watch.submitted:
            watch.submitted = True
            others = [spec.with_port(port) for spec in watch.specs[1:]]
            worker_group.submit(others, [place.slot for place in watch.places[1:]])


def _spec(
    run_id: str,
    attempt: int,
    rank: int,
    placement: Placement,
    address: str,
    plan: ProbePlan,
    env: Mapping[str, str],
) -> RankSpec:
    backend = "nccl" if plan.gpu else "gloo"
    return RankSpec(
        run_id=run_id,
        attempt=attempt,
        rank=rank,
        placement=placement,
        group=ProcessGroup(backend, plan.timeout_s, address),
        checkpointing=Checkpointing(),
        code=Code(_MODULE, workdir="/", module=_MODULE, args=(plan.to_json(),), built_in=True),
        supervision=Supervision(grace_s=0.0),
        env=dict(env),
    )


def _reading(worker_group: WorkerGroup, watch: _Watch, place: RankPlace, deadline_s: float) -> RankReading:
    rank = place.rank
    if rank and not watch.submitted:
        return RankReading(rank, (), place.gpu)  # not started: rank 0 has failed, and its reading has the error
    error = watch.errors.get(rank, f"it did not end within {deadline_s:g} s")
    if error == "its worker was lost":
        return RankReading(rank, (), place.gpu, error)
    try:
        log = _log_of(worker_group, watch, place)
    except (DdptrainError, OSError) as problem:
        return RankReading(rank, (), place.gpu, error or f"its log can't be read: {problem}")
    lines, last = lines_of(log)
    _log.info("rank measured", rank=rank, host=place.host, lines=len(lines), error=error or None)
    if error and last:
        error = f"{error}: {last}"
    return RankReading(rank, lines, place.gpu, error)


def _log_of(worker_group: WorkerGroup, watch: _Watch, place: RankPlace) -> bytes:
    path = rank_spool(place.scratch, worker_group.run_id, watch.attempt, place.rank).log
    if place.shared:
        return path.read_bytes()
    return worker_group.fetch(place.slot.worker, path, 0, READ_LIMIT_BYTES)
