"""Fakes of `time`: single functions for the thread of a test only, and a clock that passes only in sleep()."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest


def replace(monkeypatch: pytest.MonkeyPatch, name: str, fake: Callable[..., Any]) -> None:
    """Replaces `time.<name>` for the calling thread; all other threads keep the real function.

    Threads that earlier tests or libraries started in the same process would otherwise call the fake, too: one that
    polls would turn a fake clock forward.
    """
    real, owner = getattr(time, name), threading.get_ident()

    def called(*args: Any) -> Any:
        return (fake if threading.get_ident() == owner else real)(*args)

    monkeypatch.setattr(time, name, called)


class Clock:
    """Stands for the module `time` in another module: its seconds pass only in sleep()."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
