"""Asks the workers for the facts of their hosts, and compares their clocks with the driver's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddptrain.driver.cluster_check.readings import ClockOffset
from ddptrain.errors import one_line
from ddptrain.protocol.cluster_check import HostFacts
from ddptrain.worker import driver_calls

if TYPE_CHECKING:
    from distributed import Client

_CLOCK_TRIES = 3
_MARGIN_S = 2.0  # additional time for the answer of a worker that has reached the deadline


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of one worker; error: why facts or clock are missing."""

    facts: HostFacts | None = None
    clock: ClockOffset | None = None
    error: str = ""


def ask_hosts(client: Client, workers: Sequence[str], timeout_s: float) -> Mapping[str, Answer]:
    """Ask these workers, one on each host, at the same time. The answer of a worker after `timeout_s` is an error."""
    answers: Mapping[str, Answer] = client.sync(_ask_all, client, workers, timeout_s)
    return answers


async def _ask_all(client: Client, workers: Sequence[str], timeout_s: float) -> dict[str, Answer]:
    asked = [asyncio.ensure_future(_ask(client, worker, timeout_s)) for worker in workers]
    return dict(zip(workers, await asyncio.gather(*asked), strict=True))


async def _ask(client: Client, worker: str, timeout_s: float) -> Answer:
    clock = None
    try:
        async with asyncio.timeout(timeout_s + _MARGIN_S):
            clock = await _clock(lambda: client.run(driver_calls.read_clock, workers=[worker]), worker)
            facts = await client.run(driver_calls.host_facts, timeout_s, workers=[worker])
        return Answer(HostFacts.from_json(facts[worker]), clock)
    except TimeoutError:
        return Answer(None, clock, f"it does not answer within {timeout_s:g} s")
    except Exception as error:  # a worker's own exception arrives as it was raised there
        return Answer(None, clock, one_line(error))


async def _clock(ask: Callable[[], Any], worker: str) -> ClockOffset:
    """Return the offset from the fastest of several answers; half of its duration is the uncertainty."""
    offsets = []
    for _ in range(_CLOCK_TRIES):
        before = time.time()
        worker_time_s = (await ask())[worker]
        after = time.time()
        offsets.append(ClockOffset(float(worker_time_s) - (before + after) / 2, max(0.0, after - before) / 2))
    return min(offsets, key=lambda each: each.uncertainty_s)
