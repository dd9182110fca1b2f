"""What a tracker is: three methods, called one after the other from a thread that is this tracker's alone.

They may raise what they like, be slow, or never return: training goes on, and so do the other trackers. What takes
long to import stands at the top of the tracker's module, which is imported in that thread, too.

    class Mine:
        def __init__(self, options):     # tracking.other's `options`
            ...

It is named in `tracking.other` as package.module:Mine, or under a name of the entry point group `ddptrain.trackers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from ddptrain.tracking.items import Item

# How a rank's part ended: its work is done; its code failed; it saved and ended as it was told to; or it was stopped
# in the middle, for another rank's failure, say.
State = Literal["finished", "failed", "preempted", "crashed"]


@dataclass(frozen=True, slots=True)
class Facts:
    """What a tracker is told when it starts.

    It may write into `folder`, which is there and becomes tracking/ in the run directory. `resumed` says that an
    attempt before, maybe of another command, has been in the same tracker's run, which goes on; what it logged after
    the step `resumed_from` comes again (None: all of it, unless the code has a way of its own to go on). `told` is what
    the driver has made for this tracker, such as the id of a run that all ranks share. `tell` shows the person a line;
    `found` puts what the tracker has made, such as a run's url, into run.json.
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
    config: Mapping[str, Any] = field(default_factory=dict)  # the run's, resolved, secrets left out
    resumed: bool = False
    resumed_from: int | None = None
    told: Mapping[str, Any] = field(default_factory=dict)
    tell: Callable[[str], None] = print
    found: Callable[[Mapping[str, str]], None] = lambda found: None


class Tracker(Protocol):
    """A sink of what a rank logs; `start` comes first, `finish` last, and each once."""

    def start(self, facts: Facts) -> None:
        """Begin, or go on in, this run's record."""

    def log(self, item: Item) -> None:
        """Take one thing that was logged; files that it names are gone once this returns."""

    def finish(self, state: State) -> None:
        """Bring everything to where it belongs, and tell how the rank has ended; its time is limited."""
