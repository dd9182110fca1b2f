"""The program of a rank that measures the cluster, run as a module. The argument is the ProbePlan as JSON.

It creates no default process group: each measurement has a separate group, so that a host that can't be reached affects
only its own measurements. Each result is a line in the log, which the driver can read even if the rank hangs.
"""

from __future__ import annotations

import datetime as dt
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from ddptrain.errors import one_line
from ddptrain.protocol.cluster_check import WAITED, ProbeLine, ProbePlan
from ddptrain.rank.cluster_check.measure import Group, copy_gb_s, gemm_gflops

_GIVE_UP_AFTER = 2  # failed pairs of a host without a successful one
_STORE_S = 10.0
_LEAVE_S = 1.0


class Probe:
    """The measurements of one rank, in the order of the plan."""

    def __init__(self, plan: ProbePlan) -> None:
        self.plan = plan
        env = os.environ
        self.rank, self.size = int(env["RANK"]), int(env["WORLD_SIZE"])
        self.local_rank, self.local_size = int(env["LOCAL_RANK"]), int(env["LOCAL_WORLD_SIZE"])
        self.node = int(env["GROUP_RANK"])
        self.nodes = int(env["GROUP_WORLD_SIZE"])
        self.device = torch.device("cuda", self.local_rank) if plan.gpu else torch.device("cpu")
        self.failed = self.succeeded = 0  # pairs

    def run(self) -> None:
        """Measure everything. Raises RuntimeError if the store of rank 0 can't be reached."""
        _write_line(ProbeLine("start", "begun"))
        if self.plan.gpu:
            torch.cuda.set_device(self.device)
        if not self.plan.only:
            self._alone()
        store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            self.size,
            is_master=False,
            timeout=dt.timedelta(seconds=_STORE_S),
            wait_for_workers=False,
        )
        store.set(f"size/{self.node}", str(self.local_size))
        if not self.plan.only:
            self._inside(store)
        if self.plan.only != "all":
            self._pairs(store)
        if self.plan.only != "pairs":
            self._all(store)
        # The store ends with rank 0. After the all-reduce of all ranks, all end at about the same time.
        pairs_s = self.plan.timeout_s * len(self.plan.rounds) if self.plan.only == "pairs" else 0.0
        _leave(store, self.size, _LEAVE_S + pairs_s)
        _write_line(ProbeLine("end", "done"))

    def _alone(self) -> None:
        _run_stage("gemm", -1, lambda: {"gflops": gemm_gflops(self.device, self.plan.gemm_s)}, self._throttled)
        if self.plan.gpu:
            _run_stage("copy", -1, lambda: {"gb_s": copy_gb_s(self.device, self.plan.copy_s)})

    def _throttled(self) -> str:
        """Return the reasons why the GPU has reduced its clocks, as text; "" without a GPU or a reason."""
        if not self.plan.gpu:
            return ""
        from ddptrain.nvml import throttle_reasons_of

        names = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        return ", ".join(throttle_reasons_of(names[self.device.index or 0]))

    def _inside(self, store: Store) -> None:
        if self.local_size > 1:
            name, rank, size = f"local/{self.node}", self.local_rank, self.local_size
            _run_stage("local", -1, lambda: self._reduced(store, name, rank, size, nccl=self.plan.gpu))

    def _pairs(self, store: Store) -> None:
        nccl = self.plan.nccl_pairs
        if self.local_rank and not nccl:
            return
        for number, pairs in enumerate(self.plan.rounds):
            for first, second in pairs:
                if self.node in (first, second):
                    self._pair(store, number, first, second, nccl=nccl)

    def _pair(self, store: Store, number: int, first: int, second: int, *, nccl: bool) -> None:
        is_second = self.node == second
        peer = first if is_second else second
        if not self.succeeded and self.failed >= _GIVE_UP_AFTER:
            store.set(f"out/{self.node}", "1")
            _write_line(ProbeLine("pair", "skipped", peer, text="this host could not reach the hosts before"))
            return
        if store.check([f"out/{peer}"]):
            _write_line(ProbeLine("pair", "skipped", peer, text="the other host could not reach anyone"))
            return
        name = f"pair/{number}/{first}-{second}"
        if nccl:
            before = int(store.get(f"size/{first}"))
            rank = self.local_rank + (before if is_second else 0)
            size = before + int(store.get(f"size/{second}"))
        else:
            rank, size = int(is_second), 2
        if _run_stage("pair", peer, lambda: self._reduced(store, name, rank, size, nccl=nccl)):
            self.succeeded += 1
        else:
            self.failed += 1

    def _all(self, store: Store) -> None:
        if self.nodes == 1:
            return
        if self.failed and not self.succeeded:
            store.set("no-all", "1")
        # No rank waits for hosts that could not reach any other host.
        store.add("ready", 1)
        deadline = time.monotonic() + self.plan.timeout_s
        while store.add("ready", 0) < self.size and not store.check(["no-all"]):
            if time.monotonic() > deadline:
                _write_line(ProbeLine("all", "failed", text="not all ranks came this far"))
                return
            time.sleep(0.01)
        if store.check(["no-all"]):
            _write_line(ProbeLine("all", "skipped", text="a host could not reach any other"))
            return
        _run_stage("all", -1, lambda: self._reduced(store, "all", self.rank, self.size, nccl=self.plan.gpu))

    def _reduced(self, store: Store, name: str, rank: int, size: int, *, nccl: bool) -> dict[str, float]:
        group = Group(store, name, rank, size, self.plan.timeout_s, self.device, nccl=nccl)
        values = group.measure(self.plan.reduce_s, self.plan.most_bytes)
        group.close()
        return values


def _run_stage(
    stage: str, peer: int, measure: Callable[[], dict[str, float]], remark: Callable[[], str] = lambda: ""
) -> bool:
    """Run a measurement and write its result or its error. Return whether it succeeded."""
    _write_line(ProbeLine(stage, "begun", peer))
    before, began = _core_waits_s(), time.monotonic()
    try:
        values = measure()
        waited_s = max((waited - before.get(thread, 0.0) for thread, waited in _core_waits_s().items()), default=0.0)
        values = {**values, WAITED: min(1.0, waited_s / (time.monotonic() - began))}
        text = remark()
    except Exception as error:  # torch, CUDA and NCCL raise many types; the check names the error
        _write_line(ProbeLine(stage, "failed", peer, text=one_line(error)))
        return False
    _write_line(ProbeLine(stage, "done", peer, values, text))
    return True


def _core_waits_s() -> dict[str, float]:
    """Return how many seconds each thread was ready but had no core; {} if the system does not know (not Linux)."""
    waits_s = {}
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, ValueError, IndexError):  # the thread has ended
            waits_s[path.parent.name] = int(path.read_text().split()[1]) / 1e9
    return waits_s


def _leave(store: Store, size: int, wait_s: float) -> None:
    """Tell the store that this rank is done, and wait for the other ranks, which may still use a connection."""
    store.add("left", 1)
    deadline = time.monotonic() + wait_s
    while store.add("left", 0) < size and time.monotonic() < deadline:
        time.sleep(0.01)


def _write_line(line: ProbeLine) -> None:
    os.write(1, line.line().encode())


if __name__ == "__main__":
    Probe(ProbePlan.from_json(sys.argv[1])).run()
    os._exit(0)  # destructors of communicators may wait for a peer that has failed
