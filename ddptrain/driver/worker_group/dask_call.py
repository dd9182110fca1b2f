"""Waits for answers of a Dask cluster with a limit: a worker can be cut off, and a scheduler can hang."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import dask
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from distributed import Client, Future

_POLL_S = 0.2
_LARGEST_GRAPH = "1 GiB"  # Dask advises against 10 MB, which are the specs of some thousand ranks

Question = Coroutine[Any, Any, Any]  # the type of Client.run(..., asynchronous=True) and similar methods


def wait_for_answer(
    client: Client, question: Question, patience_s: Callable[[], float], heard: Callable[[], int]
) -> Any:
    """Wait for the answer until `heard` (a growing count) has not changed for `patience_s` (0: end at once).

    Raises TimeoutError, and any exception of the question.
    """
    asked = send(client, question)
    last, silent_s = heard(), 0.0
    while not concurrent.futures.wait([asked], _POLL_S).done:
        # The time is counted, not read from a clock, because this process may have been suspended itself.
        last, silent_s = (last, silent_s + _POLL_S) if heard() == last else (heard(), 0.0)
        if silent_s >= patience_s():
            asked.cancel()
            raise TimeoutError(f"no answer and no message for {silent_s:.0f} s")
    return asked.result()


def send(client: Client, question: Question) -> concurrent.futures.Future[Any]:
    """Send the question without waiting for the answer."""
    loop: Any = client.loop  # tornado's, around asyncio's
    return asyncio.run_coroutine_threadsafe(question, loop.asyncio_loop)


@dataclass(frozen=True, slots=True)
class WorkerTask:
    """A call of a function with one argument on one worker; `resources`: the Dask resources that it needs."""

    key: str
    worker: str
    argument: Any
    resources: dict[str, int]


def submit(client: Client, function: Callable[[Any], object], tasks: Sequence[WorkerTask]) -> list[Future[None]]:
    """Submit the tasks in one message, and return their futures in that order.

    Client.submit would cost the driver eight times as much, and the scheduler would read one graph after another.
    """
    layers = {}
    for task in tasks:
        annotations: dict[str, Any] = {"workers": [task.worker], "allow_other_workers": False}
        annotations |= {"resources": task.resources} if task.resources else {}
        layers[task.key] = MaterializedLayer({task.key: (function, task.argument)}, annotations=annotations)
    graph = HighLevelGraph(layers, {key: set() for key in layers})
    with dask.config.set({"distributed.admin.large-graph-warning-threshold": _LARGEST_GRAPH}):
        futures: list[Future[None]] = client.get(graph, list(layers), sync=False)
    return futures
