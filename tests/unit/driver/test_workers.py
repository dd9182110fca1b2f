"""The workers of a run, with a real scheduler and real workers, whose ranks run a few lines of Python."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from ddptrain.driver.inbox import Inbox, TaskFailed, WorkerLost
from ddptrain.driver.ranks import RankPlace
from ddptrain.driver.reservation import SlotRequest, WaitHooks
from ddptrain.driver.workers import Workers
from ddptrain.errors import ClusterError
from ddptrain.protocol.news import News, RankExit
from ddptrain.protocol.rank_spec import RankSpec
from ddptrain.worker import driver_calls, rank_task
from ddptrain.worker.spool import rank_spool
from tests.unit.specs import make_spec
from tests.unit.worker.daskbench import DaskBench, Driver, end
from tests.unit.worker.stubs import Bench

pytestmark = pytest.mark.slow

Message = TypeVar("Message")
NUMBERS = itertools.count(1)
SLEEPS = "import time; say('here'); time.sleep(600)"


@pytest.fixture(scope="module")
def dask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaskBench]:
    """A scheduler, and a worker with two slots, which the runs of all tests use."""
    folder = tmp_path_factory.mktemp("dask")
    (folder / "tmp").mkdir()
    with DaskBench(folder, Bench(folder).env | {"TMPDIR": str(folder / "tmp")}) as bench:
        bench.scheduler()
        bench.ours("--slots", "2", "--gpus", "none")
        with bench.driver(workers=1) as driver:
            driver.call(driver_calls.wait_until_warm, 60.0, worker="ours")
        yield bench


def opened(driver: Driver) -> Workers:
    driver.run_id = f"r-{next(NUMBERS)}"
    workers = Workers(driver.client, driver.run_id, queue.SimpleQueue(), 30.0, foreign=False)
    workers.subscribe()
    return workers


def reserved(workers: Workers, count: int | None = 2, wait_s: float = 0.0) -> list[RankPlace]:
    return workers.reserve(SlotRequest(count, False, 0.5, wait_s), WaitHooks(lambda _: None))


def started(workers: Workers, places: list[RankPlace], code: str) -> list[RankSpec]:
    specs = [
        make_spec(
            rank=place.rank,
            run_id=workers.run_id,
            world_size=len(places),
            params={"code": code},
            master_addr="127.0.0.1",
            master_port=0,
            slot=place.slot.index,
        )
        for place in places
    ]
    workers.give(specs, places)
    workers.submit(specs, [place.slot for place in places])
    return specs


def received(inbox: Inbox, kind: type[Message]) -> Message:
    while not isinstance(message := inbox.get(timeout=60), kind):
        pass
    return message


def exits(inbox: Inbox, count: int) -> dict[int, RankExit]:
    """How the first ranks that end have ended."""
    found: dict[int, RankExit] = {}
    while len(found) < count:
        found |= {part.rank: part.ended for part in received(inbox, News).ranks if part.ended is not None}
    return found


def test_ranks_start_in_their_slots_and_their_files_can_be_read(dask: DaskBench) -> None:
    with dask.driver(workers=1) as driver, opened(driver) as workers:
        places = reserved(workers)
        assert [(place.rank, place.placement.local_rank, place.shared) for place in places] == [
            (0, 0, True),
            (1, 1, True),
        ]
        started(workers, places, "say('line')")
        assert received(workers.inbox, News).store_port > 0
        assert {ended.status for ended in exits(workers.inbox, 2).values()} == {0}
        log = rank_spool(places[1].scratch, workers.run_id, 1, 1).log
        assert workers.fetch(places[1].slot.worker, log, 1, 100) == b"ine\n"
        with pytest.raises(ClusterError, match="could not read"):
            workers.fetch(places[1].slot.worker, Path("/no/such/file"), 0, 100)


def test_stopped_ranks_end_and_slots_are_free_when_the_run_is_closed(dask: DaskBench) -> None:
    with dask.driver(workers=1) as driver, opened(driver) as second:
        with opened(driver) as workers:
            specs = started(workers, reserved(workers), SLEEPS)
            begun: set[int] = set()
            while len(begun) < len(specs):
                begun |= {part.rank for part in received(workers.inbox, News).ranks if part.log_size}
            with pytest.raises(ClusterError, match="0 of 2 are free"):
                reserved(second)
            workers.stop(specs[:1], 5.0)
            assert [(rank, ended.status) for rank, ended in exits(workers.inbox, 1).items()] == [(0, -15)]
        assert len(reserved(second, wait_s=60.0)) == 2


def test_task_that_fails_is_a_message_for_each_of_its_ranks(dask: DaskBench) -> None:
    with dask.driver(workers=1) as driver, opened(driver) as workers:
        specs = started(workers, reserved(workers), SLEEPS)
        received(workers.inbox, News)
        driver.client.cancel(list(workers.futures.values()), force=True)
        failed = [received(workers.inbox, TaskFailed) for _ in specs]
        assert sorted(each.rank for each in failed) == [0, 1] and "was cancelled" in failed[0].message


def test_messages_of_others_that_are_not_valid_are_counted(dask: DaskBench) -> None:
    with dask.driver(workers=1) as driver, opened(driver) as workers:
        wrong: list[object] = [{"rank": "x"}, "text", {"news": {}}, [1], {"news": "text", "worker": "w"}]
        for message in [*wrong, {"ping": ["not", "hashable"]}]:
            driver.client.log_event(rank_task.topic(workers.run_id), message)
        started(workers, reserved(workers), "say('line')")
        exits(workers.inbox, 1)
        assert workers.rejected == len(wrong) and "not news" in workers.first_rejected


def test_folder_that_a_worker_sees_is_not_copied(dask: DaskBench, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "manifest").write_text("files")
    (folder / "data").write_bytes(b"x" * 100)
    with dask.driver(workers=1) as driver, opened(driver) as workers:
        places = reserved(workers)
        assert workers.place(places, folder, ["manifest", "data"], "manifest", "it") == [str(folder)] * 2
        with pytest.raises(ClusterError, match="could not copy it"):
            workers.place(places, tmp_path / "missing", ["manifest"], "manifest", "it")


def test_lost_worker_is_a_message_and_is_reserved_no_more(dask: DaskBench) -> None:
    other = dask.ours("--slots", "1", "--gpus", "none", name="other")
    with dask.driver(workers=2) as driver, opened(driver) as workers:
        assert len(reserved(workers, 3)) == 3
        lost = driver.workers["other"]
        other.kill()
        assert received(workers.inbox, WorkerLost).address == lost
        assert not workers.has(lost)
        assert {place.slot.worker for place in reserved(workers)} == {driver.workers["ours"]}
        workers.avoid(driver.workers["ours"])  # it is about to end, and still answers
        assert workers.has(driver.workers["ours"])
        with pytest.raises(ClusterError, match="none joined"):
            reserved(workers)


def test_worker_that_takes_no_specs_is_a_message_with_the_cause(dask: DaskBench) -> None:
    plain = dask.foreign(name="plain")
    with dask.driver(workers=2) as driver, opened(driver) as workers:
        places = reserved(workers, 3)
        driver.remove("plain")
        started(workers, places, SLEEPS)
        failed = received(workers.inbox, TaskFailed)
        assert places[failed.rank].slot.worker == driver.workers["plain"] and "is not attached" in failed.message
    end(plain)
