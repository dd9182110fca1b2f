"""Recognizes errors of a victim: another rank has ended, or this rank has waited too long for it."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator

# Parts of the messages of gloo, NCCL, the store and sockets in a rank that has lost its peer.
_LOST_PEER_MESSAGES = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "remote process has exited",
    "socket closed",
    "failed to recv",
    "recvvalue failed",
    "sendbytes failed",
    "ncclremoteerror",
    "connectfullmesh failed",
)
# Parts of the messages of gloo, NCCL and the store in a rank that has waited too long for another rank.
_TIME_OUT_MESSAGES = (
    "timed out waiting",
    "timed out in blocking wait",
    "application timeout caused pair closure",
    "failed to pass monitoredbarrier",
    "collective operation timeout",
    "wait timeout",
)


def lost_peer(error: BaseException) -> bool:
    """Return whether the error only says that another rank has ended, or follows from such an error."""
    return any(_is_from_torch(each) and _contains(each, _LOST_PEER_MESSAGES) for each in chain(error))


def timed_out(error: BaseException) -> bool:
    """Return whether the error says that another rank did not join in time, or follows from such an error."""
    return any(_is_from_torch(each) and _contains(each, _TIME_OUT_MESSAGES) for each in chain(error))


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, then the earlier errors that its traceback shows: causes, and errors that were being handled."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def message_of(error: BaseException) -> str:
    """Return str() of a user's exception; str() itself may raise an exception."""
    try:
        return str(error)
    except Exception:  # any user's code
        return "<exception str() failed>"  # as in Python's tracebacks


def _is_from_torch(error: BaseException) -> bool:
    """Return whether the error can be from torch.distributed, and not from a connection of the user's code."""
    if isinstance(error, OSError):
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        return any("/torch/distributed/" in file for file in files)
    return isinstance(error, RuntimeError)  # the base class of torch's DistError


def _contains(error: BaseException, messages: Iterable[str]) -> bool:
    text = message_of(error).lower()
    return any(message in text for message in messages)
