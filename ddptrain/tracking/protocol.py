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

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from ddptrain.tracking.items import Item

# How a rank ended: it finished its work; its code failed; it saved a checkpoint after a preemption notice; or it was
# stopped before its end, for example because another rank failed.
State = Literal["finished", "failed", "preempted", "crashed"]


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
