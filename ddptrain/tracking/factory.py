"""Creates a rank's trackers from its spec. Each tracker's class is imported in the tracker's own thread."""

from __future__ import annotations

import dataclasses
import importlib
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from ddptrain.config.plugin_names import TRACKERS, install_tracker, tracker_target
from ddptrain.protocol import events
from ddptrain.protocol.rank_spec import RankSpec, TrackerSpec, TrackingSpec
from ddptrain.redact import hide_known, known_secrets
from ddptrain.tracking.items import Checkpoint, Item, Model
from ddptrain.tracking.manager import TrackerManager
from ddptrain.tracking.protocol import Facts, Tracker
from ddptrain.tracking.tracker_thread import Emit, TrackerDefinition

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
    return TrackerManager(definitions, emit, temp_folder, strict=tracking.strict)


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
    declined: list[type[Item]] = [] if options.get("checkpoints") is True else [Checkpoint]
    if options.get("watch", "off") in ("off", False, None):
        declined.append(Model)

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
        name, lambda: cast(Tracker, load(name)(options)), facts, tracker.finish_timeout_s, tuple(declined)
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
            if name in TRACKERS and error.name == name:
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
