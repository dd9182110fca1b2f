"""What is asked of a Dask cluster may never be answered: a worker is cut off, a scheduler hangs. Here a wait ends."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine
from typing import Any

from distributed import Client

_LOOK_S = 0.2

Question = Coroutine[Any, Any, Any]  # what Client.run and its like return with asynchronous=True


def answer(client: Client, question: Question, patience_s: Callable[[], float], heard: Callable[[], int]) -> Any:
    """The answer, waited for until nothing has been `heard` (a growing count) for `patience_s`; at 0 at once.

    Raises TimeoutError, and whatever the question itself raises.
    """
    asked = order(client, question)
    last, silent_s = heard(), 0.0
    while not concurrent.futures.wait([asked], _LOOK_S).done:
        # Counted, not read from a clock: this process may have been suspended itself.
        last, silent_s = (last, silent_s + _LOOK_S) if heard() == last else (heard(), 0.0)
        if silent_s >= patience_s():
            asked.cancel()
            raise TimeoutError(f"no answer, and not a word, for {silent_s:.0f} s")
    return asked.result()


def order(client: Client, question: Question) -> concurrent.futures.Future[Any]:
    """Ask, and don't wait for the answer."""
    loop: Any = client.loop  # tornado's, around asyncio's
    return asyncio.run_coroutine_threadsafe(question, loop.asyncio_loop)
