"""Where each rank of an attempt runs, what the driver knows of it, and the result of an attempt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ddptrain.driver.fault import Fault
from ddptrain.errors import DdptrainError
from ddptrain.host_identity import file_view
from ddptrain.protocol import events
from ddptrain.protocol.news import RankExit
from ddptrain.protocol.rank_spec import Placement, RankSpec
from ddptrain.results.run_record import RankRecord

if TYPE_CHECKING:
    from ddptrain.clusters.scheduler import slots


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where one rank runs: its placement as the rank gets it, and what only the driver needs.

    scratch: the worker's folder, which the driver sees, too, if `placement.shared`. gpu: the slot's device, as an entry
    of CUDA_VISIBLE_DEVICES; "" on the CPU. same_files: the worker sees all files as the driver does.
    """

    rank: int
    placement: Placement
    slot: slots.Slot
    hostname: str
    scratch: Path
    gpu: str = ""
    same_files: bool = False

    @property
    def shared(self) -> bool:
        """Whether the driver sees the worker's folder."""
        return self.placement.shared

    @property
    def host(self) -> str:
        """The host's name and, if that is another one, its address in the cluster."""
        known = self.slot.host
        return self.hostname if known in {self.hostname, "127.0.0.1", "::1"} else f"{self.hostname} ({known})"


def rank_places(
    chosen: Sequence[slots.Slot], about: Mapping[str, Mapping[str, str]], shared: Mapping[str, bool]
) -> list[RankPlace]:
    """Return the places of the ranks 0, 1, ... in these slots.

    about: the description of each worker's host. shared: whether each worker sees the driver's files.
    """
    view = file_view()
    devices = {worker: of_worker["gpus"].split(",") for worker, of_worker in about.items()}
    gpus: dict[str, list[str]] = {}  # of each host, in the order of its local ranks
    places = []
    for slot in chosen:
        of_worker = devices[slot.worker]
        gpus.setdefault(slot.host, []).append(of_worker[slot.index] if slot.index < len(of_worker) else "")
    local_ranks: Counter[str] = Counter()
    for rank, slot in enumerate(chosen):
        of_host, worker = gpus[slot.host], about[slot.worker]
        placement = Placement(
            world_size=len(chosen),
            local_rank=local_ranks[slot.host],
            local_world_size=len(of_host),
            node_rank=list(gpus).index(slot.host),
            slot=slot.index,
            hosts=len(gpus),
            local_gpus=tuple(of_host) if all(of_host) else (),
            shared=shared[slot.worker],
        )
        gpu, same_files = of_host[placement.local_rank], worker.get("files", "") == view != ""
        scratch = Path(worker["scratch"])
        places.append(RankPlace(rank, placement, slot, worker["hostname"], scratch, gpu, same_files))
        local_ranks[slot.host] += 1
    return places


CUT_S = 5.0  # a worker sends a notice every 2 s; without one for this time, the rank's activity is unknown
_GPU_PERCENT = 5  # GPU use that counts as activity


@dataclass(slots=True)
class Activity:
    """The activity of one rank. Times are monotonic seconds, 0: never.

    spoke_at: of the last event or line. cpu_at, gpu_at: of the last use of the CPU, the GPU. excused_until: the rank
    has announced that it will be quiet. notice_at: of the last notice of its worker. cpu_s: CPU time at the last
    activity. newest_cpu_s: the newest CPU time. reports: whether the rank reports progress more often than required;
    None before its first report. log_size: bytes. report_count: reports so far. longest_pause_s: the longest time
    without an event or a line since the first report.
    """

    spoke_at: float = 0.0
    cpu_at: float = 0.0
    gpu_at: float = 0.0
    entered_at: float = 0.0
    excused_until: float = 0.0
    notice_at: float = 0.0
    cpu_s: float = 0.0
    newest_cpu_s: float = 0.0
    reports: bool | None = None
    log_size: int = 0
    report_count: int = 0
    longest_pause_s: float = 0.0

    def noticed(self, now: float) -> None:
        """Note a notice of the rank's worker. Time in which the worker was cut off is not counted."""
        if self.notice_at and now - self.notice_at > CUT_S:
            self.skip(now - self.notice_at, now)
        self.notice_at = now

    def spoke(self, now: float) -> None:
        """Note an event or a printed line of the rank."""
        if self.report_count:
            self.longest_pause_s = max(self.longest_pause_s, now - self.spoke_at)
        self.spoke_at, self.cpu_s = now, self.newest_cpu_s

    def grew(self, log_size: int, now: float) -> bool:
        """Note the size of the rank's log; return whether it has grown, that is, whether the rank has printed."""
        if log_size <= self.log_size:
            return False
        self.log_size = log_size
        self.spoke(now)
        return True

    def used_gpu(self, percent: float, now: float) -> None:
        """Note a GPU use in percent, as NVML reports it."""
        if percent >= _GPU_PERCENT:
            self.gpu_at = now

    def skip(self, seconds: float, now: float) -> None:
        """Handle these seconds as if they had not passed."""
        for name in ("spoke_at", "cpu_at", "gpu_at", "entered_at", "notice_at"):
            if at := getattr(self, name):
                setattr(self, name, min(now, at + seconds))
        if self.excused_until:
            self.excused_until += seconds


@dataclass(frozen=True, slots=True)
class Signs:
    """What was known about a rank when the stacks of all ranks were requested, because the answer itself is activity.

    silent_s: since its last event or line. uses: "CPU" or "GPU" if it was in use lately. works: this use still counts
    as progress.
    """

    idle_s: float = 0.0
    silent_s: float = 0.0
    uses: str = ""
    works: bool = False
    finished: bool = False


@dataclass(slots=True)
class Rank:
    """The driver's knowledge of one rank.

    preempted: the rank has saved, and has ended at the agreed step. lost: the rank will send no more messages.
    submitted_at: monotonic seconds, 0 before the rank is submitted. step: the last step that the rank logged.
    thread_failure: the first of its threads that has failed. stacks: its answer to the current inquiry into a hang;
    stacks_before: to the one before.
    """

    spec: RankSpec
    place: RankPlace
    started: events.Started | None = None
    entered: bool = False
    finished: bool = False
    preempted: bool = False
    fault: Fault | None = None
    ended: RankExit | None = None
    lost: bool = False
    submitted_at: float = 0.0
    step: int | None = None
    activity: Activity = field(default_factory=Activity)
    thread_failure: events.ThreadFailure | None = None
    stacks: events.Stacks | None = None
    stacks_before: events.Stacks | None = None
    signs: Signs = Signs()

    def on_event(self, event: events.Event) -> None:
        """Note an event of the rank. The attempt handles faults that end it."""
        match event:
            case events.Metrics(step=int(step)):
                self.step = step
            case events.Started():
                self.started = event
            case events.Entered():
                self.entered = True
            case events.Finished():
                self.finished = True
            case events.Preempted():
                self.preempted = True
            case events.Stacks():
                self.stacks = event
            case events.ThreadFailure() if self.thread_failure is None:
                self.thread_failure = event

    @property
    def worker(self) -> str:
        """The Dask address of the rank's worker."""
        return self.place.slot.worker

    @property
    def over(self) -> bool:
        """Whether the rank's process has ended or is lost."""
        return self.ended is not None or self.lost

    @property
    def timed_out(self) -> bool:
        """Whether the rank has ended its wait in a collective operation by itself."""
        return self.fault is not None and self.fault.timed_out

    @property
    def well(self) -> bool:
        """Whether the rank has finished its work, or was preempted as requested."""
        return self.finished or self.preempted

    def record(self) -> RankRecord:
        """Return the rank's entry in run.json."""
        return RankRecord(
            rank=self.spec.rank,
            local_rank=self.spec.placement.local_rank,
            node_rank=self.spec.placement.node_rank,
            host=self.started.host if self.started else self.place.hostname,
            pid=self.started.pid if self.started else (self.ended.pid if self.ended else None),
            gpu=self.started.device if self.started and self.started.device != "cpu" else None,
            exit=self.ended.status if self.ended else None,
        )


@dataclass(slots=True)
class AttemptEnd:
    """The result of an attempt: a fault, a signal to the driver, a preemption, a loss of the results, or success.

    signum: the last signal to the driver. notice: why the ranks have to save and end. loss: why the run directory
    cannot be written any more. leaving: a worker is about to end. age_s: the age of the attempt's newest checkpoint at
    the notice, negative if it was saved later; None if there is none. unsaved: checkpoints and files that were not
    saved because a signal ended their transfer. quit: where the user has quit the debugger, as text.
    """

    ranks: Sequence[Rank]
    fault: Fault | None = None
    signum: int | None = None
    notice: str | None = None
    loss: DdptrainError | None = None
    leaving: bool = False
    age_s: float | None = None
    unsaved: str = ""
    quit: str = ""

    @property
    def saved_itself(self) -> bool:
        """Whether ranks ended with exit code 75, which says that they saved their state themselves."""
        return all(rank.well for rank in self.ranks) and any(rank.preempted for rank in self.ranks)

    @property
    def finished(self) -> bool:
        """Whether every rank has reached the end of the workload."""
        return all(rank.finished for rank in self.ranks)
