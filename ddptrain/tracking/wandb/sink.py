"""Weights & Biases: what a rank logs, in one run of its own, of rank 0, or of all ranks together.

Rows wait for half a second, so that what is logged at one step in several calls becomes one row. They go to a file
of wandb's within a moment, from where its own process sends them: a rank that is killed loses less than a second.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from typing import Any

import wandb

from ddptrain.protocol.wandb_parts import SENDING
from ddptrain.tracking import items
from ddptrain.tracking.protocol import Facts, State
from ddptrain.tracking.wandb import media
from ddptrain.tracking.wandb import run as wandb_run
from ddptrain.tracking.wandb.best import Bests
from ddptrain.tracking.wandb.checkpoints import Checkpoints
from ddptrain.tracking.wandb.plan import Plan
from ddptrain.tracking.wandb.rows import ATTEMPT, STEP, Row, Thinner, goal_of
from ddptrain.tracking.wandb.staging import one_of_each

_GATHER_S = 0.5  # for more values of the same step
_DISK_EVERY_S = 10.0
_FULL_BYTES = 1 << 16
_TO_SPARE_S = 0.3  # for a finish that ends by itself when wandb's time is over
_WATCH_EVERY = 10  # rows of numbers from one look at the model to the next
_STALE_S = 3.0


class WentOffline(RuntimeError):
    """The server could not be had, or lacks something: what was logged is on the disk."""


class WandbTracker:
    """One rank's part in W&B; see protocol.Tracker."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)
        self._run: wandb.Run | None = None
        self._thinner = Thinner(int(options.get("log_every", 10)))
        self._row: Row | None = None
        self._known: set[str] = set()
        self._model: Any = None
        self._rows_to_look = 0
        self._broken: Exception | None = None  # what the last row met with
        self._trouble = ""
        self._lock = threading.Condition(threading.RLock())
        self._closed = False
        self._look_at_disk_s = 0.0

    def start(self, facts: Facts) -> None:
        """Open the run, online where that is wanted and possible, offline otherwise."""
        self._facts = facts
        self._plan = Plan(self._options, facts, os.environ)
        self._plan.folder.mkdir(parents=True, exist_ok=True)
        wandb_run.prepare(self._plan.folder)
        self._run, self._trouble = self._plan.open()
        self._bests = Bests()
        keep = int((facts.config.get("checkpoint") or {}).get("keep") or 3)
        sending = self._plan.folder / f"{SENDING}{facts.rank}"
        self._checkpoints = Checkpoints(sending, facts.folder.parent, facts.run_id, keep, self._plan.uploads)
        self._prefix = self._plan.prefix
        for name, (lowest, highest, last) in facts.told.get("before", {}).items():
            if goal := self._goal(name):
                self._bests.note(f"{self._prefix}{name}", goal, lowest, highest, last)
        for position in (STEP, ATTEMPT):
            self._run.define_metric(f"{self._prefix}{position}", hidden=True)
        self._run.define_metric(f"{self._prefix}*", step_metric=f"{self._prefix}{STEP}")
        self._tell()
        threading.Thread(target=self._keep_pace, name="ddptrain-wandb-rows", daemon=True).start()

    def _tell(self) -> None:
        assert self._run is not None
        facts, run = self._facts, self._run
        if self._trouble:
            text = f"{self._trouble}: training goes on, and is recorded offline; {self._sync} sends it later"
            if facts.rank == 0:
                facts.tell(text)
            else:  # once is enough for a person
                print(f"ddptrain: {text}", file=sys.stderr)
        elif run.url and facts.rank == 0:
            facts.tell(run.url)
        found = {
            "mode": "offline" if run.offline else self._plan.mode,
            "id": run.id,
            "name": run.name or "",
            "project": run.project,
            "entity": run.entity,
            "group": run.group,
            "url": run.url or "",
            "folder": str(run.settings.sync_dir),
        }
        facts.found({name: str(value) for name, value in found.items() if value})

    @property
    def _sync(self) -> str:
        command = self._facts.told.get("sync_command") or f"ddptrain results sync {self._facts.run_id}"
        return f"`{command}`"

    def log(self, item: items.Item) -> None:
        """Take one thing; files are copied when this returns."""
        with self._lock:
            try:
                self._take(item)
                if self._broken is not None:
                    raise self._broken
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                self._say_full()

    def _take(self, item: items.Item) -> None:
        match item:
            case items.Numbers():
                self._numbers(item)
            case items.Image() if self._options.get("images", True):
                self._add(item.step, {item.name: media.picture(item)}, None, item.time_ns / 1e9)
                self._flush()  # while its file is there
            case items.Table() if self._options.get("tables", True):
                self._table(item)
            case items.Checkpoint() if self._options.get("checkpoints"):
                artifact = self._checkpoints.artifact(item, offline=self._opened.offline)
                self._opened.log_artifact(artifact, aliases=["latest", f"step-{item.step}"])
            case items.Model():
                self._model = item.model
            case _:
                pass

    @property
    def _opened(self) -> wandb.Run:
        if self._run is None:
            raise RuntimeError("the run is not open")
        return self._run

    def _numbers(self, item: items.Numbers) -> None:
        values = dict(item.values)
        step: float | None = item.step
        if step is None and STEP in values:
            step = values[STEP]  # a metric may be called so: it counts as the position where none was given
        time_s = item.time_ns / 1e9
        due = self._thinner.take(values, step, item.epoch, time_s)
        if due:
            self._add(step, {name: values[name] for name in due}, item.epoch, time_s)

    def _add(self, step: float | None, values: Mapping[str, Any], epoch: float | None, time_s: float) -> None:
        """Put values into the row of their step, which is logged once others come, or after a moment."""
        if self._row is not None and not self._row.fits(step, values):
            self._flush()
        if self._row is None:
            self._row = Row(step)
            self._lock.notify_all()
        self._row.add(values, epoch, time_s)
        if step is None:
            self._flush()

    def _flush(self) -> None:
        """Log the row."""
        row, self._row = self._row, None
        if row is None:
            return
        run = self._opened
        for name, value in row.values.items():
            self._define(name)
            if isinstance(value, int | float) and (goal := self._goal(name)):
                self._bests.note(f"{self._prefix}{name}", goal, float(value))
        try:
            run.log(row.as_logged(self._prefix, self._facts.attempt) | self._looked_at(row))
        except Exception as error:
            self._broken = error
            raise
        self._broken = None
        self._look_at_disk()

    def _look_at_disk(self, *, at_last: bool = False) -> None:
        """Say once that the disk is full: wandb drops what does not fit without a word."""
        if not at_last and time.monotonic() < self._look_at_disk_s:
            return
        self._look_at_disk_s = time.monotonic() + _DISK_EVERY_S
        folder = str(self._opened.settings.sync_dir)
        try:
            status = os.statvfs(folder)
        except OSError:
            return
        if status.f_bavail * status.f_frsize < _FULL_BYTES:
            self._say_full()

    def _say_full(self) -> None:
        if "full disk" not in self._known:
            self._known.add("full disk")
            folder = self._opened.settings.sync_dir
            self._facts.tell(f"the disk of W&B's folder {folder} is full: training goes on, rows may be missing there")

    def _goal(self, name: str) -> str:
        checkpoint = self._facts.config.get("checkpoint") or {}
        return goal_of(name, str(checkpoint.get("metric") or ""), str(checkpoint.get("mode") or "min"))

    def _define(self, name: str) -> None:
        """Have the summary keep the best value of a metric, besides the last."""
        if name in self._known:
            return
        self._known.add(name)
        if goal := self._goal(name):
            step = f"{self._prefix}{STEP}"
            with suppress(wandb.Error):  # of a name that it can't define, as one with a *, the last value stands
                self._opened.define_metric(f"{self._prefix}{name}", step_metric=step, summary=f"{goal},last")

    def _looked_at(self, row: Row) -> dict[str, Any]:
        """Histograms of the model, where they are wanted, every now and then: as it is now, so of no older row."""
        what = self._options.get("watch", "off")
        if self._model is None or what == "off" or time.time() - row.time_s > _STALE_S:
            return {}
        self._rows_to_look -= 1
        if self._rows_to_look > 0:
            return {}
        found = media.histograms(self._model, what)
        self._rows_to_look = _WATCH_EVERY if found else 1  # gradients are there only for part of a step
        return {f"{self._prefix}{name}": value for name, value in found.items()}

    def _table(self, item: items.Table) -> None:
        most = int(self._options.get("table_rows", 1000))
        if len(item.rows) > most and self._facts.rank == 0 and f"table {item.name}" not in self._known:
            self._known.add(f"table {item.name}")
            self._facts.tell(
                f"the table {item.name} has {len(item.rows):,} rows, of which the first {most:,} are logged "
                "(tracking.wandb.table_rows)"
            )
        suffix = f"_rank_{self._facts.rank}" if self._facts.rank else ""
        offline = self._opened.offline
        with one_of_each(media.pictures(item, most)) if offline else nullcontext():
            artifact = media.table_artifact(item, most, self._facts.run_id, suffix)
            self._add(item.step, {item.name: media.table(item, most)}, None, item.time_ns / 1e9)
            self._flush()
        self._opened.log_artifact(artifact)

    def _keep_pace(self) -> None:
        """Log a row that no other one follows; for the life of the run, in a thread of its own."""
        while True:
            with self._lock:
                while self._row is None and not self._closed:
                    self._lock.wait()
                if self._closed:
                    return
                assert self._row is not None
                left_s = self._row.since_s + _GATHER_S - time.monotonic()
                if left_s <= 0:
                    with suppress(Exception):  # whatever wandb raises: the next log() tells of it
                        self._flush()
                    continue
            time.sleep(left_s)

    def finish(self, state: State) -> None:
        """Log what was held back, and end the run.

        Raises:
            WentOffline: a strict run was to be online, and was not, or not with everything.
        """
        with self._lock:
            self._closed = True
            self._lock.notify_all()
            run = self._opened
            try:
                self._last_words(run)
            finally:
                complete = wandb_run.finish(run, state, self._plan.wandb_timeout_s + _TO_SPARE_S)
                self._checkpoints.close()
        if not complete:
            self._facts.tell(
                f"W&B has not taken everything in {self._plan.finish_timeout_s:g} s; {self._sync} sends the rest"
            )
        if lacking := self._plan.uploads.lacking:
            self._facts.tell(lacking)
        if self._facts.told.get("strict") and (self._trouble or lacking or not complete):
            raise WentOffline(self._trouble or lacking or "W&B has not taken everything in time")

    def _last_words(self, run: wandb.Run) -> None:
        self._flush()
        for step, held in self._thinner.rest().items():
            for name, value in held.items():
                self._add(step, {name: value.value}, value.epoch, value.time_s)
        self._flush()
        if self._facts.resumed and (bests := self._bests.summary()):
            run.summary.update(bests)
        self._look_at_disk(at_last=True)
