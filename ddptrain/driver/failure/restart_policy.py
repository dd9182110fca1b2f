"""Whether ranks are started again after an attempt: two budgets, and the failures that another attempt can't help."""

from __future__ import annotations

from dataclasses import dataclass

from ddptrain.config.models import FailureConfig
from ddptrain.driver.failure.fault import Fault, Kind
from ddptrain.driver.rank_state import Outcome

_LONGEST_BACKOFF_S = 60.0
# Another attempt would end the same way.
_FINAL = frozenset({Kind.REFUSED, Kind.RESULTS})
_LOSSES = frozenset({Kind.WORKER_LOST, Kind.INFRASTRUCTURE})


@dataclass(frozen=True, slots=True)
class Again:
    """Another attempt follows after `pause_s`; `count` says in words how many there may be."""

    pause_s: float
    count: str


@dataclass(frozen=True, slots=True)
class Enough:
    """No other attempt follows; `reason` is for the person, "" where there is nothing to say."""

    reason: str = ""


class Restarts:
    """Counts the attempts of one command against failure.max_restarts and failure.max_losses."""

    def __init__(self, settings: FailureConfig) -> None:
        self.settings = settings
        self._restarts = self._losses = 0
        self._before: tuple[Fault, int | None] | None = None

    def after(self, outcome: Outcome, step: int | None, *, scheduler_is_there: bool) -> Again | Enough:
        """What follows an attempt; `step` is the last one that the failed rank had logged."""
        if outcome.signum is not None or outcome.loss is not None or (outcome.fault is None and outcome.notice is None):
            return Enough()
        if self._exhausted(lost := _lost(outcome)):
            return Enough()
        if not scheduler_is_there:
            return Enough("the Dask scheduler is gone")
        if outcome.fault is not None and not lost:
            if reason := self._useless(outcome.fault, step):
                return Enough(reason)
            self._before = (outcome.fault, step)
        return self._again(lost)

    def _exhausted(self, lost: bool) -> bool:
        left = self.settings.max_restarts - self._restarts
        return left <= 0 and not (lost and self._losses < self.settings.max_losses)

    def _useless(self, fault: Fault, step: int | None) -> str:
        if fault.kind in _FINAL:
            return "what has failed does not go away by itself"
        if named := _named(fault, self.settings.no_restart):
            return f"failure.no_restart names {named}"
        if self._before is None:
            return ""
        before, step_before = self._before
        same = (fault.line, fault.traceback, step) == (before.line, before.traceback, step_before)
        return "the same failure at the same step twice in a row is a mistake in the code" if same else ""

    def _again(self, lost: bool) -> Again:
        settings = self.settings
        pause_s = min(_LONGEST_BACKOFF_S, settings.backoff_s * 2 ** min(32, self._restarts + self._losses))
        if lost and self._losses < settings.max_losses:
            self._losses += 1
            return Again(pause_s, f"loss {self._losses} of {settings.max_losses}")
        self._restarts += 1
        return Again(pause_s, f"restart {self._restarts} of {settings.max_restarts}")


def _lost(outcome: Outcome) -> bool:
    """Whether the place was lost, or told to go, and not the training's own doing."""
    return outcome.notice is not None or (outcome.fault is not None and outcome.fault.kind in _LOSSES)


def _named(fault: Fault, no_restart: list[str | int]) -> str:
    """What of the list names this failure: its exit code, or its exception's type with or without modules."""
    found = {fault.type, fault.type.rpartition(".")[2]} - {"", "SystemExit"}
    for item in no_restart:
        if item == fault.status or (isinstance(item, str) and item.rpartition(".")[2] in found):
            return str(item)
    return ""
