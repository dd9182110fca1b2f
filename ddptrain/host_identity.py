"""Identifies the host, the boot and the process-id namespace in which a process id is valid.

Several hosts may share a folder, so other hosts may read the record of a cluster or a run. On another host, the same
process id is another process.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path

from ddptrain.file_ops import text_or_empty

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


def file_view() -> str:
    """Return a text that is equal for processes that see the same files with the same rights; "" if unknown."""
    mounts, boot = _link(_MOUNT_NAMESPACE), boot_id()
    if not mounts or not boot:
        return ""
    root = os.stat("/")
    return f"{boot} {mounts} {root.st_dev}:{root.st_ino} {os.geteuid()}"


def boot_id() -> str:
    """Return the kernel's boot id, which changes when the host is restarted; "" if the system has none."""
    return this_host().boot


def is_this_host(host: str, boot: str) -> bool:
    """Return whether a recorded host name and boot id are those of this host. `boot` is "" if it was not recorded."""
    if boot and boot_id():
        return boot == boot_id()
    return host in ("", this_host().name)


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
