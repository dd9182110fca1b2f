"""Messages of the cluster check: facts of a host (worker to driver), the plan, and measurements (rank to driver)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from ddptrain.protocol.typed_json import JsonMessage

LINE_PREFIX = "ddptrain-check "  # a line of a rank's log with a measurement begins with this
WAITED = "waited"  # a value of each measurement: the fraction of its time in which the rank was ready but had no core
_MAX_TEXT = 500
_NETWORK_VARIABLES = ("NCCL_", "GLOO_", "FI_", "UCX_")


def network_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of NCCL, gloo and the libraries below them."""
    return {name: value for name, value in env.items() if name.startswith(_NETWORK_VARIABLES)}


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface. speed_mbit is 0 if the system does not know it."""

    name: str
    addresses: tuple[str, ...]
    speed_mbit: int
    mtu: int
    is_up: bool


@dataclass(frozen=True, slots=True)
class Fabric:
    """A port of an RDMA device. kind: InfiniBand, RoCE, EFA or the kernel's name of the link layer."""

    device: str
    kind: str
    is_active: bool
    gbit_s: float


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """A GPU as NVML reports it; None or "" if the device or the driver does not report a value.

    throttled: reasons why its clocks are reduced by the hardware. ecc_errors: uncorrected, since the driver was loaded.
    nvlinks: how many NVLink links are active.
    """

    index: int
    uuid: str
    name: str
    memory_mb: int
    memory_used_mb: int
    ecc_errors: int | None = None
    remap_pending: bool | None = None
    throttled: tuple[str, ...] = ()
    temperature_c: int | None = None
    pcie_gen: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    nvlinks: int = 0


@dataclass(frozen=True, slots=True)
class HostFacts(JsonMessage):
    """The identity and the resources of a worker's host. Sizes in MB (10^6 bytes).

    versions: of Python, packages and driver, by name. interface: the one with the worker's address. routes: destination
    and interface, `default` for the default route. network_env: the variables of NCCL and gloo that ranks get.
    problems: what could not be read, one line each.
    """

    hostname: str
    versions: Mapping[str, str]
    cores: int
    memory_mb: int
    memory_free_mb: int
    shm_mb: int
    shm_free_mb: int
    scratch: str
    scratch_mb: int
    scratch_free_mb: int
    scratch_write_mb_s: float | None
    open_files: int
    interface: str
    interfaces: tuple[Interface, ...] = ()
    routes: tuple[str, ...] = ()
    fabrics: tuple[Fabric, ...] = ()
    gpus: tuple[GpuFacts, ...] = ()
    network_env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    problems: tuple[str, ...] = ()

    def with_env(self, env: Mapping[str, str]) -> HostFacts:
        """Return the facts with the network variables in `env`, those that the run sets, added."""
        return dataclasses.replace(self, network_env={**self.network_env, **network_variables(env)})


@dataclass(frozen=True, slots=True)
class ProbePlan(JsonMessage):
    """What the ranks measure. gemm_s, copy_s and reduce_s are the durations of the measurements in seconds.

    rounds: the pairs of hosts (their node ranks) that measure at the same time. timeout_s: a connection or a collective
    operation that takes longer has failed. most_bytes: the largest size of an all-reduce. gpu: the ranks have GPUs.
    only: "pairs" measures only the pairs, "all" only the all-reduce of all ranks. nccl_pairs: all ranks of both hosts
    of a pair measure with NCCL.
    """

    rounds: tuple[tuple[tuple[int, ...], ...], ...]
    gemm_s: float
    copy_s: float
    reduce_s: float
    timeout_s: float
    most_bytes: int
    gpu: bool
    nccl_pairs: bool = False
    only: str = ""


@dataclass(frozen=True, slots=True)
class ProbeLine(JsonMessage):
    """One line of a rank: the start of a stage, or its result.

    stage: start, gemm, copy, local, pair, all or end. peer: the node rank of the other host of a pair, or -1. status:
    begun, done, failed or skipped. values: numbers by name. text: the error, or a remark on the result.
    """

    stage: str
    status: str
    peer: int = -1
    values: Mapping[str, float] = dataclasses.field(default_factory=dict)
    text: str = ""

    def line(self) -> str:
        """Return the message as a line for the rank's log."""
        return f"{LINE_PREFIX}{dataclasses.replace(self, text=self.text[:_MAX_TEXT]).to_json()}\n"


def lines_of(log: bytes) -> tuple[tuple[ProbeLine, ...], str]:
    """Return the measurements in the log of a rank, and the last other line, for example that of a traceback."""
    measurements: list[ProbeLine] = []
    other = ""
    for text in log.decode("utf-8", "replace").splitlines():
        if text.startswith(LINE_PREFIX):
            try:
                measurements.append(ProbeLine.from_json(text.removeprefix(LINE_PREFIX)))
            except ValueError:
                other = text
        elif text.strip():
            other = text.strip()
    return tuple(measurements), other[:_MAX_TEXT]
