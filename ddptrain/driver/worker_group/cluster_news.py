"""Messages of the scheduler about its workers, for all worker groups of a client: Dask has one handler per topic."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from distributed import Client

_TOPIC = "all"  # the topic of messages about new and lost workers

Handler = Callable[[tuple[float, Any]], None]


class ClusterNews:
    """Passes each message to every subscribed worker group."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._handlers: dict[str, Handler] = {}
        self._mutex = threading.Lock()

    def add(self, run_id: str, handler: Handler) -> None:
        """Subscribe the worker group of a run."""
        with self._mutex:
            if not self._handlers:
                self._client.subscribe_topic(_TOPIC, self._deliver)
            self._handlers = {**self._handlers, run_id: handler}  # replaced as a whole: Dask's thread reads it

    def remove(self, run_id: str) -> None:
        """Unsubscribe the worker group of a run."""
        with self._mutex:
            known = self._handlers
            self._handlers = {name: handler for name, handler in known.items() if name != run_id}
            if known and not self._handlers:
                self._client.unsubscribe_topic(_TOPIC)

    def _deliver(self, event: tuple[float, Any]) -> None:
        for handler in self._handlers.values():
            handler(event)


def weakly(method: Handler) -> Handler:
    """Return a function that calls a bound method as long as its object exists, and does not keep it alive."""
    reference = weakref.WeakMethod(method)

    def call(event: tuple[float, Any]) -> None:
        if (found := reference()) is not None:
            found(event)

    return call
