"""Passes what a rank logs to all of its trackers. No tracker blocks training or another tracker."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from ddptrain.tracking.items import Checkpoint, Image, Item, SharedFiles, Table, TempFolder
from ddptrain.tracking.protocol import State
from ddptrain.tracking.tracker_thread import Emit, TrackerDefinition, TrackerThread


class TrackerManager:
    """The trackers of a rank, each in a thread of its own. In a forked child process all methods do nothing.

    `emit` receives events for the driver. `temp_folder` is a folder of this rank for files that trackers read.
    """

    def __init__(
        self,
        trackers: Sequence[TrackerDefinition],
        emit: Emit,
        temp_folder: Path,
        *,
        queue: int = 10_000,
        strict: bool = False,
    ) -> None:
        self._pid = os.getpid()
        self._strict = strict
        self._threads = [TrackerThread(tracker, emit, limit=queue, strict=strict) for tracker in trackers]
        self._temp = TempFolder(temp_folder)
        self.ended = False
        self._wait_lock = threading.Lock()
        self.unfinished: list[str] = []  # trackers that did not end in time
        for thread in self._threads:
            thread.start()

    @property
    def error(self) -> str:
        """The first error of a tracker, which makes the rank fail; "" unless tracking.strict is true."""
        errors = [f"{thread.name}: {thread.error}" for thread in self._threads if thread.error]
        return errors[0] if errors and self._strict else ""

    def wants(self, kind: type[Item]) -> bool:
        """Return whether any tracker takes items of that type."""
        return bool(self._threads_for(kind))

    def put(self, item: Item) -> None:
        """Pass an item to every tracker that takes it. Never waits, never raises."""
        for thread in self._threads_for(type(item)):
            thread.put(item)

    def keep(self, path: Path, suffix: str = "") -> Path:
        """Link a file or folder, which the driver may move, and return the link's path. Raises OSError.

        `suffix` is that of the link, by default the suffix of the file.
        """
        return self._temp.add(path, suffix)

    def put_with_files(self, item: Image | Table | Checkpoint, *kept: Path) -> None:
        """Pass an item to every tracker that takes it; its files, from keep(), are deleted after the last one."""
        threads = self._threads_for(type(item))
        files = SharedFiles(kept, len(threads))
        for thread in threads:
            thread.put(item, files)
        if not threads:
            files.release()

    def end(self, state: State, within_s: float = 3600.0) -> float:
        """Make the trackers finish; return the seconds that the slowest may take.

        Each tracker has its own timeout, but no more than `within_s`. Later calls do not change the state.
        """
        if os.getpid() != self._pid:
            return 0.0
        self.ended = True
        return max((thread.end(state, within_s) for thread in self._threads), default=0.0)

    def wait(self) -> None:
        """Wait until the trackers have finished or their time is over. Must be called after end()."""
        if os.getpid() != self._pid:
            return
        with self._wait_lock:  # called by the main thread, and by the thread that receives the command `stop`
            if not self.unfinished:
                self.unfinished = [thread.name for thread in self._threads if not thread.join()]
            self._temp.delete()

    def _threads_for(self, kind: type[Item]) -> list[TrackerThread]:
        if self.ended or os.getpid() != self._pid:
            return []
        return [thread for thread in self._threads if thread.wants(kind)]
