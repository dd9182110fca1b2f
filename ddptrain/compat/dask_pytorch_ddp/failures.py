"""Errors of ranks on their way home: the user's own exception, when it was raised, and whether it came first."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

import cloudpickle

from ddptrain.errors import TrainingFailed

_AT_NS = "ddptrain_at_ns"
_VICTIM = "ddptrain_victim"
_LATE_NS = 1 << 63


class RankFailed(TrainingFailed):
    """A rank ended without an exception that could be brought home: killed, stopped, or its error can't be pickled."""


def sealed(error: BaseException, where: str, trace: str, at_ns: int, *, victim: bool) -> bytes:
    """The exception as a pickle that loads wherever its type is known; what can't travel becomes a RankFailed."""
    text = f"{where}: {type(error).__qualname__}: {error}"
    try:
        data: bytes = cloudpickle.dumps(_marked(error, where, trace, at_ns, victim=victim))
        if isinstance(pickle.loads(data), Exception):  # noqa: S301  # of this very process
            return data
    except Exception:  # whatever an exception of others does: its text is still told
        pass
    failed: bytes = cloudpickle.dumps(_marked(RankFailed(text), where, trace, at_ns, victim=victim))
    return failed


def _marked(error: BaseException, where: str, trace: str, at_ns: int, *, victim: bool) -> BaseException:
    error.add_note(f"{where}:\n{trace}")
    setattr(error, _AT_NS, at_ns)
    setattr(error, _VICTIM, victim)
    return error


def ended(text: str, at_ns: int) -> RankFailed:
    """A rank that has left no exception."""
    error = RankFailed(text)
    setattr(error, _AT_NS, at_ns)
    return error


def first_cause(errors: Iterable[BaseException]) -> BaseException:
    """The one that came first, of those that did not merely lose a peer."""

    def order(error: BaseException) -> tuple[Any, ...]:
        return getattr(error, _VICTIM, False), getattr(error, _AT_NS, _LATE_NS)

    return min(errors, key=order)
