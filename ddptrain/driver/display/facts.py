"""How far a run is, as short texts: epoch, step, metrics, best checkpoint, rate and time left."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from ddptrain.config.wording import counted
from ddptrain.driver.display.terminal import harmless
from ddptrain.protocol.events import Metrics, Progress
from ddptrain.results.metrics import finite_number
from ddptrain.text_tables import duration

MOST_METRICS = 4
SMOOTHING_S = 5.0  # in the rate, progress has a weight of 1/e after this time
_DEFAULT_METRIC = "val/loss"


class Pace:
    """Rate and time left, from the progress events of one rank; unknown values are None, never NaN."""

    def __init__(self, unit: str = "") -> None:
        self.done: float | None = None
        self.total: float | None = None
        self.unit = unit
        self.last_change = 0.0  # of `done`
        self.rate: float | None = None  # units per second: an exponential moving average over time
        self._time_ns = 0

    @property
    def fraction(self) -> float | None:
        """Done of total, 0 to 1."""
        return min(max(self.done / self.total, 0.0), 1.0) if self.done is not None and self.total else None

    @property
    def eta_s(self) -> float | None:
        """Seconds until all is done, at the present rate."""
        if self.done is None or self.total is None or not self.rate:
            return None
        return max(self.total - self.done, 0.0) / self.rate

    @property
    def rate_text(self) -> str:
        """The rate, as "41 steps/s"; "" if it is not known."""
        return "" if self.rate is None else f"{number(self.rate)} {harmless(self.unit)[:20]}/s"

    def update(self, event: Progress) -> None:
        """Add an event. If the progress decreases or changes its unit, a new rate starts."""
        if not math.isfinite(event.done):
            return
        if self.done is None or event.done < self.done or event.unit != self.unit:
            self.rate, self._time_ns = None, event.time_ns
        else:
            self.last_change, elapsed_s = event.done - self.done, (event.time_ns - self._time_ns) / 1e9
            if elapsed_s > 0:  # the weight does not depend on the frequency of events
                now, weight = self.last_change / elapsed_s, 1.0 - math.exp(-elapsed_s / SMOOTHING_S)
                self.rate = now if self.rate is None else self.rate + weight * (now - self.rate)
            self._time_ns = max(event.time_ns, self._time_ns)
        self.done, self.unit = event.done, event.unit
        self.total = event.total if event.total and 0 < event.total < math.inf else None


class RunFacts:
    """How far rank 0 is, which stands for the run."""

    def __init__(self) -> None:
        self._epochs: int | None = None
        self._starts = 0
        self._saved: tuple[int, float] | None = None  # the step of the newest checkpoint, and its Unix time
        self._best: tuple[str, float, int] | None = None  # metric, value and step of the best checkpoint
        self._forget()

    def _forget(self) -> None:
        self.epoch: int | None = None  # of the newest metrics
        self._begun: int | None = None  # the epoch that the loop over ctx.epochs is in
        self._step: int | None = None
        self._values: dict[str, float] = {}
        self._reported, self._by_step, self._by_epoch = Pace(), Pace(), Pace()

    def event(self, line: Mapping[str, Any]) -> None:
        """Update the facts after a line of events.jsonl, which another program may have written."""
        match line:
            case {"event": "rank_started", "rank": 0}:
                self._starts += 1
                self._forget()
            case {"event": "epochs", "total": int(total)}:
                begun = line.get("epoch")  # earlier versions have only the total
                self._epochs, self._begun = total, begun if isinstance(begun, int) else None
            case {"event": "checkpoint_saved", "step": int(step)}:
                at = finite_number(line.get("time_s"))
                self._saved = step, time.time() if at is None else at
                match line.get("best"):
                    case {"metric": str(metric), "value": float(value), "step": int(best_step)}:
                        self._best = metric, value, best_step

    def begins_epoch(self, event: object) -> bool:
        """Whether a number of rank 0, which is not handled yet, is the first one about a later epoch."""
        return isinstance(event, Metrics) and self.epoch is not None and (self._epoch_of(event) or 0) > self.epoch

    def number(self, event: object) -> None:
        """Update the facts after a number of rank 0."""
        match event:
            case Metrics():
                self._values |= event.values
                if event.step is not None:
                    self._step = event.step
                    self._by_step.update(Progress(event.time_ns, event.step))
                if (epoch := self._epoch_of(event)) is not None:
                    self.epoch = epoch
                    if event.epoch is not None:
                        self._by_epoch.update(Progress(event.time_ns, event.epoch, self._epochs, "epochs"))
            case Progress():
                self._reported.update(event)

    def _epoch_of(self, event: Metrics) -> int | None:
        """Return the epoch of metrics: the one that they were logged with, or else the one that the loop is in."""
        if event.epoch is None:
            return self._begun
        return math.ceil(event.epoch) if math.isfinite(event.epoch) else None

    def line(self) -> str:
        """Return one line: "epoch 3/20, step 96, train/loss 0.21, val/loss 0.51, 41 steps/s, ETA 0:40"."""
        reported = self._reported
        position = "" if reported.done is None else f"{number(reported.done)} {harmless(reported.unit)[:20]}"
        step = position if self._step is None else f"step {self._step}"
        names = sorted(self._values, key=lambda name: "loss" not in name)[:MOST_METRICS]  # the order is kept otherwise
        shown = [f"{harmless(name)} {self._values[name]:.4g}" for name in names]
        rate = reported.rate_text or self._by_step.rate_text
        eta = eta_text(self._by_epoch if reported.eta_s is None else reported)
        return ", ".join(filter(None, [self._epoch_text(self.epoch or self._begun), step, *shown, rate, eta]))

    @property
    def texts(self) -> list[list[str]]:
        """The facts, the most important one first; of each the longest form, and then shorter ones."""
        restarts = [counted(self._starts - 1, "restart")] if self._starts > 1 else []
        return [[self._epoch_text(self._begun or self.epoch)], self._metric_texts(), restarts, self._saved_texts()]

    def _epoch_text(self, epoch: int | None) -> str:
        return "" if epoch is None else f"epoch {epoch}" + ("" if self._epochs is None else f"/{self._epochs}")

    def _metric_texts(self) -> list[str]:
        """The metric that decides which checkpoint is best, as "val/loss 0.51 (best 0.509, step 640)"."""
        name = self._best[0] if self._best else _DEFAULT_METRIC
        if name not in self._values:
            return []
        text = f"{harmless(name)} {self._values[name]:.4g}"
        if self._best is None:
            return [text]
        _, value, step = self._best
        return [f"{text} (best {value:.4g}, step {step})", f"{text} (best {value:.4g})", text]

    def _saved_texts(self) -> list[str]:
        """The newest checkpoint, as "saved step 384, 12 s ago"."""
        if self._saved is None:
            return []
        step, at = self._saved
        age_s = int(max(time.time() - at, 0))
        age = f"{age_s} s ago" if age_s < 60 else f"{duration(age_s)} ago"
        return [f"saved step {step}, {age}", f"saved {age}"]


def number(value: float) -> str:
    """Return a number that is easy to read: 12,345 or 3.14."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def clock(seconds: float) -> str:
    """Return a duration as 1:05 or 2:00:00."""
    minutes, rest = divmod(int(min(seconds, 360_000_000)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def eta_text(pace: Pace) -> str:
    """Return the time left, as "ETA 0:40"; "" if it is not known."""
    return "" if pace.eta_s is None else f"ETA {clock(pace.eta_s)}"
