"""The tracker for Weights & Biases: one run of rank 0, one run for each rank, or one run that all ranks share.

A row is logged half a second after its first value, so that several ctx.log calls of one step become one row. wandb
writes rows to a file within a quarter of a second, and its service process sends them from there: if the rank is
killed, less than a second is lost.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import wandb

from ddptrain.config.rank_settings import goal_of
from ddptrain.tracking import protocol as items
from ddptrain.tracking import wandb_run
from ddptrain.tracking.protocol import Facts, State
from ddptrain.tracking.wandb_files import SENDING
from ddptrain.tracking.wandb_run import ArtifactUploads, RankRun

_GATHER_S = 0.5  # a row waits this long for more values of its step
_FINISH_MARGIN_S = 0.3  # our timeout is longer, so that wandb's own timeout ends run.finish() first
_UPLOAD_SHARE = 0.8  # of the time for the end: then run.finish() begins, although artifacts wait
STEP = "step"
EPOCH = "epoch"
ATTEMPT = "attempt"  # after a restart W&B keeps both rows of a repeated step; the higher attempt counts


class WandbTracker:
    """Sends what one rank logs to W&B; see ddptrain.tracking.protocol.Tracker."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)
        self._run: wandb.Run
        self._filter = RowFilter(int(options.get("log_every", 10)))
        self._row: WandbRow | None = None
        self._done: set[str] = set()  # metrics that are defined, and messages that were sent
        self._row_error: Exception | None = None  # of the last row
        self._lock = threading.RLock()
        self._timer: threading.Timer  # of the row

    def start(self, facts: Facts) -> None:
        """Open the run: online if this is wanted and possible, else offline."""
        self._facts = facts
        self._rank_run = RankRun(self._options, facts, os.environ)
        self._run, offline_reason = self._rank_run.open()
        self._uploads = ArtifactUploads(self._run, facts.run_id, self._rank_run.folder / f"{SENDING}{facts.rank}")
        self._prefix = self._rank_run.prefix
        for position in (STEP, ATTEMPT):
            self._run.define_metric(f"{self._prefix}{position}", hidden=True)
        self._run.define_metric(f"{self._prefix}*", step_metric=f"{self._prefix}{STEP}")
        self._report_run(offline_reason)

    def _report_run(self, offline_reason: str) -> None:
        """Say where the run is, or why it is offline although online was wanted."""
        facts, run = self._facts, self._run
        if offline_reason:
            text = f"{offline_reason}: training continues, and is recorded offline; "
            text += f"{self._sync_command} sends it later"
            if facts.rank == 0:
                facts.tell(text)
            else:  # the user sees rank 0's message; this one goes to the rank's log
                print(f"ddptrain: {text}", file=sys.stderr)
        elif run.url and facts.rank == 0:
            facts.tell(run.url)
        reported = {
            "mode": "offline" if run.offline else self._rank_run.mode,
            "id": run.id,
            "name": run.name or "",
            "project": run.project,
            "entity": run.entity,
            "group": run.group,
            "url": run.url or "",
            "folder": str(run.settings.sync_dir),
        }
        facts.found({name: str(value) for name, value in reported.items() if value})

    @property
    def _sync_command(self) -> str:
        return f"`{self._facts.from_driver.get('sync_command') or f'ddptrain results sync {self._facts.run_id}'}`"

    def log(self, item: items.Item) -> None:
        """Log one item; its files have been copied when this method returns."""
        with self._lock:
            match item:
                case items.Numbers():
                    self._log_numbers(item)
                case items.Image():
                    self._add(item.step, {item.name: wandb_run.to_image(item)}, None, item.time_ns / 1e9)
                    self._flush()  # while the file exists
                case items.Table():
                    self._log_table(item)
                case items.Checkpoint() if self._options.get("checkpoints") and not self._run.offline:
                    self._uploads.put_checkpoint(item)
                case _:
                    pass
            if self._row_error is not None:
                raise self._row_error

    def _log_numbers(self, item: items.Numbers) -> None:
        values = dict(item.values)
        step: float | None = item.step
        if step is None and STEP in values:
            step = values[STEP]  # a metric with this name is the position if no step was given
        time_s = item.time_ns / 1e9
        due = self._filter.take(values, step, item.epoch, time_s)
        if due:
            self._add(step, {name: values[name] for name in due}, item.epoch, time_s)

    def _add(self, step: float | None, values: Mapping[str, Any], epoch: float | None, time_s: float) -> None:
        """Add values to the row of their step, which is logged when values of another step come, or after 0.5 s."""
        if self._row is not None and not self._row.fits(step, values):
            self._flush()
        if self._row is None:
            self._row = WandbRow(step)
            self._timer = threading.Timer(_GATHER_S, self._flush_late, [self._row])
            self._timer.daemon = True
            self._timer.start()
        self._row.add(values, epoch, time_s)
        if step is None:
            self._flush()

    def _flush(self) -> None:
        """Log the current row, if there is one."""
        row, self._row = self._row, None
        if row is None:
            return
        self._timer.cancel()
        for name in row.values:
            self._define(name)
        try:
            self._run.log(row.as_logged(self._prefix, self._facts.attempt))
        except Exception as error:  # whatever wandb raises; log() raises it
            self._row_error = error
            raise
        self._row_error = None

    def _is_first(self, what: str) -> bool:
        is_first = what not in self._done
        self._done.add(what)
        return is_first

    def _define(self, name: str) -> None:
        """Let the summary of the W&B run contain the best value of a metric in addition to the last."""
        checkpoint = self._facts.config.get("checkpoint") or {}
        goal = goal_of(name, str(checkpoint.get("metric") or ""), str(checkpoint.get("mode") or "min"))
        if self._is_first(f"metric {name}") and goal:
            step = f"{self._prefix}{STEP}"
            with suppress(wandb.Error):  # wandb refuses some names, for example with a *: their last value is kept
                self._run.define_metric(f"{self._prefix}{name}", step_metric=step, summary=f"{goal},last")

    def _log_table(self, item: items.Table) -> None:
        max_rows = 1000
        if len(item.rows) > max_rows and self._facts.rank == 0 and self._is_first(f"table {item.name}"):
            self._facts.tell(
                f"the table {item.name} has {len(item.rows):,} rows, of which the first {max_rows:,} are logged"
            )
        if self._run.offline:  # an offline log that names files would be useless once the run directory has moved
            return
        self._uploads.put(wandb_run.to_table_artifact(item, max_rows, self._facts.run_id, self._facts.rank))
        self._add(item.step, {item.name: wandb_run.to_table(item, max_rows)}, None, item.time_ns / 1e9)
        self._flush()

    def _flush_late(self, row: WandbRow) -> None:
        """Log a row 0.5 s after its first value, if it still waits. Runs in a thread."""
        with self._lock, suppress(Exception):  # whatever wandb raises; the next log() raises it
            if row is self._row:
                self._flush()

    def finish(self, state: State) -> None:
        """End the run, and say what the server did not get."""
        with self._lock:
            try:
                self._log_rest()
            finally:
                complete = self._end_run(state)
                self._uploads.delete_files()
        if not complete:
            incomplete = f"W&B has not taken everything in {self._rank_run.finish_timeout_s:g} s"
            self._facts.tell(f"{incomplete}; {self._sync_command} sends the rest")
        if lost := self._uploads.problem:
            self._facts.tell(lost)

    def _end_run(self, state: State) -> bool:
        """End wandb's run. Return whether W&B got everything."""
        deadline = time.monotonic() + self._rank_run.wandb_timeout_s + _FINISH_MARGIN_S
        complete = self._uploads.finish(_UPLOAD_SHARE * self._rank_run.wandb_timeout_s)
        return wandb_run.finish(self._run, state, deadline - time.monotonic(), complete=complete)

    def _log_rest(self) -> None:
        self._flush()
        for step, held in self._filter.rest().items():
            for name, value in held.items():
                self._add(step, {name: value.value}, value.epoch, value.time_s)
        self._flush()


@dataclass(frozen=True, slots=True)
class HeldValue:
    """A value that was not logged yet, and its position."""

    value: float
    step: float
    epoch: float | None
    time_s: float


class RowFilter:
    """Selects one value of a metric in `every` steps, and at the end the last value that was not selected.

    All values of a metric that is not logged at every step are selected, and the first value of each whole epoch: a
    metric that is logged once an epoch is complete, even if an epoch has few steps.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._step: float | None = None
        self._tick = 0  # the number of steps at which anything was logged
        self._last_tick: dict[str, int] = {}  # name -> tick of its last value
        self._epochs: dict[str, float] = {}  # name -> whole epoch of its last value that had one
        self._sent: dict[str, float] = {}  # name -> step of the last value that was selected
        self._held: dict[str, HeldValue] = {}

    def take(self, values: Mapping[str, float], step: float | None, epoch: float | None, time_s: float) -> list[str]:
        """Return the names of the values to log now; all names if there is no step."""
        if step is None:
            return list(values)
        if step != self._step:
            self._step, self._tick = step, self._tick + 1
        due = []
        for name, value in values.items():
            sent, ticks = self._sent.get(name), self._tick - self._last_tick.get(name, 0)
            begins_epoch = epoch is not None and float(epoch).is_integer() and epoch != self._epochs.get(name)
            if begins_epoch and epoch is not None:
                self._epochs[name] = epoch
            # Steps may start again from a lower number.
            if begins_epoch or sent is None or not 0 <= step - sent < self._every or (step != sent and ticks > 1):
                due.append(name)
                self._sent[name] = step
                self._held.pop(name, None)
            else:
                self._held[name] = HeldValue(value, step, epoch, time_s)
            self._last_tick[name] = self._tick
        return due

    def rest(self) -> dict[float, dict[str, HeldValue]]:
        """Return the values that were not logged, by step, and forget them."""
        rows: dict[float, dict[str, HeldValue]] = {}
        for name, held in self._held.items():
            rows.setdefault(held.step, {})[name] = held
        self._held = {}
        return dict(sorted(rows.items()))


@dataclass(slots=True)
class WandbRow:
    """The values of one step, collected before they are logged."""

    step: float | None
    values: dict[str, Any] = field(default_factory=dict)
    epoch: float | None = None
    time_s: float = 0.0

    def fits(self, step: float | None, values: Mapping[str, Any]) -> bool:
        """Return whether these values belong to the row: they have its step, and none of its names."""
        return step is not None and step == self.step and not self.values.keys() & values.keys()

    def add(self, values: Mapping[str, Any], epoch: float | None, time_s: float) -> None:
        """Add values, which have the row's step."""
        self.values |= values
        self.epoch = self.epoch if epoch is None else epoch
        self.time_s = max(self.time_s, time_s)

    def as_logged(self, prefix: str, attempt: int) -> dict[str, Any]:
        """Return the row for wandb.Run.log, with `prefix` before each name."""
        row: dict[str, Any] = {f"{prefix}{name}": value for name, value in self.values.items()}
        for name, value in ((STEP, self.step), (EPOCH, self.epoch), (ATTEMPT, attempt)):
            if value is not None:
                row.setdefault(f"{prefix}{name}", value)
        return {**row, "_timestamp": self.time_s}
