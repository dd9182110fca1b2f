"""The request of the driver to a worker to start a rank: a frozen dataclass that is sent as JSON, never as a pickle."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self, cast

from ddptrain.config.rank_settings import StepProfile, TrackerSpec
from ddptrain.errors import ClusterError, UsageError
from ddptrain.file_ops import write_atomic
from ddptrain.version import __version__

if TYPE_CHECKING:
    from ddptrain.config.run_config import RunConfig

DIST_TIMEOUTS_S = {"nccl": 600.0, "gloo": 1800.0}  # torch's own time limits of a collective operation
SLOT_RESOURCE = "slot"  # a Dask resource: room for one rank on a worker
WORKER_METRIC = "ddptrain"  # the metric that our own workers send with each heartbeat
GPU_RESOURCE = "GPU"  # how many slots of a worker have a GPU
# A rank writes its stacks to STACKS_DUMP in its staging folder: on a command, with a last line that begins with
# STACKS_END and is JSON, or, if it reads no commands, by faulthandler because of STACKS_SIGNAL, without that line.
STACKS_SIGNAL = signal.SIGRTMIN + 7
STACKS_DUMP = "stacks-dump"
STACKS_END = "collective operations: "
ERROR_FILE = "error.json"  # in the staging folder: where torch elastic's record() writes a script's error
STACKS_FOLDER = "stacks"  # below artifacts/
DEBUG_TIMEOUT_S = 7 * 86_400.0  # of collective operations while somebody debugs a rank
PARAM = "weights"  # a parameter of the built-in workloads
PREFIX = "model:"  # the prefix of the parameter's value: model:dogs@champion
FILE = "weights.safetensors"
_RECORD = "weights.json"


def stacks_path(attempt: int, rank: int) -> str:
    """Return the path of a rank's stacks below artifacts/."""
    suffix = f".attempt-{attempt}" if attempt > 1 else ""
    return f"{STACKS_FOLDER}/rank-{rank}{suffix}.txt"


def attached_plugin(run_id: str) -> str:
    """Return the name of a run's worker plugin; removing the plugin removes all files of the run."""
    return f"ddptrain-{run_id}"


def key_prefix(run_id: str) -> str:
    """Return the prefix of the Dask keys of a run's ranks."""
    return f"ddptrain/{run_id}/"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a rank runs, and its position among the other ranks. The names are those of torchrun.

    `slot` is the number of the slot on its worker. `hosts` is the number of hosts of the run. `local_gpus` are the
    devices of all ranks of the run on this host, in the order of their local ranks. `use_gpu` is False if the rank
    trains on the CPU although its slot has a GPU. `shared` is True if the worker sees the run directory.
    """

    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    slot: int
    hosts: int = 1
    local_gpus: tuple[str, ...] = ()
    use_gpu: bool = True
    shared: bool = True


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """How ranks find each other: the torch.distributed backend, and the TCPStore at `master_addr`:`master_port`.

    `timeout_s` limits each collective operation. `master_port` is 0 until the worker of rank 0 has opened the store.
    """

    backend: str
    timeout_s: float
    master_addr: str = ""
    master_port: int = 0


@dataclass(frozen=True, slots=True)
class Code:
    """What the rank executes: a function (`workload`, called with `params`) or a program.

    A program is a file (`script`, as the user typed it) or a `module`. It gets `args`, creates its own process group,
    and sees the devices `Placement.local_gpus`. `sys_path` are folders at the beginning of the module search path; for
    a `built_in` workload they are at its end, and there are none unless the user wrote a tracker. `content_hash`
    identifies the copy of the project's code on this host; it is "" if the worker sees the project itself. `inputs` is
    the folder of the inputs that the driver prepared, or "".
    """

    workload: str
    workdir: str
    params: Mapping[str, Any] = field(default_factory=dict)
    script: str = ""
    module: str = ""
    args: tuple[str, ...] = ()
    sys_path: tuple[str, ...] = ()
    built_in: bool = False
    content_hash: str = ""
    inputs: str = ""
    full_traceback: bool = False

    @property
    def is_script(self) -> bool:
        """Whether the rank is a program of its own, not a function."""
        return bool(self.script or self.module)


@dataclass(frozen=True, slots=True)
class TrackingSpec:
    """The trackers of a rank, and the settings that they share.

    `config` is the run's configuration without secrets.
    `resumed_from` is the step of the checkpoint that the attempt starts from. `folder` is where trackers write, "" if
    the worker does not see the run directory (they then write below the staging folder).
    """

    trackers: tuple[TrackerSpec, ...]
    name: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    resumed_from: int | None = None
    folder: str = ""


@dataclass(frozen=True, slots=True)
class Debug:
    """The rank that somebody debugs: with pdb at the terminal of the command, or, if there is a `port`, with an editor.

    The editor connects to `address` and `port` on the rank's host.
    """

    rank: int
    port: int = 0
    address: str = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class HostSettings:
    """The part of a rank spec that the worker adds.

    `gpu` is the only device that the rank sees (an entry for CUDA_VISIBLE_DEVICES), None on the CPU. `environment`
    lists the variables that were tuned, with their values and who chose them.
    """

    gpu: str | None = None
    staging: str = ""
    cpu_threads: int = 1
    environment: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankSpec:
    """Everything that one rank needs to run.

    `config` has the sections of a RunConfig, as `spec.config.failure.nan`: plain values, without the methods and
    properties of config/run_config.py, whose import would delay a rank that starts cold by some tenths of a second.
    `env` and `params` are not among them, because `env` and `code` have those of this rank. `resume_from` is the folder
    of the checkpoint to load, that of step `resume_step`; "" to start from scratch. `env` are the environment variables
    of the run; the worker adds the rest. `env` and `tracking` may contain secrets, so repr omits them. `debug` is the
    same for all ranks.
    """

    run_id: str
    attempt: int
    rank: int
    config: RunConfig = field(repr=False)
    placement: Placement
    group: ProcessGroup
    code: Code
    resume_from: str = ""
    resume_step: int = 0
    tracking: TrackingSpec | None = field(default=None, repr=False)
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    host: HostSettings = HostSettings()
    debug: Debug | None = None

    @property
    def profile(self) -> StepProfile | None:
        """The steps that the configuration asks to record."""
        found = self.config.profile
        return StepProfile(found.steps[0], found.steps[1], tuple(found.ranks or ())) if found is not None else None

    def with_port(self, port: int) -> RankSpec:
        """Return the spec with the port of the TCPStore."""
        return dataclasses.replace(self, group=dataclasses.replace(self.group, master_port=port))

    @property
    def key(self) -> str:
        """The Dask key of the rank's task; unique for every attempt of every run."""
        return f"{key_prefix(self.run_id)}{self.attempt}/{self.rank}"

    def to_json(self) -> str:
        """Return the spec as one line."""
        return _ENCODER.encode(self)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Decode a spec. Raises ClusterError if it is that of another version.

        The types are not checked: the driver has checked the values, and it may run any code on the worker anyway. So
        ranks, rank servers and workers start without pydantic, whose import costs 0.1 s.
        """
        try:
            raw = json.loads(text)
            spec: Self = _decoded(cls, {**raw, "config": sections(raw["config"])})
        except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
            raise ClusterError(
                f"ddptrain {__version__} in {sys.prefix} can't read the spec of a rank ({error}): driver and workers "
                "are of different versions; start the cluster again with the driver's"
            ) from error
        return spec


_PARTS = {
    "placement": Placement,
    "group": ProcessGroup,
    "code": Code,
    "tracking": TrackingSpec,
    "trackers": TrackerSpec,
    "host": HostSettings,
    "debug": Debug,
}


def _fields(part: Any) -> dict[str, Any]:
    return (
        vars(part) if isinstance(part, SimpleNamespace) else {name: getattr(part, name) for name in part.__match_args__}
    )


_ENCODER = json.JSONEncoder(default=_fields)


def sections(raw: Mapping[str, Any]) -> RunConfig:
    """Return the sections of a configuration, from its JSON data, as they are in a spec: with its fields only."""
    found = {name: SimpleNamespace(**each) if isinstance(each, dict) else each for name, each in raw.items()}
    return cast("RunConfig", SimpleNamespace(**found))


def _decoded(kind: Any, raw: dict[str, Any]) -> Any:
    """Return a dataclass from its JSON data; a list is a tuple there."""
    values = dict(raw)
    for name, value in raw.items():
        part = _PARTS.get(name)
        if isinstance(value, list):
            values[name] = tuple(_decoded(part, each) if part else each for each in value)
        elif part is not None and value is not None:
            values[name] = _decoded(part, value)
    return kind(**values)


@dataclass(frozen=True, slots=True)
class StartingWeights:
    """The version whose weights are in FILE, the SHA-256 of the file, and the classes of the version, if known."""

    model: str
    version: int
    sha256: str
    classes: tuple[str, ...] = ()

    @property
    def reference(self) -> str:
        """The value of the param that names this version."""
        return f"{PREFIX}{self.model}@{self.version}"

    def write(self, folder: Path) -> None:
        """Write the record into a folder. Raises OSError."""
        write_atomic(folder / _RECORD, f"{json.dumps(dataclasses.asdict(self))}\n".encode())

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Read the record of a folder; None if there is none, or it is damaged."""
        try:
            raw = json.loads((folder / _RECORD).read_bytes())
            return cls(raw["model"], raw["version"], raw["sha256"], tuple(raw["classes"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None


def names_model(weights: object) -> bool:
    """Return whether the value of a param names a model of the registry."""
    return isinstance(weights, str) and weights.startswith(PREFIX)


def weights_in(inputs: Path | None) -> Path:
    """Return the file with the weights in the inputs of a run. Raises UsageError if there is none."""
    if inputs is None or not (inputs / FILE).is_file():
        raise UsageError(
            f"params.{PARAM}: the weights of the model are missing in the run's inputs: `ddptrain train` fetches them "
            "for the workloads images and petnames; in a copy of one, name a file"
        )
    return inputs / FILE


def same_model(before: object, now: object) -> bool:
    """Return whether `now` is an alias of the model whose version number a run has recorded in `before`."""
    if not (isinstance(before, str) and isinstance(now, str) and names_model(before) and names_model(now)):
        return False
    model, _, number = before.partition("@")
    other, _, alias = now.partition("@")
    return model == other and number.isdecimal() and not alias.isdecimal()


def with_weights(params: Mapping[str, Any], reference: str) -> dict[str, Any]:
    """Return the params with other weights."""
    return {**params, PARAM: reference}
