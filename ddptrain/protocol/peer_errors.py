"""Recognizes the messages of gloo, NCCL, the store and sockets in a rank that waited for another rank."""

from __future__ import annotations

_LOST_PEER = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "remote process has exited",
    "remote process exited",
    "communicator was aborted",
    "socket closed",
    "failed to recv",
    "recvvalue failed",
    "sendbytes failed",
    "ncclremoteerror",
    "connectfullmesh failed",
)
_TIMED_OUT = (
    "timed out waiting",
    "timed out in blocking wait",
    "application timeout caused pair closure",
    "failed to pass monitoredbarrier",
    "collective operation timeout",
    "collective operation timed out",
    "nccl operation timed out",
    "wait timeout",
)


def is_lost_peer(message: str) -> bool:
    """Return whether a message says that another rank has ended."""
    return any(part in message.lower() for part in _LOST_PEER)


def is_time_out(message: str) -> bool:
    """Return whether a message says that another rank did not join in time."""
    return any(part in message.lower() for part in _TIMED_OUT)
