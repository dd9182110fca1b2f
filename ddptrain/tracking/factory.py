"""Creates a rank's trackers from its spec. Each tracker's class is imported in the tracker's own thread."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import os
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from ddptrain.config.sections.tracking import TRACKERS, install_tracker, tracker_target
from ddptrain.protocol import events
from ddptrain.protocol.rank_spec import RankSpec, TrackerSpec, TrackingSpec
from ddptrain.redact import hide_known, known_secrets
from ddptrain.tracking.items import Checkpoint, Image, Item, SharedFiles, Table, link_or_copy
from ddptrain.tracking.protocol import Facts, State, Tracker
from ddptrain.tracking.tracker_thread import Emit, TrackerDefinition, TrackerThread

FOLDER = "tracking"  # below the staging folder, if the rank does not see the run directory
_TEMP_FOLDER = "tracking-temp"  # below the staging folder
_FORK_WAIT_S = 5.0

_importing = threading.RLock()


def start_trackers(spec: RankSpec, emit: Emit) -> TrackerManager | None:
    """Start the trackers of a rank; return None if it has none."""
    tracking = spec.tracking
    if tracking is None:
        return None
    _delay_forks_during_imports()
    emit = _redacting(emit, [tracker.options for tracker in tracking.trackers])
    definitions = [_definition(tracker, tracking, spec, emit) for tracker in tracking.trackers]
    temp_folder = Path(spec.host.staging) / _TEMP_FOLDER
    return TrackerManager(definitions, emit, temp_folder)


def _redacting(emit: Emit, options: list[Mapping[str, Any]]) -> Emit:
    """Return `emit` such that it removes the secrets of the trackers' options, which exceptions may contain."""
    secrets = known_secrets(options)

    def emit_redacted(event: events.Event) -> None:
        fields = {field.name: hide_known(getattr(event, field.name), secrets) for field in dataclasses.fields(event)}
        emit(dataclasses.replace(event, **fields))

    return emit_redacted if secrets else emit


def tracking_folder(spec: RankSpec) -> Path:
    """Return the folder of a rank's trackers: tracking/ in the run directory, or one that is copied there later."""
    return Path((spec.tracking and spec.tracking.folder) or Path(spec.host.staging) / FOLDER)


def _definition(tracker: TrackerSpec, tracking: TrackingSpec, spec: RankSpec, emit: Emit) -> TrackerDefinition:
    name, options = tracker.name, tracker.options
    declined: tuple[type[Item], ...] = () if options.get("checkpoints") is True else (Checkpoint,)

    def tell(text: str) -> None:
        with suppress(Exception):  # a full disk; it is reported elsewhere
            emit(events.Note(time.time_ns(), f"{name}: {text}"))

    def found(created: Mapping[str, str]) -> None:
        with suppress(Exception):  # a full disk; it is reported elsewhere
            emit(events.Tracked(time.time_ns(), name, {str(key): str(value) for key, value in created.items()}))

    facts = Facts(
        run_id=spec.run_id,
        name=tracking.name,
        attempt=spec.attempt,
        rank=spec.rank,
        world_size=spec.placement.world_size,
        local_rank=spec.placement.local_rank,
        node_rank=spec.placement.node_rank,
        hosts=spec.placement.hosts,
        folder=tracking_folder(spec),
        config=tracking.config,
        resumed_from=tracking.resumed_from,
        resumed=spec.attempt > 1,  # resuming a run in another command also increases the attempt
        from_driver=tracker.from_driver,
        tell=tell,
        found=found,
    )
    return TrackerDefinition(
        name, lambda: cast(Tracker, load(name)(options)), facts, tracker.finish_timeout_s, declined
    )


def load(name: str) -> type[Any]:
    """Import the class of a tracker.

    Raises ImportError (it names the package to install), AttributeError or UsageError.
    """
    module, _, attribute = tracker_target(name).partition(":")
    with _importing:
        try:
            target: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if name in TRACKERS.built_in and error.name == name:
                raise ImportError(f"the package {name} is not installed here: {install_tracker(name)}") from error
            raise
    for part in attribute.split("."):
        target = getattr(target, part)
    return cast("type[Any]", target)


def _delay_forks_during_imports() -> None:
    """Delay forks (of DataLoader workers) during an import: the child would wait forever for the import's lock.

    Only the first fork that meets a long import waits, and at most 5 s.
    """
    fork = threading.local()  # `holds`: this thread holds the lock
    wait_s = [_FORK_WAIT_S]

    def before() -> None:
        fork.holds = _importing.acquire(timeout=wait_s[0])
        if not fork.holds:
            wait_s[0] = 0.0

    def after() -> None:
        if fork.holds:
            _importing.release()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=after)


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
    ) -> None:
        self._pid = os.getpid()
        self._temp_folder, self._kept = temp_folder, itertools.count()
        self.ended = False
        self._wait_lock = threading.Lock()
        self.unfinished: list[str] = []  # trackers that did not end in time
        self._threads = [TrackerThread(tracker, emit, limit=queue) for tracker in trackers]

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
        self._temp_folder.mkdir(parents=True, exist_ok=True)
        kept = self._temp_folder / f"{next(self._kept)}"
        if path.is_dir():
            kept.mkdir()
            for file in path.iterdir():
                link_or_copy(file, kept / file.name)
        else:
            kept = kept.with_suffix(suffix or path.suffix)
            link_or_copy(path, kept)
        return kept

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
            shutil.rmtree(self._temp_folder, ignore_errors=True)

    def _threads_for(self, kind: type[Item]) -> list[TrackerThread]:
        if self.ended or os.getpid() != self._pid:
            return []
        return [thread for thread in self._threads if thread.wants(kind)]
