"""Several worker groups listen to the scheduler through one client."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from ddptrain.driver.worker_group.cluster_news import ClusterNews, weakly


class _Client:
    def __init__(self) -> None:
        self.handler: Callable[[Any], None] | None = None
        self.calls: list[str] = []

    def subscribe_topic(self, topic: str, handler: Callable[[Any], None]) -> None:
        self.handler = handler
        self.calls.append(f"subscribe {topic}")

    def unsubscribe_topic(self, topic: str) -> None:
        self.calls.append(f"unsubscribe {topic}")


def test_each_group_gets_each_message_until_it_leaves() -> None:
    client = _Client()
    news = ClusterNews(client)  # type: ignore[arg-type]
    seen: list[tuple[str, Any]] = []
    news.add("a", lambda event: seen.append(("a", event[1])))
    news.add("b", lambda event: seen.append(("b", event[1])))
    assert client.handler is not None
    client.handler((0.0, 1))
    news.remove("a")
    client.handler((0.0, 2))
    assert client.calls == ["subscribe all"]
    news.remove("b")
    news.remove("b")
    assert seen == [("a", 1), ("b", 1), ("b", 2)]
    assert client.calls == ["subscribe all", "unsubscribe all"]


def test_a_handler_does_not_keep_its_group_alive() -> None:
    class Group:
        seen: list[Any] = []  # noqa: RUF012  # it outlives its object

        def take(self, event: tuple[float, Any]) -> None:
            self.seen.append(event[1])

    group = Group()
    handler = weakly(group.take)
    handler((0.0, 1))
    del group
    gc.collect()
    handler((0.0, 2))
    assert Group.seen == [1]
