"""Fake functions of `time` are for the thread of the test only."""

import threading
import time

import pytest

from tests.support import fake_time


def test_threads_of_others_keep_the_real_function(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    fake_time.replace(monkeypatch, "sleep", slept.append)
    fake_time.replace(monkeypatch, "monotonic", lambda: -1.0)
    seen: list[float] = []

    def poll() -> None:
        time.sleep(0.001)
        seen.append(time.monotonic())

    thread = threading.Thread(target=poll)
    thread.start()
    thread.join()
    time.sleep(60)
    assert (slept, time.monotonic()) == ([60], -1.0)
    assert seen[0] > 0
