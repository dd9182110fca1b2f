"""The interface of a tracker: three methods, called one after the other in a thread of the tracker.

The methods may raise any exception, be slow, or never return: training and the other trackers continue. The thread also
imports the tracker's module, so put slow imports at the top of the module.

    class Mine:
        def __init__(self, options):     # the `options` of its entry in tracking.other
            ...

The configuration names the tracker in `tracking.other`: package.module:Mine, or a name of the entry point group
`ddptrain.trackers`.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

# How a rank ended: it finished its work; its code failed; it saved a checkpoint after a preemption notice; or it was
# stopped before its end, for example because another rank failed.
State = Literal["finished", "failed", "preempted", "crashed"]


# --- what ranks pass to trackers; times are nanoseconds of the host's wall clock ---


@dataclass(frozen=True, slots=True)
class Numbers:
    """The values of one ctx.log call."""

    time_ns: int
    values: Mapping[str, float]
    step: int | None = None
    epoch: float | None = None


@dataclass(frozen=True, slots=True)
class Image:
    """An image as a PNG file at `path`, which exists until the tracker's log() returns."""

    time_ns: int
    name: str
    path: Path
    caption: str = ""
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of numbers, text, None and images; each row is as long as `columns`."""

    time_ns: int
    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[float | str | bool | Image | None, ...], ...]
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint in `folder`, which exists until log() returns. For trackers with `checkpoints: true`."""

    time_ns: int
    step: int
    folder: Path
    metrics: Mapping[str, float]


Item = Numbers | Image | Table | Checkpoint


@dataclass(frozen=True, slots=True)
class Facts:
    """What a tracker gets when it starts.

    The tracker may write into `folder`, which exists and becomes tracking/ in the run directory. If `resumed`, an
    earlier attempt (maybe of another command) has used the same tracker run, which continues. Items after the step
    `resumed_from` are then logged again; None means all items, unless the user's code resumes by itself. `from_driver`
    are settings that the driver adds, such as the id of a run that all ranks share. `tell` prints a line for the user.
    `found` records in run.json what the tracker has created, such as the URL of a run.
    """

    run_id: str
    name: str
    attempt: int
    rank: int
    world_size: int
    local_rank: int
    node_rank: int
    hosts: int
    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)  # the complete configuration without secrets
    resumed: bool = False
    resumed_from: int | None = None
    from_driver: Mapping[str, Any] = field(default_factory=dict)
    tell: Callable[[str], None] = print
    found: Callable[[Mapping[str, str]], None] = lambda found: None


class Tracker(Protocol):
    """Receives what a rank logs: start() is called first, finish() last, each once."""

    def start(self, facts: Facts) -> None:
        """Start to record this run, or continue it."""

    def log(self, item: Item) -> None:
        """Record one item. Files that the item names are deleted when this method has returned."""

    def finish(self, state: State) -> None:
        """Write or send everything that is left, and record how the rank ended. The time for this is limited."""


class SharedFiles:
    """Files or folders that are deleted when each of their `readers` has called release()."""

    def __init__(self, paths: Sequence[Path], readers: int) -> None:
        self._paths = paths
        self._readers = readers
        self._lock = threading.Lock()

    def release(self) -> None:
        """Count a reader as done; after the last one, delete the files. Never raises."""
        with self._lock:
            self._readers -= 1
            if self._readers > 0:
                return
        for path in self._paths:
            with suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def link_or_copy(source: Path, target: Path) -> None:
    """Create a hard link, or a copy if the file system does not allow one. Raises OSError."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
