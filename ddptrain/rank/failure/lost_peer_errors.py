"""Recognizes errors of a victim: another rank has ended, or this rank has waited too long for it."""

from __future__ import annotations

import traceback
from collections.abc import Iterator

from ddptrain.protocol.peer_errors import is_lost_peer, is_time_out


def lost_peer(error: BaseException) -> bool:
    """Return whether the error only says that another rank has ended, or follows from such an error.

    An error of a backend or the store of torch.distributed counts whatever its message: this rank was in a collective.
    """
    known = [each for each in chain(error) if _is_from_torch(each)]
    return any(is_lost_peer(message_of(each)) or _is_of_backend(each) for each in known) and not timed_out(error)


def timed_out(error: BaseException) -> bool:
    """Return whether the error says that another rank did not join in time, or follows from such an error."""
    return any(_is_from_torch(each) and is_time_out(message_of(each)) for each in chain(error))


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


def _is_of_backend(error: BaseException) -> bool:
    """Return whether an error is torch's DistError, for example DistBackendError of NCCL."""
    return any(cls.__name__ == "DistError" for cls in type(error).__mro__)
