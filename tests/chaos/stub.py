"""The workload of all cases, copied next to the configuration: trains for some steps, and fails as fault.json says.

It uses nothing of ddptrain but its context. A fault happens once a rank, in whatever attempt: `fired-R` holds when.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

RANK = int(os.environ["RANK"])
EPOCHS, STEPS_PER_EPOCH = 4, 3
SIGNALS = {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "abort": signal.SIGABRT, "stop": signal.SIGSTOP}


class ChaosError(Exception):
    """The error that ranks raise."""


def _plan() -> dict[str, Any]:
    try:
        plan: dict[str, Any] = json.loads(Path("fault.json").read_text())
    except FileNotFoundError:
        return {"fault": "", "moment": "", "ranks": []}
    return plan


PLAN = _plan()
MINE = RANK in PLAN["ranks"]


# --- what happens ---


def settle() -> None:
    """Wait until the checkpoint from which the run must be able to resume is in the run directory."""
    time.sleep(PLAN["settle_s"])
    deadline = time.monotonic() + 90  # if it never arrives, the run resumes from a step that is too early
    while PLAN["settle_s"] and _step_at_home() < PLAN["home"] and time.monotonic() < deadline:
        time.sleep(0.02)


def _step_at_home() -> int:
    """The step of the newest checkpoint in the run directory."""
    found = Path().glob("runs/*/checkpoints/step-*/checkpoint.json")
    return max((int(path.parent.name[len("step-") :]) for path in found), default=0)


def strike() -> None:
    """The fault, if it has not happened yet."""
    try:
        with Path(f"fired-{RANK}").open("x") as file:
            file.write(str(time.time_ns()))
    except FileExistsError:
        return
    fault = PLAN["fault"]
    print(f"striking: {fault}", flush=True)
    if fault in ("raise", "raise_slow"):
        raise ChaosError("on purpose")
    if fault == "exit3":
        sys.exit(3)
    if fault in ("os_exit0", "os_exit5"):
        os._exit(int(fault[-1]))
    if fault == "loader":
        next(iter(torch.utils.data.DataLoader(Broken(), num_workers=1)))
    if fault == "thread":
        thread = threading.Thread(target=_fail, name="feeder")
        thread.start()
        thread.join()
    if fault == "validate":
        _work(PLAN["quiet_s"])
        return
    if fault == "slow":
        return
    if fault in ("hang", "thread"):
        time.sleep(10_000)
    _send(fault)


def _work(seconds: float) -> None:
    """Keep the CPU busy without output, like a validation."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        torch.ones(64, 64) @ torch.ones(64, 64)


def _send(fault: str) -> None:
    """Faults that are signals, to this process or another."""
    if fault == "segv":
        ctypes.string_at(0)
    if fault in SIGNALS:
        os.kill(os.getpid(), SIGNALS[fault])
    if fault == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    if fault in ("server", "worker", "store"):
        pids = {"server": os.getppid, "worker": lambda: _parent(os.getppid()), "store": _store}
        os.kill(pids[fault](), signal.SIGKILL)
    if fault == "scheduler":
        os.kill(int(Path("scheduler.pid").read_text()), signal.SIGKILL)
    if fault == "worker_term":
        os.kill(_parent(os.getppid()), signal.SIGTERM)
    if fault.startswith("driver_"):
        _to_driver(int(Path("driver.pid").read_text()), fault[len("driver_") :])
    if fault.startswith("other_"):  # another rank fails while this one writes
        os.kill(int(Path(f"rank-{1 - RANK}.pid").read_text()), SIGNALS[fault[len("other_") :]])
    time.sleep(0.5)  # the driver notices the signal before the training ends


def _to_driver(pid: int, what: str) -> None:
    numbers = {"kill": signal.SIGKILL, "int": signal.SIGINT, "stop": signal.SIGSTOP}
    os.kill(pid, numbers.get(what, signal.SIGTERM))
    if what == "twice":
        time.sleep(0.1)
        os.kill(pid, signal.SIGTERM)
        time.sleep(2.0)
    if what == "stop":
        time.sleep(2.0)
        os.kill(pid, signal.SIGCONT)


def _fail() -> None:
    raise ChaosError("in a thread")


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _store() -> int:
    """The process of the worker group's store, a child of the rank server."""
    server = os.getppid()
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    return next(int(pid) for pid in children if Path(f"/proc/{pid}/comm").read_text() == "ddptrain-store\n")


class Broken(torch.utils.data.Dataset[int]):
    """A dataset that fails in the DataLoader worker."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        raise ChaosError("in the loader")


class Writes:
    """Replaces os.write: causes the fault at a certain byte of a checkpoint's files."""

    def __init__(self, after_bytes: int) -> None:
        self.real, self.left = os.write, after_bytes
        self.struck = False

    def __call__(self, fd: int, data: Any) -> int:
        if self.struck or "/checkpoint-" not in os.readlink(f"/proc/self/fd/{fd}"):
            return self.real(fd, data)
        view = memoryview(data)
        if len(view) <= self.left:
            written = self.real(fd, view)
            self.left -= written
            return written
        self.struck = True
        written = self.real(fd, view[: self.left])
        in_main_thread = PLAN["fault"] in ("raise", "exit3")  # the main thread fails while this one waits
        if in_main_thread:
            time.sleep(PLAN["settle_s"])
        else:
            settle()
        if PLAN["fault"] == "no_space":
            Path(f"fired-{RANK}").write_text(str(time.time_ns()))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if not in_main_thread:
            strike()
        return written


# --- when ---


def _at_import() -> None:
    """Faults before the function is called."""
    moment = PLAN["moment"]
    if moment == "write" and (RANK == 0 or MINE) and not Path(f"fired-{RANK}").exists():
        os.write = Writes(PLAN["byte"])
    if moment == "import" and MINE:
        settle()
        strike()
    if moment == "rendezvous":
        if MINE:
            threading.Timer(PLAN["settle_s"], strike).start()
        elif not Path(f"fired-{1 - RANK}").exists():
            time.sleep(0.9)


def _at_step(step: int) -> bool:
    """Faults during training. Returns whether the function must return at once."""
    if MINE and PLAN["fault"] == "slow" and step >= PLAN["step"]:
        time.sleep(0.1)
    if MINE and PLAN["moment"] in ("first", "mid") and step == PLAN["step"]:
        settle()
        if PLAN["fault"] == "early" and not Path(f"fired-{RANK}").exists():
            Path(f"fired-{RANK}").write_text(str(time.time_ns()))
            return True
        strike()
    return False


def steps(ctx: Any, pause_s: float = 0.02, *, sharded: bool = False) -> None:
    """Twelve steps on random data, with a checkpoint after every third. Bit-equal after any number of interruptions.

    If `sharded`, the ranks share the model (FSDP2), and each rank writes its part of a checkpoint.
    """
    Path(f"rank-{RANK}.pid").write_text(str(os.getpid()))
    torch.manual_seed(7 + ctx.rank)
    layers = (torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
    model = torch.nn.Sequential(*layers)
    for number, parameter in enumerate(model.parameters()):
        torch.nn.init.constant_(parameter, 0.01 * (number + 1))
    prepared = ctx.prepare(model, strategy="fsdp") if sharded else torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(prepared.parameters())
    resumed = ctx.resume(model=prepared, optimizer=optimizer)
    first = resumed.step + 1 if resumed else 1
    print("attempt", ctx.attempt, "begins with step", first, flush=True)
    try:
        _train(ctx, prepared, optimizer, first, pause_s)
    finally:
        if PLAN["fault"] == "raise_slow" and MINE:
            time.sleep(1.0)
    if PLAN["moment"] == "end" and MINE:
        settle()
        strike()


def _train(ctx: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, pause_s: float) -> None:
    last = EPOCHS * STEPS_PER_EPOCH
    for step in range(first, last + 1):
        if _at_step(step):
            return
        optimizer.zero_grad()
        loss = model(torch.rand(8, 64) + ctx.rank).pow(2).mean()  # equal weights require restored random states
        loss.backward()
        optimizer.step()
        ctx.log({"train/loss": loss.detach()}, step=step, epoch=step / STEPS_PER_EPOCH)
        ctx.progress(step, last)
        saved = ctx.checkpoint(model=model, optimizer=optimizer, step=step, epoch=step / STEPS_PER_EPOCH, metrics={})
        if (
            saved
            and MINE
            and PLAN["moment"] == "write"
            and PLAN["fault"] in ("raise", "exit3")
            and step == PLAN["step"]
        ):
            strike()
        time.sleep(pause_s)


_at_import()
