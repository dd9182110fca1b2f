"""Waits for answers of a Dask cluster with a limit: a worker can be cut off, and a scheduler can hang."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine
from typing import Any

from distributed import Client

_LOOK_S = 0.2

Question = Coroutine[Any, Any, Any]  # what Client.run and its like return with asynchronous=True


def wait_for_answer(
    client: Client, question: Question, patience_s: Callable[[], float], heard: Callable[[], int]
) -> Any:
    """Wait for the answer until `heard` (a growing count) has not changed for `patience_s` (0: end at once).

    Raises TimeoutError, and whatever the question itself raises.
    """
    asked = send(client, question)
    last, silent_s = heard(), 0.0
    while not concurrent.futures.wait([asked], _LOOK_S).done:
        # The time is counted, not read from a clock, because this process may have been suspended itself.
        last, silent_s = (last, silent_s + _LOOK_S) if heard() == last else (heard(), 0.0)
        if silent_s >= patience_s():
            asked.cancel()
            raise TimeoutError(f"no answer and no message for {silent_s:.0f} s")
    return asked.result()


def send(client: Client, question: Question) -> concurrent.futures.Future[Any]:
    """Send the question without waiting for the answer."""
    loop: Any = client.loop  # tornado's, around asyncio's
    return asyncio.run_coroutine_threadsafe(question, loop.asyncio_loop)
