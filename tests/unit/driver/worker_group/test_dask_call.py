"""Answers that come, and those that never will."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ddptrain.driver.worker_group import dask_call


@pytest.fixture
def client() -> Iterator[Any]:
    """What of a client counts here: its event loop, in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield SimpleNamespace(loop=SimpleNamespace(asyncio_loop=loop))
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def never(ended: threading.Event) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.set()


def test_answer_is_returned_and_an_error_raised(client: Any) -> None:
    async def double(number: int) -> int:
        if not number:
            raise OSError("there is nothing to double")
        return 2 * number

    assert dask_call.wait_for_answer(client, double(2), lambda: 60.0, lambda: 0) == 4
    with pytest.raises(OSError, match="nothing to double"):
        dask_call.wait_for_answer(client, double(0), lambda: 60.0, lambda: 0)


def test_silence_ends_the_wait_and_the_question(client: Any) -> None:
    ended = threading.Event()
    with pytest.raises(TimeoutError, match="no message"):
        dask_call.wait_for_answer(client, never(ended), lambda: 0.5, lambda: 0)
    assert ended.wait(60)


def test_wait_goes_on_as_long_as_something_is_heard_and_ends_at_once_where_patience_does(client: Any) -> None:
    words, looks = itertools.count(), itertools.count()
    with pytest.raises(TimeoutError):
        dask_call.wait_for_answer(
            client, never(threading.Event()), lambda: 0.0 if next(looks) == 8 else 0.3, lambda: next(words)
        )
    assert next(looks) == 9


def test_order_is_not_waited_for(client: Any) -> None:
    done = threading.Event()

    async def work() -> None:
        done.set()

    dask_call.send(client, work())
    assert done.wait(60)
