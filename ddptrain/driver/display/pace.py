"""Rate and time left of one rank, and how numbers and durations are shown."""

from __future__ import annotations

import math

from ddptrain.driver.display import terminal
from ddptrain.protocol.events import Progress

SMOOTHING_S = 5.0  # in the rate, progress has a weight of 1/e after this time


class Pace:
    """Rate and time left, from the progress events of one rank; unknown values are None, never NaN."""

    def __init__(self) -> None:
        self.done: float | None = None
        self.total: float | None = None
        self.unit = ""
        self.rate: float | None = None  # units per second, smoothed
        self._time_ns = 0

    @property
    def fraction(self) -> float | None:
        """Done of total, 0 to 1."""
        if self.done is None or not self.total:
            return None
        return min(max(self.done / self.total, 0.0), 1.0)

    @property
    def shown_unit(self) -> str:
        """The unit, for a terminal."""
        return terminal.harmless(self.unit, False)[:20]

    @property
    def eta_s(self) -> float | None:
        """Seconds until all is done, at the present rate."""
        if self.done is None or self.total is None or not self.rate:
            return None
        return max(self.total - self.done, 0.0) / self.rate

    def update(self, event: Progress) -> None:
        """Add an event. If the progress decreases or changes its unit, a new rate starts."""
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
        """Update the exponential moving average over time, which does not depend on the frequency of events."""
        if elapsed_s <= 0:
            return
        now = done / elapsed_s
        weight = 1.0 - math.exp(-elapsed_s / SMOOTHING_S)
        self.rate = now if self.rate is None else self.rate + weight * (now - self.rate)


def number(value: float) -> str:
    """Return a number that is easy to read: 12,345 or 3.14."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def clock(seconds: float) -> str:
    """Return a duration as 1:05 or 2:00:00."""
    minutes, rest = divmod(int(min(seconds, 360_000_000)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
