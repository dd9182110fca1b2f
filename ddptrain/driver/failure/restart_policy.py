"""Decides whether another attempt follows, from two budgets and the kind of the failure."""

from __future__ import annotations

from dataclasses import dataclass

from ddptrain.config.run_config import FailureConfig
from ddptrain.driver.failure.fault import LOSSES, Fault, FaultKind
from ddptrain.driver.ranks import AttemptEnd

_MAX_BACKOFF_S = 60.0
# Another attempt would end the same way.
_FINAL = frozenset({FaultKind.REFUSED, FaultKind.RESULTS})


@dataclass(frozen=True, slots=True)
class Restart:
    """Another attempt follows after `pause_s`; `count` is text such as "restart 1 of 3"."""

    pause_s: float
    count: str


@dataclass(frozen=True, slots=True)
class NoRestart:
    """No other attempt follows, for `reason`; "" if the user needs no reason."""

    reason: str = ""


class RestartPolicy:
    """Counts the attempts of one command against failure.max_restarts and failure.max_losses."""

    def __init__(self, settings: FailureConfig) -> None:
        self.settings = settings
        self._restarts = self._losses = 0
        self._before: tuple[str, str, int | None] | None = None  # line, traceback and step of the last failure

    def after(self, end: AttemptEnd, step: int | None, *, scheduler_is_there: bool) -> Restart | NoRestart:
        """Return what follows an attempt; `step` is the last step that the failed rank logged."""
        if end.signum is not None or end.loss is not None or (end.fault is None and end.notice is None):
            return NoRestart()
        if self._exhausted(lost := _lost(end)):
            return NoRestart()
        if not scheduler_is_there:
            return NoRestart("the Dask scheduler has ended")
        if end.fault is not None and not lost:
            if reason := self._useless(end.fault, step):
                return NoRestart(reason)
            if not any(rank.spec.code.is_script for rank in end.ranks):  # the progress of a script is not known
                self._before = (end.fault.line, end.fault.traceback, step)
        return self._again(lost)

    def _exhausted(self, lost: bool) -> bool:
        left = self.settings.max_restarts - self._restarts
        return left <= 0 and not (lost and self._losses < self.settings.max_losses)

    def _useless(self, fault: Fault, step: int | None) -> str:
        if fault.kind in _FINAL:
            return "a restart would fail in the same way"
        if named := _named(fault, self.settings.no_restart):
            return f"failure.no_restart names {named}"
        same = (fault.line, fault.traceback, step) == self._before
        return "the same failure at the same step twice in a row is a mistake in the code" if same else ""

    def _again(self, lost: bool) -> Restart:
        settings = self.settings
        pause_s = min(_MAX_BACKOFF_S, settings.backoff_s * 2 ** min(32, self._restarts + self._losses))
        if lost and self._losses < settings.max_losses:
            self._losses += 1
            return Restart(pause_s, f"loss {self._losses} of {settings.max_losses}")
        self._restarts += 1
        return Restart(pause_s, f"restart {self._restarts} of {settings.max_restarts}")


def _lost(end: AttemptEnd) -> bool:
    """Return whether the reason is a lost or preempted host or worker, and not the training code."""
    return end.notice is not None or (end.fault is not None and end.fault.kind in LOSSES)


def _named(fault: Fault, no_restart: list[str | int]) -> str:
    """Return the item of the list that matches the failure: an exit code, or an exception type; "" if none does."""
    names = {fault.type, fault.type.rpartition(".")[2]} - {"", "SystemExit"}
    for item in no_restart:
        if item == fault.status or (isinstance(item, str) and item.rpartition(".")[2] in names):
            return str(item)
    return ""
