"""How hosts are asked for their facts, and how their clocks are compared with the driver's."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from ddptrain.driver.cluster_check import facts
from ddptrain.driver.cluster_check.facts import Answer, ask_hosts
from ddptrain.driver.cluster_check.readings import ClockOffset
from ddptrain.worker import driver_calls
from tests.unit.driver.cluster_check.hosts import facts as sound_facts


class Client:
    """A client of workers whose clocks are 7 s ahead; `fails` has the errors of workers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.takes = 100.0, [0.4, 0.1, 0.2]
        self.fails: dict[str, Exception] = {}
        self.limits: list[float] = []
        monkeypatch.setattr(facts, "time", SimpleNamespace(time=lambda: self.now))

    def sync(self, function: Any, *arguments: Any) -> Any:
        return asyncio.run(function(*arguments))

    async def run(self, function: Any, *arguments: Any, workers: list[str]) -> dict[str, Any]:
        (worker,) = workers
        if function is driver_calls.read_clock:
            takes_s = self.takes.pop(0) if self.takes else 1.0
            there = self.now + takes_s / 2 + 7.0
            self.now += takes_s
            return {worker: there}
        assert function is driver_calls.host_facts
        self.limits += arguments
        if worker in self.fails:
            raise self.fails[worker]
        return {worker: sound_facts(hostname=worker).to_json()}


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    return Client(monkeypatch)


def test_clock_is_that_of_the_fastest_of_three_answers(client: Client) -> None:
    (answer,) = ask_hosts(client, ["w"], 5.0).values()  # type: ignore[arg-type]
    assert answer.clock is not None and answer.facts == sound_facts(hostname="w") and client.limits == [5.0]
    assert (answer.clock.offset_s, answer.clock.uncertainty_s) == pytest.approx((7.0, 0.05))
    assert client.takes == [] and client.now == pytest.approx(100.7)


def test_clock_of_this_host_that_was_set_back_is_exact(client: Client) -> None:
    client.takes = [-1.0, 0.5, 0.5]

    async def ask() -> ClockOffset:
        return await facts._clock(lambda: client.run(driver_calls.read_clock, workers=["w"]), "w")

    assert asyncio.run(ask()).uncertainty_s == 0.0


def test_each_host_has_its_own_answer_or_error(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    client.fails = {"b": ValueError("no torch\nmore"), "c": TimeoutError()}
    answers = ask_hosts(client, ["a", "b", "c"], 5.0)  # type: ignore[arg-type]
    assert list(answers) == ["a", "b", "c"] and answers["a"].error == ""
    assert (answers["b"].facts, answers["b"].error) == (None, "no torch")
    assert (answers["c"].facts, answers["c"].error) == (None, "it does not answer within 5 s")
    assert answers["c"].clock is not None and Answer() == Answer(None, None, "")


def test_silent_worker_is_given_up_two_seconds_after_its_own_limit(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []

    def timeout(seconds: float) -> Any:
        limits.append(seconds)
        raise TimeoutError

    monkeypatch.setattr(facts.asyncio, "timeout", timeout)  # type: ignore[attr-defined]
    (answer,) = ask_hosts(client, ["w"], 5.0).values()  # type: ignore[arg-type]
    assert answer == Answer(None, None, "it does not answer within 5 s") and limits == [7.0]
