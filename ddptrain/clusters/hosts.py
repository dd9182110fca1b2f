"""How the host in the record of a cluster relates to this one: whether its process ids and loopback addresses are ours.

On another host, the same process id is another process, and 127.0.0.1 is another machine.
"""

from __future__ import annotations

import ipaddress
import os
from enum import StrEnum
from pathlib import Path

from ddptrain.file_ops import text_or_empty
from ddptrain.host_identity import HostId

UNKNOWN_HOST = HostId()  # of a record that does not contain its host


class Relation(StrEnum):
    """How the host in a record relates to this host."""

    SAME = "same"
    RESTARTED = "restarted"
    OTHER = "other"


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


def process_start(pid: int) -> float:
    """Return when a process started, in seconds since boot; 0 if it does not exist."""
    words = text_or_empty(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return int(words[19]) / os.sysconf("SC_CLK_TCK") if words else 0.0


def is_loopback(host: str) -> bool:
    """Return whether an address or a name is a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"
