"""A rank's trackers over its life: nothing at all where none is on, and never more than the rank has time for."""

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
from ddptrain.rank.emitter import Emitter
from ddptrain.rank.files import Files
from ddptrain.tracking.items import Checkpoint, Image, Item, Model, Numbers, Table

if TYPE_CHECKING:
    from ddptrain.tracking.manager import Hub
    from ddptrain.tracking.protocol import State

_LEAST_S = 0.5  # for trackers to finish, however late it is
_MARGIN_S = 1.0  # of the grace: the rank has to end, too
_EXIT_HANDLERS_S = 5.0  # which a tracker that has not ended may have left, too
_PATIENCE_S = 3.0  # after which the person is told what is being waited for


class Tracked:
    """What the rank hands to its trackers, from begin() to finish()."""

    def __init__(self, spec: RankSpec, emitter: Emitter) -> None:
        self._spec = spec
        self._emitter = emitter
        self._files = Files(spec, emitter)
        self._grace_until: float | None = None
        self._over = threading.Lock()
        self._carried = False
        self.hub: Hub | None = None

    def begin(self) -> None:
        """Start the trackers there are; returns at once."""
        if not self._spec.tracking:
            return
        try:
            from ddptrain.tracking.factory import open_hub

            self.hub = open_hub(self._spec, self._emitter.emit)
        except Exception as error:  # as no thread could be started
            text = f"trackers could not be started: {error!r}; the run directory has everything"
            self._emitter.emit(events.Note(time.time_ns(), text, "warning"))

    # --- what is logged ---

    def numbers(self, logged: events.Metrics) -> None:
        """What ctx.log was given."""
        if self.hub is not None:
            self.hub.put(Numbers(logged.time_ns, logged.values, logged.step, logged.epoch))

    def model(self, model: Any) -> None:
        """What ctx.prepare was given."""
        if self.wants(Model):
            self._put(Model(time.time_ns(), model))

    def checkpoint(self, step: int, folder: Path, metrics: Mapping[str, float]) -> None:
        """A checkpoint that is complete, and that the driver has not been told of yet."""
        if self.wants(Checkpoint):
            with suppress(OSError):
                lent = self.lend(folder)
                self.put_lent(Checkpoint(time.time_ns(), step, lent, dict(metrics)), lent)

    def wants(self, kind: type[Item]) -> bool:
        """Whether any tracker takes items of that type."""
        return self.hub is not None and self.hub.wants(kind)

    def lend(self, path: Path, suffix: str = "") -> Path:
        """A name for a file or folder that stays when the driver takes it away. Raises OSError."""
        assert self.hub is not None, "nobody wants it"
        return self.hub.lend(path, suffix)

    def put_lent(self, item: Image | Table | Checkpoint, *lent: Path) -> None:
        """Hand over an item whose files were lent."""
        if self.hub is not None:
            self.hub.put_lent(item, *lent)

    def _put(self, item: Item) -> None:
        if self.hub is not None:
            self.hub.put(item)

    # --- the end ---

    def hurry(self, grace_s: float) -> None:
        """The rank was told to end, and has `grace_s` from now on."""
        until = time.monotonic() + grace_s
        self._grace_until = until if self._grace_until is None else min(self._grace_until, until)
        if self.hub is not None and self.hub.ended:
            self.hub.end("crashed", self._left_s())  # sooner than was said; the state stays

    @property
    def is_on(self) -> bool:
        """Whether the rank has trackers."""
        return self.hub is not None

    def end(self, state: State) -> None:
        """Have the trackers finish while the rank clears up; how it has ended is said once."""
        if self.hub is not None:
            self.hub.end(state, self._left_s())

    def finish(self, state: State) -> str:
        """Wait for the trackers, in time; returns what makes the rank fail, "" for nothing. Never raises."""
        if self.hub is None:
            return ""
        try:
            self._finish(self.hub, state)
        except Exception:  # ours: no reason to fail for a rank whose work is done
            traceback.print_exc()
        return self.hub.error

    def _finish(self, hub: Hub, state: State) -> None:
        longest_s = hub.end(state, self._left_s())
        with suppress(OSError):
            self._emitter.emit(events.Finishing(time.time_ns(), round(longest_s + _MARGIN_S, 1)))
        tell = _in_a_while(_PATIENCE_S, lambda: self._tell_waiting(longest_s))
        try:
            hub.wait()
        finally:
            tell.cancel()
        with self._over:
            self._carry_home()

    def bound_exit(self, code: int) -> None:
        """Let the process end soon with `code`, whatever a tracker that was left behind does at its exit."""
        if self.hub is not None and self.hub.left_behind:
            _in_a_while(_EXIT_HANDLERS_S, lambda: _leave(code))

    def _left_s(self) -> float:
        if self._grace_until is None:
            return 3_600.0  # each tracker has a time-out
        return max(_LEAST_S, self._grace_until - _MARGIN_S - time.monotonic())

    def _tell_waiting(self, longest_s: float) -> None:
        left_s = longest_s - _PATIENCE_S
        if left_s < 1.0:
            return
        with suppress(OSError):
            text = f"the workload is over; trackers still have up to {left_s:.0f} s to finish"
            self._emitter.emit(events.Note(time.time_ns(), text))

    def _carry_home(self) -> None:
        """Hand over what trackers have written where the run directory is not to be seen from here."""
        from ddptrain.tracking.factory import tracking_folder

        folder = tracking_folder(self._spec)
        tracking = self._spec.tracking
        if self._carried or (tracking and tracking.folder) or not folder.is_dir():
            return
        self._carried = True
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not path.is_symlink():
                with suppress(OSError):
                    staged = self._files.new_staging("tracking")
                    shutil.copyfile(path, staged)  # a tracker that was left behind may still write
                    self._files.announce(path.relative_to(folder).as_posix(), staged, "tracking")


def _in_a_while(seconds: float, then: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(seconds, then)
    timer.daemon = True
    timer.start()
    return timer


def _leave(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
