"""The wait for a cluster that starts: a scheduler that does not answer yet is asked again, until the time is over."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from distributed.comm.core import CommClosedError, FatalCommClosedError

from ddptrain.clusters import wait_ready
from ddptrain.clusters.cluster_records import ClusterRecord, Deployment
from ddptrain.clusters.provider import Provider
from ddptrain.clusters.resolve import Target
from ddptrain.clusters.wait_ready import ReadinessWait
from ddptrain.errors import ClusterError

ADDRESS = "tcp://127.0.0.1:8786"
OVERVIEW: dict[str, Any] = {"workers": [], "runs": [], "waiting": []}


class StubProvider:
    """A provider without processes."""

    def logs(self, deployment: Deployment, lines: int) -> dict[str, str]:
        return {}


class StubClients:
    """Makes clients of which the first `bad` raise `error`."""

    def __init__(self, bad: int, error: Exception, refused: int = 0) -> None:
        self.bad = bad
        self.refused = refused
        self.error = error
        self.made = self.closed = 0
        self.told: list[str] = []

    def __call__(self, *_: object, **__: object) -> StubClients:
        if self.refused:
            self.refused -= 1
            raise self.error
        self.made += 1
        return self

    def run_on_scheduler(self, call: Callable[..., Any]) -> dict[str, Any]:
        if self.made <= self.bad:
            raise self.error
        return OVERVIEW

    def close(self, timeout: float) -> None:
        self.closed += 1


def waiting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clients: StubClients, timeout_s: float) -> ReadinessWait:
    monkeypatch.setattr("distributed.Client", clients)
    monkeypatch.setattr(wait_ready, "_LAST_LOOK_S", 0.0)
    monkeypatch.setattr(wait_ready, "of_deployment", lambda deployment: Target(ADDRESS))
    deployment = Deployment(tmp_path, ClusterRecord("dev", "kubernetes", "now", address=ADDRESS))
    return ReadinessWait(deployment, cast(Provider, StubProvider()), clients.told.append, timeout_s, time.monotonic())


def test_connection_that_is_closed_before_the_first_answer_is_made_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clients = StubClients(bad=2, error=CommClosedError("Stream is closed"))
    with waiting(monkeypatch, tmp_path, clients, 60.0) as wait:
        assert wait.view().slots == 0
        assert (clients.made, clients.closed) == (3, 2)
        wait.view()
        assert clients.made == 3
    assert clients.closed == 3
    assert clients.told == [f"scheduler at {ADDRESS}"]


def test_connection_that_is_closed_while_it_is_made_is_made_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clients = StubClients(bad=0, error=CommClosedError("Stream is closed"), refused=2)
    with waiting(monkeypatch, tmp_path, clients, 60.0) as wait:
        assert wait.view().slots == 0
    assert (clients.made, clients.closed, clients.refused) == (1, 1, 0)


@pytest.mark.parametrize("error", [FatalCommClosedError("wrong certificate"), TimeoutError("no answer")])
def test_scheduler_that_cannot_be_connected_to_is_reported_at_once(
    error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clients = StubClients(bad=0, error=error, refused=2)
    with pytest.raises(ClusterError, match=f"does not answer: {error}$"):
        waiting(monkeypatch, tmp_path, clients, 60.0).view()
    assert clients.refused == 1


def test_scheduler_that_never_answers_is_reported_when_the_time_is_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clients = StubClients(bad=1_000_000, error=CommClosedError("Stream is closed"))
    expected = rf"^the scheduler at {ADDRESS} does not answer \(Stream is closed\) within 0.1 s$"
    with pytest.raises(ClusterError, match=expected):
        waiting(monkeypatch, tmp_path, clients, 0.1).view()
    assert clients.closed == clients.made > 1


def test_scheduler_that_goes_away_after_its_first_answer_is_reported_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clients = StubClients(bad=0, error=CommClosedError("Stream is closed"))
    wait = waiting(monkeypatch, tmp_path, clients, 60.0)
    wait.view()
    clients.bad = 1
    with pytest.raises(ClusterError, match=f"^the scheduler at {ADDRESS} does not answer: Stream is closed$"):
        wait.view()
    assert clients.made == 1
