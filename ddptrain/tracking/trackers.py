"""The trackers of a rank: each runs in a thread of its own, so that its errors and delays affect nothing else."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import math
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from ddptrain.config.rank_settings import TrackerSpec
from ddptrain.config.sections.tracking import TRACKERS, install_tracker, tracker_target
from ddptrain.errors import one_line
from ddptrain.protocol import events
from ddptrain.protocol.rank_spec import RankSpec, TrackingSpec
from ddptrain.redact import hide_known, known_secrets
from ddptrain.tracking.protocol import Checkpoint, Facts, Image, Item, SharedFiles, State, Table, Tracker, link_or_copy

FOLDER = "tracking"  # below the staging folder, if the rank does not see the run directory
_TEMP_FOLDER = "tracking-temp"  # below the staging folder
_FORK_WAIT_S = 5.0
_POLL_S = 0.1  # the thread polls for items, so that put() in the training thread stays fast
_JOIN_S = 0.25
_MAX_FAILURES = 3  # in a row; then the tracker is turned off
_DRAIN_SHARE = 0.5  # the share of the time for the end that is for items in the queue

Emit = Callable[[events.Event], None]
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


@dataclass(frozen=True, slots=True)
class TrackerDefinition:
    """A tracker to run. `make` imports and creates it; items of the `declined` types are not passed to it."""

    name: str
    make: Callable[[], Tracker]
    facts: Facts
    finish_timeout_s: float = 30.0
    declined: tuple[type[Item], ...] = (Checkpoint,)


class TrackerThread:
    """Takes items without waiting, and passes them to the tracker in a thread."""

    def __init__(self, definition: TrackerDefinition, emit: Emit, *, limit: int) -> None:
        self.name = definition.name
        self._definition, self._emit, self._limit = definition, emit, limit
        self._queue: deque[tuple[Item, SharedFiles | None]] = deque()
        self._received = self._dropped = self._failures = self._failures_in_a_row = 0
        self._is_off = False
        self._last_error = ""
        self._ending = threading.Event()
        self._reported_at_end = self._abandoned = False
        self._lock = threading.Lock()
        self._state: State = "finished"
        self._deadline = 0.0
        self._activity = "starting"
        self._thread = threading.Thread(target=self._run, name=f"ddptrain-{self.name}", daemon=True)
        self._thread.start()

    def wants(self, kind: type[Item]) -> bool:
        """Return whether the tracker is on and takes items of that type."""
        return not self._is_off and kind not in self._definition.declined

    def put(self, item: Item, files: SharedFiles | None = None) -> None:
        """Add an item to the queue, or drop it if the queue is full. Never waits, never raises."""
        self._received += 1
        if len(self._queue) < self._limit:
            self._queue.append((item, files))
            return
        self._dropped += 1
        if files is not None:
            files.release()
        if self._dropped == 1:
            text = f"{self.name} is too slow: {self._limit} items are in its queue, and further ones are dropped"
            self._warn(f"{text}; the run directory has them")

    def end(self, state: State, within_s: float) -> float:
        """Make the thread pass on the queued items and finish the tracker; return the seconds for that.

        The state of the first call counts. A further call can only shorten the time.
        """
        with self._lock:
            if not self._ending.is_set():
                self._state = state
                self._deadline = time.monotonic() + min(within_s, self._definition.finish_timeout_s)
                self._ending.set()
            else:
                self._deadline = min(self._deadline, time.monotonic() + within_s)
        return max(0.0, self._deadline - time.monotonic())

    def join(self) -> bool:
        """Wait until the tracker has finished or its time is over.

        Return whether it has finished; if not, report that.
        """
        while self._thread.is_alive() and (left_s := self._deadline - time.monotonic()) > 0:
            self._thread.join(min(left_s, _JOIN_S))  # in steps, because end() may shorten the time meanwhile
        if not self._thread.is_alive():
            return True
        missed = len(self._queue) + self._dropped
        rest = f", and {missed} items were not sent" if missed else ""
        with self._lock:
            self._abandoned = True
            quiet = self._reported_at_end
        what = f"has not ended in time ({self._activity}{rest})"
        self._report(what, "ddptrain does not wait any longer", quiet=quiet)
        return False

    # --- in the thread. A library may also raise SystemExit, which must not end the thread silently. ---

    def _run(self) -> None:
        tracker: Tracker | None = None
        try:
            self._definition.facts.folder.mkdir(parents=True, exist_ok=True)
            tracker = self._definition.make()
            tracker.start(replace(self._definition.facts, tell=self._tell))
        except BaseException as error:
            tracker, self._is_off = None, True
            self._report(f"could not start: {describe(error)}", "it is off")
        self._activity = "waiting"
        while not self._ending.wait(_POLL_S):
            self._drain(tracker)
        self._drain(tracker, time.monotonic() + _DRAIN_SHARE * (self._deadline - time.monotonic()))
        problems = []
        if tracker is not None:
            self._activity, was_off = "finishing", self._is_off
            try:
                tracker.finish(self._state)
            except BaseException as error:
                problems = [] if was_off else [f"could not finish: {describe(error)}"]
        consequence = "it lacks the last items" if problems else "it lacks them"
        if self._dropped:
            problems.append(f"was too slow for {self._dropped} of {self._received} items")
        if self._failures and not self._is_off:
            problems.append(f"has failed to take {self._failures} of {self._received} items: {self._last_error}")
        if problems and not self._abandoned:
            self._report(", and ".join(problems), consequence)

    def _drain(self, tracker: Tracker | None, until: float = math.inf) -> None:
        """Pass on all queued items. After `until` (monotonic), or if the tracker is off, drop them."""
        self._activity = "logging"
        while self._queue:
            item, files = self._queue.popleft()
            if tracker is not None and not self._is_off:
                if time.monotonic() > until:
                    self._dropped += 1
                else:
                    self._pass_on(tracker, item)
            if files is not None:
                files.release()
        self._activity = "waiting"

    def _pass_on(self, tracker: Tracker, item: Item) -> None:
        try:
            tracker.log(item)
            self._failures_in_a_row = 0
        except BaseException as error:
            self._failures += 1
            self._failures_in_a_row += 1
            self._last_error = describe(error)
            if self._failures_in_a_row >= _MAX_FAILURES:
                self._is_off = True
                self._report(f"has failed {self._failures_in_a_row} times in a row: {self._last_error}", "it is off")

    def _tell(self, text: str) -> None:
        """Pass on a line of the tracker. Only one of the tracker and join() reports an incomplete end."""
        with self._lock:
            if self._abandoned:
                return
            self._reported_at_end = self._reported_at_end or self._activity == "finishing"
        self._definition.facts.tell(text)

    def _report(self, what: str, consequence: str, *, quiet: bool = False) -> None:
        """Record an error, and print it unless `quiet`: the tracker has already printed it."""
        if not quiet:
            self._warn(f"{self.name} {what}; {consequence}, the run directory has everything")
        with suppress(Exception):  # a full disk; it is reported elsewhere
            self._emit(events.TrackerFailed(time.time_ns(), self.name, what[:2_000]))

    def _warn(self, text: str) -> None:
        with suppress(Exception):  # a full disk; it is reported elsewhere
            self._emit(events.Note(time.time_ns(), text[:4_000], "warning"))


def describe(error: BaseException) -> str:
    """Return the type of an exception and its first line, in at most 1,000 characters."""
    first, kind = one_line(error), type(error).__name__
    return kind if first == kind else f"{kind}: {first}"[:1_000]
