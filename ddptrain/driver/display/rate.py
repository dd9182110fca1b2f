"""How fast a rank gets on, and when it will be there."""

from __future__ import annotations

import math

from ddptrain.protocol.events import Progress

SMOOTHING_S = 5.0  # progress of this long ago still counts 1/e in the rate


class Pace:
    """Follows one rank's progress events; unknown figures are None, never NaN."""

    def __init__(self) -> None:
        self.done: float | None = None
        self.total: float | None = None
        self.unit = ""
        self.rate: float | None = None  # units a second, smoothed
        self._time_ns = 0

    @property
    def fraction(self) -> float | None:
        """Done of total, 0 to 1."""
        if self.done is None or not self.total:
            return None
        return min(max(self.done / self.total, 0.0), 1.0)

    @property
    def eta_s(self) -> float | None:
        """Seconds until all is done, at the present rate."""
        if self.done is None or self.total is None or not self.rate:
            return None
        return max(self.total - self.done, 0.0) / self.rate

    def update(self, event: Progress) -> None:
        """Take an event in; progress that goes back, or changes its unit, starts the rate anew."""
        if not math.isfinite(event.done):
            return
        if self.done is None or event.done < self.done or event.unit != self.unit:
            self.rate, self._time_ns = None, event.time_ns
        else:
            self._update_rate(event.done - self.done, (event.time_ns - self._time_ns) / 1e9)
            self._time_ns = max(event.time_ns, self._time_ns)
        self.done, self.unit = event.done, event.unit
        self.total = event.total if event.total and 0 < event.total < math.inf else None

    def _update_rate(self, done: float, elapsed_s: float) -> None:
        """Exponential moving average over time, so that it doesn't depend on how often events come."""
        if elapsed_s <= 0:
            return
        now = done / elapsed_s
        weight = 1.0 - math.exp(-elapsed_s / SMOOTHING_S)
        self.rate = now if self.rate is None else self.rate + weight * (now - self.rate)
