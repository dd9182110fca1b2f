"""Facts of a host: what a worker's host tells the driver for `ddptrain doctor`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from ddptrain.protocol.typed_json import JsonMessage


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface. speed_mbit is 0 if the system does not know it."""

    name: str
    speed_mbit: int
    is_up: bool


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """A GPU as NVML reports it; None if the device or the driver does not report a value. Memory in MB (10^6 bytes).

    throttled: reasons why its clocks are reduced by the hardware. ecc_errors: uncorrected, since the driver was loaded.
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


@dataclass(frozen=True, slots=True)
class HostFacts(JsonMessage):
    """The identity and the resources of a worker's host. Sizes in MB (10^6 bytes).

    versions: of Python, packages and driver, by name. interface: the one with the worker's address. network_env: the
    variables of NCCL and gloo that ranks get. listens: whether a process can listen on a port of that address.
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
    open_files: int
    interface: str
    interfaces: tuple[Interface, ...] = ()
    gpus: tuple[GpuFacts, ...] = ()
    network_env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    problems: tuple[str, ...] = ()
