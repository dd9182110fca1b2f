"""Identifies the host, the boot and the process-id namespace in which a process id or a loopback address is valid.

Several hosts may share a folder, so other hosts may read the record of a cluster or a run. On another host, the same
process id is another process, and 127.0.0.1 is another machine.
"""

from __future__ import annotations

import functools
import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from ddptrain.file_ops import text_or_empty

_PROC = Path("/proc")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MACHINE_IDS = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))
_PID_NAMESPACE = Path("/proc/self/ns/pid")
_MOUNT_NAMESPACE = Path("/proc/self/ns/mnt")


@dataclass(frozen=True, slots=True)
class HostId:
    """One boot of one host.

    `pids` is the process-id namespace: containers on one machine have the same boot id, and may have the same name.
    """

    name: str = ""
    machine: str = ""
    boot: str = ""
    pids: str = ""

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> HostId:
        """Return the host of a record, which another version of ddptrain may have written."""
        return cls(**known_fields(cls, data))


UNKNOWN_HOST = HostId()  # of a record that does not contain its host


class Relation(StrEnum):
    """How the host in a record relates to this host."""

    SAME = "same"
    RESTARTED = "restarted"
    OTHER = "other"


@functools.cache
def this_host() -> HostId:
    """Return the host on which this process runs."""
    machine = next(filter(None, (text_or_empty(path).strip() for path in _MACHINE_IDS)), "")
    return HostId(
        name=os.uname().nodename,
        machine="" if machine == "uninitialized" else machine,
        boot=text_or_empty(_BOOT_ID).strip(),
        pids=_link(_PID_NAMESPACE),
    )


def known_fields(kind: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the items of `data` that are fields of the dataclass `kind`; another version may have written others."""
    return {field.name: data[field.name] for field in fields(kind) if field.name in data}


def file_view() -> str:
    """Return a text that is equal for processes that see the same files with the same rights; "" if unknown."""
    mounts, boot = _link(_MOUNT_NAMESPACE), boot_id()
    if not mounts or not boot:
        return ""
    root = os.stat("/")
    return f"{boot} {mounts} {root.st_dev}:{root.st_ino} {os.geteuid()}"


def process_start(pid: int) -> float:
    """Return when a process started, by a monotonic clock (Linux: seconds since boot); 0 if it does not exist."""
    if _PROC.exists():  # psutil adds the time of boot, which moves whenever the clock is set
        words = text_or_empty(_PROC / str(pid) / "stat").rpartition(")")[2].split()
        return int(words[19]) / os.sysconf("SC_CLK_TCK") if words else 0.0
    import psutil

    try:
        return float(psutil.Process(pid).create_time())
    except psutil.NoSuchProcess:
        return 0.0


def boot_id() -> str:
    """Return the kernel's boot id, which changes when the host is restarted; "" if the system has none."""
    return this_host().boot


def is_this_host(host: str, boot: str) -> bool:
    """Return whether a recorded host name and boot id are those of this host. `boot` is "" if it was not recorded."""
    if boot and boot_id():
        return boot == boot_id()
    return host in ("", this_host().name)


def relation(recorded: HostId, here: HostId) -> Relation:
    """Return whether process ids of `recorded` are valid `here`, were valid before a restart, or are of another host.

    If this is not certain, the answer is OTHER: nothing is then deleted.
    """
    if recorded == UNKNOWN_HOST:
        return Relation.SAME
    if recorded.boot and recorded.boot == here.boot:
        return Relation.SAME if recorded.pids == here.pids else Relation.OTHER
    # Container images contain a machine id, so the name and the namespace must be the same as well.
    is_same_machine = bool(recorded.machine) and (recorded.name, recorded.machine, recorded.pids) == (
        here.name,
        here.machine,
        here.pids,
    )
    if not is_same_machine:
        return Relation.OTHER
    return Relation.RESTARTED if recorded.boot and here.boot else Relation.SAME


def where_to_run(recorded: HostId, here: HostId) -> str:
    """Return the host of a record and what to do, as the continuation of a message that ends with "runs on"."""
    if recorded.name != here.name:
        return f"the host {recorded.name}, and this is {here.name}: run the command on {recorded.name}"
    return f"another machine or container that is also called {here.name}: run the command there"


def is_loopback(host: str) -> bool:
    """Return whether an address or a name is a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
