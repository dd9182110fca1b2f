"""Which machine this is: host names may be equal, as in containers, and a machine may have started anew."""

from __future__ import annotations

import socket
from functools import cache
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@cache
def boot_id() -> str:
    """What all processes of this kernel share until it is started again; "" where the system has none."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def is_this_host(host: str, boot: str) -> bool:
    """Whether a process that recorded these two is, or was, one of this kernel. `boot` "" means: not recorded."""
    if boot and boot_id():
        return boot == boot_id()
    return host in ("", socket.gethostname())
