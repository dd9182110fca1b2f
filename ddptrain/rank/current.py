"""The context of the rank that this process is, for code that is handed none: scripts, and functions without ctx."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddptrain.rank.context import RankContext

_make: Callable[[], RankContext] | None = None


class NoRank(RuntimeError):
    """This process is no rank."""


def context() -> RankContext:
    """The context of this rank, always the same one.

    Raises:
        NoRank: the code does not run as a function or a script that ddptrain has started.
    """
    if _make is None:
        raise NoRank(
            "ddptrain.context() was called in a process that is no rank: it is for code that `ddptrain train` or "
            "`ddptrain run` has started (not plain python, torchrun, or a process that a rank has spawned)"
        )
    return _make()


def provide(make: Callable[[], RankContext]) -> None:
    """From now on this process is a rank, whose context `make` returns."""
    global _make  # noqa: PLW0603  # a process is one rank at the most
    _make = make
