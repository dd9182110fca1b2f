"""Starts and finishes the trackers of a rank. To finish them never takes more time than the rank has."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddptrain.protocol import events
from ddptrain.protocol.rank_spec import RankSpec
from ddptrain.rank.output import ArtifactFiles, Emitter
from ddptrain.tracking.items import Checkpoint, Image, Item, Model, Numbers, Table

if TYPE_CHECKING:
    from ddptrain.tracking.factory import TrackerManager
    from ddptrain.tracking.protocol import State

_MIN_FINISH_S = 0.5  # trackers have at least this time to finish
_MARGIN_S = 1.0  # the part of the grace period in which the rank itself ends
_EXIT_HANDLERS_S = 5.0  # a tracker that has not ended may have exit handlers that hang
_NOTE_AFTER_S = 3.0  # after this time the user is told what the rank waits for


class RankTrackers:
    """Passes what the rank logs to its trackers, between begin() and finish()."""

    def __init__(self, spec: RankSpec, emitter: Emitter) -> None:
        self._spec = spec
        self._emitter = emitter
        self._files = ArtifactFiles(spec, emitter)
        self._grace_until: float | None = None
        self._finishing = threading.Lock()
        self._saved = False
        self.manager: TrackerManager | None = None

    def begin(self) -> None:
        """Start the trackers, if there are any, without waiting for them."""
        if not self._spec.tracking:
            return
        try:
            from ddptrain.tracking.factory import start_trackers

            self.manager = start_trackers(self._spec, self._emitter.emit)
        except Exception as error:  # for example, no thread could be started: the rank can train without trackers
            text = f"trackers could not be started: {error!r}; the run directory has everything"
            self._emitter.emit(events.Note(time.time_ns(), text, "warning"))

    # --- items ---

    def numbers(self, logged: events.Metrics) -> None:
        """Pass on the values of a ctx.log call."""
        if self.manager is not None:
            self.manager.put(Numbers(logged.time_ns, logged.values, logged.step, logged.epoch))

    def model(self, model: Any) -> None:
        """Pass on the model that ctx.prepare was given."""
        if self.manager is not None:
            self.manager.put(Model(time.time_ns(), model))

    def checkpoint(self, step: int, folder: Path, metrics: Mapping[str, float]) -> None:
        """Pass on a complete checkpoint, before it is announced to the driver, which moves it away."""
        if self.wants(Checkpoint):
            with suppress(OSError):
                kept = self.keep(folder)
                self.put_with_files(Checkpoint(time.time_ns(), step, kept, dict(metrics)), kept)

    def wants(self, kind: type[Item]) -> bool:
        """Return whether any tracker takes items of that type."""
        return self.manager is not None and self.manager.wants(kind)

    def keep(self, path: Path, suffix: str = "") -> Path:
        """Link a file or folder, and return the link's path, which is valid after the driver moved the original.

        Raises OSError.
        """
        assert self.manager is not None, "only if wants() is true"
        return self.manager.keep(path, suffix)

    def put_with_files(self, item: Image | Table | Checkpoint, *kept: Path) -> None:
        """Pass on an item, whose files are from keep()."""
        if self.manager is not None:
            self.manager.put_with_files(item, *kept)

    # --- the end ---

    def hurry(self, grace_s: float) -> None:
        """Limit the time for trackers: the rank was told to end within `grace_s` from now on."""
        until = time.monotonic() + grace_s
        self._grace_until = until if self._grace_until is None else min(self._grace_until, until)
        if self.manager is not None and self.manager.ended:
            self.manager.end("crashed", self._left_s())  # shortens the time, but does not change the state

    @property
    def is_on(self) -> bool:
        """Whether the rank has trackers."""
        return self.manager is not None

    def end(self, state: State) -> None:
        """Tell the trackers to finish while the rank cleans up. Later calls do not change the state."""
        if self.manager is not None:
            self.manager.end(state, self._left_s())

    def finish(self, state: State) -> str:
        """Finish the trackers, and wait while there is time.

        Return the error that fails the rank, or "". Never raises.
        """
        if self.manager is None:
            return ""
        try:
            self._finish(self.manager, state)
        except Exception:  # a bug of ddptrain must not fail a rank that has finished its work
            traceback.print_exc()
        return self.manager.error

    def _finish(self, manager: TrackerManager, state: State) -> None:
        longest_s = manager.end(state, self._left_s())
        with suppress(OSError):
            self._emitter.emit(events.Finishing(time.time_ns(), round(longest_s + _MARGIN_S, 1)))
        note = _call_later(_NOTE_AFTER_S, lambda: self._note_waiting(longest_s))
        try:
            manager.wait()
        finally:
            note.cancel()
        with self._finishing:
            self._save_files()

    def bound_exit(self, code: int) -> None:
        """Ensure that the process ends soon with `code`, even if exit handlers of an unfinished tracker hang."""
        if self.manager is not None and self.manager.unfinished:
            _call_later(_EXIT_HANDLERS_S, lambda: _exit(code))

    def _left_s(self) -> float:
        if self._grace_until is None:
            return 3_600.0  # each tracker has its own timeout
        return max(_MIN_FINISH_S, self._grace_until - _MARGIN_S - time.monotonic())

    def _note_waiting(self, longest_s: float) -> None:
        left_s = longest_s - _NOTE_AFTER_S
        if left_s < 1.0:
            return
        with suppress(OSError):
            text = f"the workload is over; trackers still have up to {left_s:.0f} s to finish"
            self._emitter.emit(events.Note(time.time_ns(), text))

    def _save_files(self) -> None:
        """Send the trackers' files to the driver if the rank does not see the run directory."""
        from ddptrain.tracking.factory import tracking_folder

        folder = tracking_folder(self._spec)
        tracking = self._spec.tracking
        if self._saved or (tracking and tracking.folder) or not folder.is_dir():
            return
        self._saved = True
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not path.is_symlink():
                with suppress(OSError):
                    staged = self._files.new_staging("tracking")
                    shutil.copyfile(path, staged)  # a copy: an unfinished tracker may still write to the file
                    self._files.announce(path.relative_to(folder).as_posix(), staged, "tracking")


def _call_later(seconds: float, call: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    timer.start()
    return timer


def _exit(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
