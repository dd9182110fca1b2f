"""`ddptrain.context()`: the context of this rank, for scripts and for functions without a ctx parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddptrain.rank.context import RankContext

_make: Callable[[], RankContext] | None = None


class NoRank(RuntimeError):
    """This process is not a rank."""


def context() -> RankContext:
    """Return the context of this rank; each call returns the same object.

    Raises:
        NoRank: ddptrain has not started this process as a rank.
    """
    if _make is None:
        raise NoRank(
            "ddptrain.context() was called in a process that is not a rank: it is for code that `ddptrain train` or "
            "`ddptrain run` has started (not plain python, torchrun, or a process that a rank has spawned)"
        )
    return _make()


def provide(make: Callable[[], RankContext]) -> None:
    """Set the function that context() calls in this process, which is a rank."""
    global _make  # noqa: PLW0603  # a process is at most one rank
    _make = make
