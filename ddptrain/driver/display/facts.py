"""How far a run is, as short texts: epoch, step, metrics, best checkpoint, rate and time left."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from ddptrain.config.wording import counted
from ddptrain.driver.display import terminal
from ddptrain.protocol.events import Metrics, Progress
from ddptrain.results.metrics import LatestMetrics, finite_number
from ddptrain.results.run_record import BestRecord
from ddptrain.text_tables import duration

MOST_METRICS = 4
_MOST_EARLY = 100
SMOOTHING_S = 5.0  # in the rate, progress has a weight of 1/e after this time
_DEFAULT_METRIC = "val/loss"


class RunFacts:
    """What all ranks have reported, as one run: epoch, step and rate are those of rank 0, metrics are means."""

    def __init__(self) -> None:
        self.epoch: int | None = None  # of rank 0's newest metrics
        self._begun: int | None = None  # the epoch that rank 0's loop over ctx.epochs is in
        self._epochs: int | None = None
        self._step: int | None = None
        self._latest = LatestMetrics()
        self._early: deque[tuple[int, Metrics]] = deque()  # of ranks whose step rank 0 has not reached
        self._starts = 0  # of rank 0
        self._saved_step: int | None = None
        self._saved_s = 0.0  # Unix time
        self._best: BestRecord | None = None
        self._forget_pace()

    def event(self, line: Mapping[str, Any]) -> None:
        """Update the facts after a line of events.jsonl."""
        match line:
            case {"event": "rank_started", "rank": 0}:
                self._starts += 1
                self.epoch = self._begun = self._step = None
                self._early.clear()
                self._latest.begin_attempt()
                self._forget_pace()
            case {"event": "epochs", "total": int(total)}:
                begun = line.get("epoch")  # earlier versions have only the total
                self._epochs, self._begun = total, begun if isinstance(begun, int) else None
            case {"event": "checkpoint_saved", "step": int(step)}:
                at, best = finite_number(line.get("time_s")), line.get("best")
                self._saved_step, self._saved_s = step, time.time() if at is None else at
                match best:
                    case {"metric": str(metric), "value": float(value), "step": int(step)}:
                        self._best = BestRecord(metric, value=value, step=step)

    def begins_epoch(self, rank: int, event: object) -> bool:
        """Whether an event, which is not handled yet, is rank 0's first one about a later epoch."""
        if rank != 0 or not isinstance(event, Metrics) or self.epoch is None:
            return False
        return (self._epoch_of(event) or 0) > self.epoch

    def rank_event(self, rank: int, event: object) -> None:
        """Update the facts after an event of a rank."""
        match event:
            case Metrics():
                if rank == 0:
                    self._add(event)
                self._early.append((rank, event))
                self._take_metrics()
            case Progress() if rank == 0:
                self._reported.update(event)

    def line(self) -> str:
        """Return one line: "epoch 3/20, step 96, train/loss 0.21, val/loss 0.51, 41 steps/s, ETA 0:40"."""
        done = self._reported.done
        position = "" if done is None else f"{number(done)} {self._reported.shown_unit}"
        step = position if self._step is None else f"step {self._step}"
        values = self._latest.as_dict()
        names = sorted(values, key=lambda name: "loss" not in name)[:MOST_METRICS]  # the order is kept otherwise
        shown = [f"{terminal.harmless(name, False)} {values[name]:.4g}" for name in names]
        pace = self._reported if self._reported.rate is not None else self._by_step
        rate = "" if pace.rate is None else f"{number(pace.rate)} {pace.shown_unit}/s"
        return ", ".join(filter(None, [self._epoch_text(self.epoch or self._begun), step, *shown, rate, self._eta]))

    @property
    def epoch_text(self) -> str:
        """The epoch that rank 0 is in, as "epoch 3/20"; "" if none is known."""
        return self._epoch_text(self._begun or self.epoch)

    def _epoch_text(self, epoch: int | None) -> str:
        if epoch is None:
            return ""
        return f"epoch {epoch}" + ("" if self._epochs is None else f"/{self._epochs}")

    @property
    def metric_texts(self) -> list[str]:
        """The metric that decides which checkpoint is best, as "val/loss 0.51 (best 0.509, step 640)", and shorter."""
        best = self._best
        name = best.metric if best else _DEFAULT_METRIC
        value = self._latest.as_dict().get(name)
        if value is None:
            return []
        text = f"{terminal.harmless(name, False)} {value:.4g}"
        longer = (
            [f"{text} (best {best.value:.4g}, step {best.step})", f"{text} (best {best.value:.4g})"] if best else []
        )
        return [*longer, text]

    @property
    def saved_texts(self) -> list[str]:
        """The newest checkpoint, as "saved step 384, 12 s ago", and shorter."""
        if self._saved_step is None:
            return []
        age_s = int(max(time.time() - self._saved_s, 0))
        age = f"{age_s} s ago" if age_s < 60 else f"{duration(age_s)} ago"
        return [f"saved step {self._saved_step}, {age}", f"saved {age}"]

    @property
    def restarts_text(self) -> str:
        """How often the ranks were started again, as "1 restart"."""
        return counted(self._starts - 1, "restart") if self._starts > 1 else ""

    def _take_metrics(self) -> None:
        """Take the values up to rank 0's step, so that a line does not have values of its next epoch."""
        for _ in range(len(self._early)):
            rank, event = self._early.popleft()
            is_early = event.step is not None and self._step is not None and event.step > self._step
            if is_early and len(self._early) < _MOST_EARLY:
                self._early.append((rank, event))
            else:
                self._latest.logged(rank, event.step, event.values)

    def _epoch_of(self, event: Metrics) -> int | None:
        """Return the epoch of metrics: the one that they were logged with, or else the one that the loop is in."""
        if event.epoch is None:
            return self._begun
        return math.ceil(event.epoch) if math.isfinite(event.epoch) else None

    def _add(self, event: Metrics) -> None:
        if event.step is not None:
            self._step = event.step
            self._by_step.update(Progress(event.time_ns, event.step))
        if (epoch := self._epoch_of(event)) is not None:
            self.epoch = epoch
            if event.epoch is not None:
                self._by_epoch.update(Progress(event.time_ns, event.epoch, self._epochs, "epochs"))

    @property
    def _eta(self) -> str:
        eta_s = self._by_epoch.eta_s if self._reported.eta_s is None else self._reported.eta_s
        return "" if eta_s is None else f"ETA {clock(eta_s)}"

    def _forget_pace(self) -> None:
        self._reported, self._by_step, self._by_epoch = Pace(), Pace(), Pace()


class Pace:
    """Rate and time left, from the progress events of one rank; unknown values are None, never NaN."""

    def __init__(self, unit: str = "") -> None:
        self.done: float | None = None
        self.total: float | None = None
        self.unit = unit
        self.last_change = 0.0  # of `done`
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
            self.last_change = event.done - self.done
            self._update_rate(self.last_change, (event.time_ns - self._time_ns) / 1e9)
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
