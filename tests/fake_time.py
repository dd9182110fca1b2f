"""Functions of `time` that a test replaces for its own thread only."""

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
