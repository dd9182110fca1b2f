"""Ports for programs that must be told one, and can't be asked which they got."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 20_000


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses, of those that the system gives to none who asks for any: so they stay free."""
    end = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 32_768
    chosen = random.SystemRandom()
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        while len(ports) < count:
            probe, port = held.enter_context(socket.socket()), chosen.randrange(min(_LOWEST, end - 5_000), end)
            with contextlib.suppress(OSError):
                probe.bind(("", port))
                ports.append(port)
        return ports
