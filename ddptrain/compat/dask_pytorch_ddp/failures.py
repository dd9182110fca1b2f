"""Errors of ranks as pickles for the client: the user's exception, its time, and whether it is a victim."""

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
    """A rank ended without an exception that can be pickled: it was killed or stopped, for example."""


def sealed(error: BaseException, where: str, trace: str, at_ns: int, *, victim: bool) -> bytes:
    """Return the pickled exception; one that can't be pickled becomes a RankFailed."""
    text = f"{where}: {type(error).__qualname__}: {error}"
    try:
        data: bytes = cloudpickle.dumps(_marked(error, where, trace, at_ns, victim=victim))
        if isinstance(pickle.loads(data), Exception):  # noqa: S301  # the data were made by this process
            return data
    except Exception:  # pickling runs user code, which may raise anything: only the text is sent then
        pass
    failed: bytes = cloudpickle.dumps(_marked(RankFailed(text), where, trace, at_ns, victim=victim))
    return failed


def _marked(error: BaseException, where: str, trace: str, at_ns: int, *, victim: bool) -> BaseException:
    error.add_note(f"{where}:\n{trace}")
    setattr(error, _AT_NS, at_ns)
    setattr(error, _VICTIM, victim)
    return error


def ended(text: str, at_ns: int, *, victim: bool = False) -> RankFailed:
    """Return the error of a rank that left no exception. victim: the rank was stopped, likely after another failed."""
    error = RankFailed(text)
    setattr(error, _AT_NS, at_ns)
    setattr(error, _VICTIM, victim)
    return error


def first_cause(errors: Iterable[BaseException]) -> BaseException:
    """Return the first error that is not a victim's."""

    def order(error: BaseException) -> tuple[Any, ...]:
        return getattr(error, _VICTIM, False), getattr(error, _AT_NS, _LATE_NS)

    return min(errors, key=order)
