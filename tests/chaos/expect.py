"""The expected result of a case: exit code, root cause, and how many steps may be lost."""

from __future__ import annotations

from dataclasses import dataclass

from tests.chaos.table import STEPS, Case

KILLED = -9  # the command itself
NO_FAILURE = ("validate", "slow")  # a run survives them
_STATUS = {0: "succeeded", 75: "preempted", 130: "cancelled", 143: "cancelled"}
_WORDS = {
    "raise": ("exception", "on purpose"),
    "raise_slow": ("exception", "on purpose"),
    "loader": ("exception", "in the loader"),
    "exit3": ("exit", "sys.exit(3)"),
    "os_exit0": ("exit", "exit code 0 in the middle"),
    "os_exit5": ("exit", "exit code 5 in the middle"),
    "kill": ("signal", "killed by SIGKILL"),
    "segv": ("signal", "killed by SIGSEGV"),
    "abort": ("signal", "killed by SIGABRT"),
    "other_kill": ("signal", "killed by SIGKILL"),
    "early": ("exit", "returned from the workload while"),
    "hang": ("hang", ""),
    "thread": ("hang", "ChaosError: in a thread"),
    "stop": ("hang", "stopped"),
    "other_stop": ("hang", "stopped"),
    "store": ("infrastructure", "store"),
    "server": ("infrastructure", "rank server"),
    "worker": ("worker_lost", ""),
    "scheduler": ("infrastructure", "scheduler"),
    "no_space": ("results", "No space left on device"),
}


@dataclass(frozen=True, slots=True)
class Expected:
    """The expected end of the first command. `ranks` are those that may be named; empty if any may."""

    codes: tuple[int, ...]
    kind: str = ""
    words: str = ""
    ranks: tuple[int, ...] = ()
    attempts: int = 1

    @property
    def fails(self) -> bool:
        """Whether there must be a root cause."""
        return bool(self.kind)


def status_of(code: int) -> str:
    """The expected status in run.json for an exit code."""
    return _STATUS.get(code, "failed")


def expected(case: Case) -> Expected:
    """The expected end of a case."""
    fault = case.kind.fault
    if fault.startswith("driver_"):
        return _of_driver(case)
    if fault in ("term", "worker_term"):
        return Expected((75,))
    if fault in NO_FAILURE:
        return Expected((0,))
    kind, words = _WORDS[fault]
    ranks = (1 - int(case.kind.victim),) if fault.startswith("other_") else tuple(case.ranks)
    code = {"hang": 5, "infrastructure": 4, "worker_lost": 4, "results": 4}.get(kind, 1)
    if code == 4 and kind != "results":
        ranks = ()
    if case.kind.restart and kind != "results":  # the disk would be full again
        return Expected((0,), kind, words, ranks, attempts=2)
    return Expected((code,), kind, words, ranks)


def _of_driver(case: Case) -> Expected:
    fault, moment = case.kind.fault, case.kind.moment
    if fault == "driver_kill":
        return Expected((KILLED,))
    if fault == "driver_stop":  # for two seconds, which must not count as a failure
        return Expected((0,))
    if fault == "driver_term" and moment == "start":  # it may arrive early, or warm ranks train
        return Expected((143, -15, 75))
    if fault == "driver_term" and moment not in ("import", "rendezvous"):
        return Expected((0, 75) if moment == "end" else (75,))
    # The run may be faster than a signal at its end. During the last checkpoint, writing it completes the work.
    done = moment == "end" or (moment == "write" and case.share * case.saves > case.saves - 1)
    code = 130 if fault == "driver_int" else 143
    return Expected((code, 0) if done else (code,))


def least_step(case: Case) -> int:
    """The lowest step from which the run may resume: at most one interval is lost."""
    moment = case.kind.moment
    if moment == "end":
        return STEPS - (case.interval if _may_be_on_its_way(case) else 0)
    if moment == "write":
        if case.kind.fault in ("raise", "exit3"):  # rank 0 may be one checkpoint behind rank 1, which never waits
            return case.step - (case.interval if case.kind.victim == "1" else 0)
        return int(case.share * case.saves) * case.interval  # the checkpoints that were written before
    if moment not in ("first", "mid"):
        return 0
    due = (case.step - 1) // case.interval * case.interval
    return max(0, due - (case.interval if _may_be_on_its_way(case) else 0))


def _may_be_on_its_way(case: Case) -> bool:
    """Whether the last checkpoint may still be being written or downloaded when the fault occurs."""
    return case.settle_s == 0
