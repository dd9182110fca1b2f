"""Summarizes the steps of about one second, so that the driver can compare ranks without a message for each step."""

from __future__ import annotations

from collections.abc import Sequence

WINDOW_S = 1.0
_WARM_UP_STEPS = 3  # the first steps of a rank allocate memory and compile
_CUT = 10  # one of 10 steps is left out, the longest ones: rank 0 sometimes does additional work in a step


class StepWindow:
    """Collects steps. Times are in seconds."""

    def __init__(self) -> None:
        self._own: list[float] = []
        self._waited = 0.0
        self._began: float | None = None
        self._skipped = 0

    def add(self, own_s: float, waited_s: float, now: float) -> tuple[int, float, float] | None:
        """Add a step that ended at `now`.

        Return (steps, own time per step, wait per step) of a complete window, or None.
        """
        if self._skipped < _WARM_UP_STEPS:
            self._skipped += 1
            return None
        if self._began is None:
            self._began = now - own_s - waited_s
        self._own.append(own_s)
        self._waited += waited_s
        if now - self._began < WINDOW_S:
            return None
        count = len(self._own)
        window = count, cut_mean(self._own), self._waited / count
        self._own, self._waited, self._began = [], 0.0, now
        return window


def cut_mean(values: Sequence[float]) -> float:
    """Return the mean without the largest tenth of the values; with fewer than ten values, the mean of all."""
    kept = sorted(values)[: len(values) - len(values) // _CUT]
    return sum(kept) / len(kept)
