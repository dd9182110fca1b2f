"""What the driver orders and what a worker reports: frozen dataclasses that travel as JSON, never as pickles."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from ddptrain import __version__
from ddptrain.errors import ClusterError

LOST_AFTER_S = 60.0  # without a word from a worker or the scheduler: the default of failure.lost_after_s
DIST_TIMEOUTS_S = {"nccl": 600.0, "gloo": 1800.0}  # torch's own, of a collective operation
SLOT_RESOURCE = "slot"  # Dask's abstract resource: room for one rank on a worker
WORKER_METRIC = "ddptrain"  # what our own workers tell of themselves with each heartbeat
GPU_RESOURCE = "GPU"  # how many of a worker's slots have a device
# A rank that takes no orders writes its stacks to this file in its staging folder on this signal (see faulthandler).
STACKS_SIGNAL = signal.SIGRTMIN + 7
STACKS_DUMP = "stacks-dump"
ERROR_FILE = "error.json"  # in the staging folder: where torch elastic's record() writes a script's error
STACKS_FOLDER = "stacks"  # below artifacts/


def stacks_path(attempt: int, rank: int) -> str:
    """Where the stacks of a rank are kept below artifacts/."""
    again = f".attempt-{attempt}" if attempt > 1 else ""
    return f"{STACKS_FOLDER}/rank-{rank}{again}.txt"


def attached_plugin(run_id: str) -> str:
    """Name of the worker plugin that stands for a run on its workers; with it goes all that the run has left there."""
    return f"ddptrain-{run_id}"


def key_prefix(run_id: str) -> str:
    """What the Dask keys of all of a run's ranks begin with."""
    return f"ddptrain/{run_id}/"


class _Message:
    """JSON in, JSON out, for the dataclasses below."""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))  # type: ignore[call-overload]

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises ClusterError where the other side is of another version."""
        fields = json.loads(text)
        if unknown := fields.keys() - {known.name for known in dataclasses.fields(cls)}:  # type: ignore[arg-type]
            raise ClusterError(
                f"ddptrain {__version__} in {sys.prefix} does not know {', '.join(sorted(unknown))}: driver and "
                "workers are of different versions; start the cluster again with the driver's"
            )
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class RankSpec(_Message):
    """Everything that one rank needs to run. `env` and `tracking` may hold secrets: they are left out of repr.

    The worker fills in, from `slot` and what it knows of its host: `gpu`, the one device that the rank sees (an entry
    for CUDA_VISIBLE_DEVICES; None on the CPU), `staging`, `cpu_threads`, the rest of `env`, and `environment` (what of
    it was tuned, and by whom). `shared` says that driver and worker see the same file system; without `use_gpu` the
    rank trains on the CPU, whatever its slot has. `sys_path` is where modules are looked for first; for a
    `built_in` workload it comes last, and is empty unless the user has written a tracker.

    A rank is a function (`workload`, with `params`) or a program (`script`, as it was typed, or `module`, with
    `args`), which makes its own process group and sees `local_gpus`, the devices of all of the run's ranks on its host
    in the order of their local ranks.

    `tracking` is empty where no tracker is on, else {"strict", "queue", "config" (the run's, secrets left out), "name",
    "resumed_from" (the step of the checkpoint, or None), "folder" ("" where the run directory is not to be seen from
    the worker: below `staging` then), "trackers": [{"name", "options", "finish_timeout_s", "told"}]}; the driver's
    driver/tracking/setup.py makes it, tracking/manager.py uses it.
    """

    run_id: str
    attempt: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    slot: int
    workload: str
    params: Mapping[str, Any]
    dist_backend: str
    dist_timeout_s: float
    grace_s: float
    every_epochs: int | None
    every_steps: int | None
    every_s: float | None
    workdir: str
    sys_path: tuple[str, ...] = ()
    built_in: bool = False
    master_addr: str = ""
    master_port: int = 0
    shared: bool = True
    use_gpu: bool = True
    max_restarts: int = 0
    asynchronous: bool = True
    code: str = ""  # the hash of the code that has come along, "" where the rank sees the project itself
    prepare: Mapping[str, Any] = field(default_factory=dict)
    max_failures: int = 5
    gpu: str | None = None
    staging: str = ""
    resume_from: str = ""
    inputs: str = ""  # the folder with what the driver has prepared, "" where there is none
    cpu_threads: int = 1
    environment: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    hosts: int = 1
    local_gpus: tuple[str, ...] = ()
    script: str = ""
    module: str = ""
    args: tuple[str, ...] = ()
    local_rank_arg: bool = False
    full_traceback: bool = False
    tracking: Mapping[str, Any] = field(default_factory=dict, repr=False)
    alive_s: float = 2.0  # without another word of the rank, until its worker tells that it is there

    @property
    def is_script(self) -> bool:
        """Whether the rank is a program of its own, not a function."""
        return bool(self.script or self.module)

    @property
    def key(self) -> str:
        """The Dask key of the rank's task; unique for every attempt of every run."""
        return f"{key_prefix(self.run_id)}{self.attempt}/{self.rank}"


@dataclass(frozen=True, slots=True)
class RankExit(_Message):
    """How a rank's process ended: `status` is its exit code, or minus the signal that killed it.

    `oom` says why the kernel has killed it, in words that begin with "out of memory" or "likely out of memory";
    `timed_out` that NCCL's watchdog has, for a collective operation that did not end.
    """

    rank: int
    pid: int
    status: int
    time_ns: int
    log_size: int
    events_size: int
    oom: str = ""
    timed_out: bool = False

    @property
    def text(self) -> str:
        """In words: `exit code 1`, `killed by SIGSEGV`."""
        return describe_status(self.status) + (f": {self.oom}" if self.oom else "")


def describe_status(status: int) -> str:
    """Exit code or signal in words."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
