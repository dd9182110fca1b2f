"""The slots that a run requests, and its wait for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ddptrain.clusters import lifecycle
from ddptrain.clusters.scheduler import slots
from ddptrain.config.run_config import RunConfig
from ddptrain.config.sections.clusters import RankRange
from ddptrain.config.wording import counted
from ddptrain.errors import ClusterError
from ddptrain.results.run_record import HolderRecord, QueueRecord

_QUIET_S = 1.0  # a shorter wait is not shown


@dataclass(frozen=True, slots=True)
class SlotRequest:
    """The slots that a run requests, and how long it waits for them.

    ranks: None requests every slot. start_timeout_s: for workers to appear. wait_s: for slots that other runs hold; 0:
    do not wait. priority: among the runs that wait. least: so many slots are enough once `gather_s` have passed.
    """

    ranks: int | None
    gpus_only: bool
    start_timeout_s: float
    wait_s: float
    priority: int = 0
    least: int | None = None
    gather_s: float = 0.0


def request_for(config: RunConfig, of_machine: int | None) -> SlotRequest:
    """Return the slots that a run with this configuration requests; `of_machine`: those of an embedded cluster."""
    cluster = config.cluster
    if of_machine is not None:
        return SlotRequest(of_machine, False, cluster.start_timeout_s, cluster.wait_s, cluster.priority)
    most = cluster.ranks.max if isinstance(cluster.ranks, RankRange) else cluster.ranks
    ranks = None if most == "auto" else most
    gpus = 0 if cluster.gpus == "auto" else int(cluster.gpus)
    least = cluster.ranks.min if isinstance(cluster.ranks, RankRange) else None
    gather_s = config.failure.lost_after_s / 2 if least is not None else 0.0
    times = cluster.start_timeout_s, cluster.wait_s
    return SlotRequest(ranks or gpus or None, gpus > 0, *times, cluster.priority, least, gather_s)


@dataclass(frozen=True, slots=True)
class WaitHooks:
    """The functions that are called while a run waits for its slots.

    check: raises ClusterError if foreign workers with these addresses, or the scheduler, cannot run this. worker_fault:
    why a worker will never appear, or None. last_words: the last log lines of failed workers. tell: shows the status.
    cluster: the name of a cluster that the user started, or "". fixed: it has all its slots once a worker is there.
    queued: called with the place in the queue whenever it has changed.
    """

    tell: Callable[[str], None]
    queued: Callable[[QueueRecord], None] = lambda _: None
    check: Callable[[Sequence[str]], None] | None = None
    worker_fault: Callable[[], str | None] = lambda: None
    last_words: Callable[[], str] = lambda: ""
    cluster: str = ""
    fixed: bool = False


class SlotQueue:
    """Waits for slots: shows the reason, and ends the wait at the time limit."""

    def __init__(self, request: SlotRequest, hooks: WaitHooks) -> None:
        self.request, self.hooks = request, hooks
        self.started = time.monotonic()
        self.shown = ""

    def wait(self, refusal: slots.Refusal) -> int | None:
        """Wait for a short time after a refusal; return how many slots to request next (None: all).

        Raises ClusterError if the wait is over, or if it cannot succeed.
        """
        if (fault := self.hooks.worker_fault()) is not None:
            raise ClusterError(fault)
        if self.hooks.fixed and not refusal.of_any_kind and (ended := lifecycle.ended_process(self.hooks.cluster)):
            raise ClusterError(self._ended(refusal, ended))
        waited_s = time.monotonic() - self.started
        least = self.request.least
        if least is not None and waited_s >= self.request.gather_s and refusal.free >= least:
            offer = min(refusal.free, self.request.ranks or refusal.free)
            if offer != refusal.asked:  # else it was refused: other runs are first
                return offer
        enough = refusal.total >= (least or refusal.asked)
        patience_s = self.request.wait_s if enough else self.request.start_timeout_s
        hopeless = self.hooks.fixed and max(refusal.total, refusal.of_any_kind) > 0 and not enough
        if hopeless or waited_s >= max(patience_s, self.request.gather_s):
            raise ClusterError(self._held(refusal, waited_s) if enough else self._shortage(refusal, waited_s))
        if waited_s > _QUIET_S:
            self._tell(refusal, enough=enough)
        time.sleep(0.01 if waited_s < 5.0 else 0.2)
        return self.request.ranks

    def _tell(self, refusal: slots.Refusal, *, enough: bool) -> None:
        queued = _queued(refusal)
        if enough:
            text = f"waiting for {counted(refusal.asked, 'slot')}, {refusal.free} of {refusal.total} are free"
            text += f": {queued.description}" if queued.description else ""
        else:
            text = f"waiting for workers: {refusal.total} of {refusal.asked} slots are there"
        if text != self.shown:
            self.shown = text
            self.hooks.tell(text)
            if enough:
                self.hooks.queued(queued)

    def _shortage(self, refusal: slots.Refusal, waited_s: float) -> str:
        kind = "slot{} with a GPU" if self.request.gpus_only else "slot{}"
        hosts = ", ".join(f"{count} on {host}" for host, count in refusal.hosts.items())
        sources = f" ({hosts})" if hosts else ""
        name = self.hooks.cluster
        joined = f"only {refusal.total}" if refusal.total else "none"
        available = f"{joined} joined within {waited_s:.0f} s{sources}"
        if self.hooks.fixed and refusal.total:
            available = f"the cluster {name} has only {refusal.total}{sources}"
        elif self.hooks.fixed and refusal.of_any_kind:
            available = f"the cluster {name} has none: there is no GPU in its {counted(refusal.of_any_kind, 'slot')}"
        text = f"{_needed(refusal.asked, kind)}, but {available}. "
        if self.request.gpus_only and not refusal.total and refusal.of_any_kind:
            return f"{text}Use a cluster with GPUs, or train on the CPU with cluster.gpus: 0"
        words = self.hooks.last_words()
        more = f"start it anew with more: {_again(name, refusal.asked)}" if name else "start more workers"
        advice = f"Ask for fewer with --ranks, or {more}" if refusal.total else f"{more[0].upper()}{more[1:]}"
        return f"{text}{advice}" + (f"\n{words}" if words else "")

    def _ended(self, refusal: slots.Refusal, ended: str) -> str:
        name, words = self.hooks.cluster, self.hooks.last_words()
        start = f"start it again: {_again(name, self.request.ranks)}"
        text = f"{_needed(refusal.asked)}, but {ended}, and with it the cluster {name} has none; {start}"
        return text + (f"\n{words}" if words else "")

    def _held(self, refusal: slots.Refusal, waited_s: float) -> str:
        ahead = ", and others wait for them" if refusal.free >= refusal.asked else ""
        wait = "Wait longer" if self.request.wait_s else "Wait in line"
        holders = replace(_queued(refusal), place=0).description
        held = f", {holders}" if holders else ""
        return (
            f"{_needed(refusal.asked)}, but {refusal.free} of {refusal.total} are free after {waited_s:.0f} s"
            f"{held}{ahead}. {wait} with --wait (cluster.wait_s), or ask for fewer with --ranks"
        )


def _again(name: str, ranks: int | None) -> str:
    return f"ddptrain cluster down {name}, then ddptrain cluster up --name {name} --ranks {ranks or 'N'}"


def _needed(number: int, kind: str = "slot{}") -> str:
    return f"1 {kind.format('')} is needed" if number == 1 else f"{number} {kind.format('s')} are needed"


def _queued(refusal: slots.Refusal) -> QueueRecord:
    return QueueRecord(refusal.asked, refusal.place, tuple(HolderRecord(*holder) for holder in refusal.holders))
