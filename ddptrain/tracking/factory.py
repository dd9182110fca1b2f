"""From what a rank is told of its trackers to the hub that runs them; their classes are imported in their threads."""

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

from ddptrain.config.registry import TRACKER_PACKAGES, TRACKERS, tracker_target
from ddptrain.protocol import events
from ddptrain.protocol.rank_spec import RankSpec, TrackerSpec, TrackingSpec
from ddptrain.redact import hide_known, known_secrets
from ddptrain.tracking.items import Checkpoint, Item, Model
from ddptrain.tracking.manager import Hub
from ddptrain.tracking.protocol import Facts, Tracker
from ddptrain.tracking.tracker_thread import Emit, Wanted

FOLDER = "tracking"  # below the staging folder, where the run directory is not to be seen
_LENT = "lent"  # likewise
_FORK_WAIT_S = 5.0

_importing = threading.RLock()


def open_hub(spec: RankSpec, emit: Emit) -> Hub | None:
    """The hub of a rank, its trackers starting; None where it has none."""
    tracking = spec.tracking
    if tracking is None:
        return None
    _keep_forks_apart()
    emit = _without_secrets(emit, [each.options for each in tracking.trackers])
    wanted = [_wanted(each, tracking, spec, emit) for each in tracking.trackers]
    lent = Path(spec.host.staging) / _LENT
    return Hub(wanted, emit, lent, queue=tracking.queue, strict=tracking.strict)


def _without_secrets(emit: Emit, options: list[Any]) -> Emit:
    """Tells the same, less what the options of trackers hide: a tracker's exceptions may name them."""
    secrets = known_secrets(options)

    def told(event: events.Event) -> None:
        fields = {field.name: hide_known(getattr(event, field.name), secrets) for field in dataclasses.fields(event)}
        emit(dataclasses.replace(event, **fields))

    return told if secrets else emit


def tracking_folder(spec: RankSpec) -> Path:
    """Where trackers of this rank write: the run directory's tracking/, or what will be brought there."""
    return Path((spec.tracking and spec.tracking.folder) or Path(spec.host.staging) / FOLDER)


def _wanted(chosen: TrackerSpec, tracking: TrackingSpec, spec: RankSpec, emit: Emit) -> Wanted:
    name, options = chosen.name, chosen.options
    declined: list[type[Item]] = [] if options.get("checkpoints") is True else [Checkpoint]
    if options.get("watch", "off") in ("off", False, None):
        declined.append(Model)
    facts = _facts(chosen, tracking, spec, emit)
    return Wanted(
        name,
        lambda: cast(Tracker, load(name)(options)),
        facts,
        chosen.finish_timeout_s,
        tuple(declined),
    )


def _facts(chosen: TrackerSpec, tracking: TrackingSpec, spec: RankSpec, emit: Emit) -> Facts:
    name = chosen.name

    def tell(text: str) -> None:
        with suppress(Exception):  # a full disk, which is told of elsewhere
            emit(events.Note(time.time_ns(), f"{name}: {text}"))

    def found(made: Mapping[str, str]) -> None:
        with suppress(Exception):
            emit(events.Tracked(time.time_ns(), name, {str(key): str(value) for key, value in made.items()}))

    return Facts(
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
        resumed=spec.attempt > 1,  # attempts are counted over all commands that the run was resumed with
        told=chosen.told,
        tell=tell,
        found=found,
    )


def load(name: str) -> type[Any]:
    """The class of a tracker, imported. Raises ImportError with what to do, AttributeError, UsageError."""
    module, _, attribute = tracker_target(name).partition(":")
    with _importing:
        try:
            found: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if name in TRACKERS and error.name == name:
                raise ImportError(
                    f"the package {name} is not installed here: pip install '{TRACKER_PACKAGES[name]}'"
                ) from error
            raise
    for part in attribute.split("."):
        found = getattr(found, part)
    return cast("type[Any]", found)


def _keep_forks_apart() -> None:
    """Let no process be forked (for a DataLoader) in the middle of an import: its child would wait for that forever.

    An import that takes long is waited for once.
    """
    mine = threading.local()
    waits_s = [_FORK_WAIT_S]

    def before() -> None:
        mine.holds = _importing.acquire(timeout=waits_s[0])
        if not mine.holds:
            waits_s[0] = 0.0

    def after() -> None:
        if mine.holds:
            _importing.release()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=after)
