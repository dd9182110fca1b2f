"""The actions that the attempt's state machine requests, as data. Ranks are given by number; loop.py executes them."""

from __future__ import annotations

from dataclasses import dataclass

from ddptrain.driver.failure.fault import Fault, Loss
from ddptrain.protocol.commands import Command
from ddptrain.protocol.events import CheckpointSaved, FileSaved
from ddptrain.protocol.worker_notices import OutputBytes, RankExit, SystemSample


class Action:
    """Base class of all actions."""


@dataclass(frozen=True, slots=True)
class SubmitRanks(Action):
    """Start these ranks, which join the TCPStore at `port`. 0: the worker of rank 0, the first of them, opens it."""

    ranks: tuple[int, ...]
    port: int = 0


@dataclass(frozen=True, slots=True)
class StopRanks(Action):
    """Send SIGTERM to these ranks, and SIGKILL after `grace_s`."""

    ranks: tuple[int, ...]
    grace_s: float


@dataclass(frozen=True, slots=True)
class SendCommand(Action):
    """Send a command to these ranks."""

    ranks: tuple[int, ...]
    command: Command


@dataclass(frozen=True, slots=True)
class ReadOutput(Action):
    """Read a rank's files up to these sizes.

    The answers are RankEvent messages, and OutputRead with `ended` or an error.
    """

    rank: int
    log_size: int
    events_size: int
    ended: RankExit | None = None


@dataclass(frozen=True, slots=True)
class ReceiveOutput(Action):
    """Add the bytes of a rank's files that came with a notice. The answers are those to ReadOutput."""

    output: OutputBytes


@dataclass(frozen=True, slots=True)
class ReadRest(Action):
    """Read the rest of a lost rank's files, if they can be reached. The answer is OutputRead with `loss`."""

    rank: int
    loss: Loss


@dataclass(frozen=True, slots=True)
class FetchArtifact(Action):
    """Store a checkpoint or a file of a rank in the run directory. The answer comes through the inbox."""

    rank: int
    event: CheckpointSaved | FileSaved


@dataclass(frozen=True, slots=True)
class AvoidWorker(Action):
    """Reserve no slot of this worker for the next attempt. If the worker is `lost`, also send it no more messages."""

    address: str
    lost: bool = False


@dataclass(frozen=True, slots=True)
class RejectNotice(Action):
    """Count a notice that is not valid for this attempt."""

    reason: str


@dataclass(frozen=True, slots=True)
class RecordFault(Action):
    """Record the fault of a rank."""

    fault: Fault


@dataclass(frozen=True, slots=True)
class ShowCause(Action):
    """Show the root cause now, because the end of the run, which names it, is not near."""

    fault: Fault


@dataclass(frozen=True, slots=True)
class RecordTraining(Action):
    """Record that every rank has entered the workload."""


@dataclass(frozen=True, slots=True)
class RecordRankEnd(Action):
    """Record that a rank's process has ended, or is lost; `stopped`: because the driver stopped it."""

    rank: int
    ok: bool
    stopped: bool


@dataclass(frozen=True, slots=True)
class RecordStored(Action):
    """Record that a checkpoint (with its step) or another file of a rank is in the run directory."""

    rank: int
    path: str
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Warn(Action):
    """Show and record a warning."""

    text: str


@dataclass(frozen=True, slots=True)
class Announce(Action):
    """Show and record information that is not a warning."""

    text: str
    status: str = ""  # what a live display shows from now on


@dataclass(frozen=True, slots=True)
class ShowStatus(Action):
    """Show what the attempt waits for; `silence`: only on a live display, for how long a rank has not reported."""

    text: str
    silence: bool = False


@dataclass(frozen=True, slots=True)
class RecordSystem(Action):
    """Record a sample of the system metrics."""

    sample: SystemSample
