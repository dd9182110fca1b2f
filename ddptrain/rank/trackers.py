"""Starts and finishes the trackers of a rank. To finish them never takes more time than the rank has."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ddptrain.protocol import events
from ddptrain.protocol.rank_spec import RankSpec
from ddptrain.rank.output import ArtifactFiles, Emitter
from ddptrain.tracking.protocol import Checkpoint, Image, Item, Numbers, Table

if TYPE_CHECKING:
    from ddptrain.tracking.protocol import State
    from ddptrain.tracking.trackers import TrackerManager

_MIN_FINISH_S = 0.5  # trackers have at least this time to finish
_MARGIN_S = 1.0  # the part of the grace period in which the rank itself ends
_EXIT_HANDLERS_S = 5.0  # a tracker that has not ended may have exit handlers that hang
_NOTE_AFTER_S = 3.0  # after this time the user reads what the rank waits for


class RankTrackers:
    """Passes what the rank logs to its trackers, between begin() and finish(). No method raises."""

    def __init__(self, spec: RankSpec, emitter: Emitter) -> None:
        self._spec = spec
        self._emitter = emitter
        self._files = ArtifactFiles(spec, emitter)
        self._grace_until: float | None = None
        self._finishing = threading.Lock()
        self._saved = False
        self.manager: TrackerManager | None = None  # None if the rank has no trackers

    def begin(self) -> None:
        """Start the trackers, if there are any, without waiting for them."""
        if not self._spec.tracking:
            return
        try:
            from ddptrain.tracking.trackers import start_trackers

            self.manager = start_trackers(self._spec, self._emitter.emit)
        except Exception as error:  # for example, no thread could be started: the rank can train without trackers
            self._emitter.note(f"trackers could not be started: {error!r}; the run directory has everything", "warning")

    # --- items ---

    def numbers(self, logged: events.Metrics) -> None:
        """Pass on the values of a ctx.log call."""
        if self.manager is not None:
            self.manager.put(Numbers(logged.time_ns, logged.values, logged.step, logged.epoch))

    def checkpoint(self, step: int, folder: Path, metrics: Mapping[str, float]) -> None:
        """Pass on a complete checkpoint, before it is announced to the driver, which moves it away."""
        if self.manager is not None and self.manager.wants(Checkpoint) and (kept := self.keep(folder)) is not None:
            self.manager.put_with_files(Checkpoint(time.time_ns(), step, kept, dict(metrics)), kept)

    def wants(self, kind: type[Item]) -> bool:
        """Return whether any tracker takes items of that type."""
        return self.manager is not None and self.manager.wants(kind)

    def keep(self, path: Path, suffix: str = "") -> Path | None:
        """Link a file or folder; return the link's path, which is valid after the driver moved the original.

        Return None if the link can't be created: the trackers then lack it, but the run directory has it.
        """
        with suppress(OSError):
            return self.manager.keep(path, suffix) if self.manager is not None else None
        return None

    def put(self, item: Image | Table, *kept: Path) -> None:
        """Pass on an item, whose files are from keep()."""
        if self.manager is not None:
            self.manager.put_with_files(item, *kept)

    # --- the end ---

    def hurry(self, grace_s: float) -> None:
        """Limit the time for trackers: the rank was asked to end within `grace_s` from now on."""
        until = time.monotonic() + grace_s
        self._grace_until = until if self._grace_until is None else min(self._grace_until, until)
        if self.manager is not None and self.manager.ended:
            self.manager.end("crashed", self._left_s())  # shortens the time, but does not change the state

    def end(self, state: State) -> None:
        """Make the trackers finish while the rank cleans up. Later calls do not change the state."""
        if self.manager is not None:
            self.manager.end(state, self._left_s())

    def finish(self, state: State) -> None:
        """Finish the trackers, and wait while there is time."""
        if (manager := self.manager) is None:
            return
        try:
            longest_s = manager.end(state, self._left_s())
            with suppress(OSError):
                self._emitter.emit(events.Finishing(time.time_ns(), round(longest_s + _MARGIN_S, 1)))
            left = f"the workload is over; trackers still have up to {longest_s - _NOTE_AFTER_S:.0f} s to finish"
            note = threading.Timer(_NOTE_AFTER_S, self._emitter.note, (left,))
            note.daemon = True
            if longest_s > _NOTE_AFTER_S + 1.0:
                note.start()
            try:
                manager.wait()
            finally:
                note.cancel()
            with self._finishing:
                self._save_files()
        except Exception:  # a bug of ddptrain must not fail a rank that has finished its work
            traceback.print_exc()

    def bound_exit(self, code: int) -> None:
        """Ensure that the process ends soon with `code`, even if exit handlers of an unfinished tracker hang."""
        if self.manager is not None and self.manager.unfinished:
            timer = threading.Timer(_EXIT_HANDLERS_S, _exit, (code,))
            timer.daemon = True
            timer.start()

    def _left_s(self) -> float:
        if self._grace_until is None:
            return 3_600.0  # each tracker has its own timeout
        return max(_MIN_FINISH_S, self._grace_until - _MARGIN_S - time.monotonic())

    def _save_files(self) -> None:
        """Send the trackers' files to the driver if the rank does not see the run directory."""
        from ddptrain.tracking.trackers import tracking_folder

        folder = tracking_folder(self._spec)
        if self._saved or (self._spec.tracking and self._spec.tracking.folder) or not folder.is_dir():
            return
        self._saved = True
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not path.is_symlink():
                with suppress(OSError):
                    staged = self._files.new_staging("tracking")
                    shutil.copyfile(path, staged)  # a copy: an unfinished tracker may still write to the file
                    self._files.announce(path.relative_to(folder).as_posix(), staged, "tracking")


def _exit(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
