"""The task of all ranks of a worker: how their notices travel, and what the failure of one means for the others."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from distributed import Worker

from ddptrain.protocol import events, worker_notices
from ddptrain.protocol.rank_spec import SLOT_RESOURCE, RankSpec
from ddptrain.protocol.worker_notices import Broken, Growth, Notice, OutputBytes, RankExit
from ddptrain.worker import rank_task
from ddptrain.worker.rank_host import RankHost
from ddptrain.worker.rank_server_client import RankServerClient, RankServerLost
from tests.unit.specs import make_spec


class FakeServer:
    """Ranks that write an event and exit with their number, at once; the rank `refused` cannot be started."""

    def __init__(self, refused: int = -1) -> None:
        self.refused = refused
        self.started: list[RankSpec] = []
        self.exits: dict[str, dict[str, Any]] = {}
        self.stores: list[str] = []
        self.killed: list[str] = []
        self.fault, self.closed, self.ranks = None, False, 0

    def listen(self) -> None:
        """Do nothing."""

    def start_store(self, store_id: str, *_: object) -> None:
        self.stores.append(store_id)

    def start_rank(
        self, rank_id: str, spec_json: str, log: int, written: int, slot: str, woken: threading.Event
    ) -> None:
        spec = RankSpec.from_json(spec_json)
        if spec.rank == self.refused:
            raise RankServerLost("it is gone")
        with open(written, "wb", closefd=False) as file:
            file.write(events.encode(events.Entered(1)))
        self.started.append(spec)
        self.exits[rank_id] = {"report": "exited", "pid": 9, "status": spec.rank, "time_ns": 1}
        woken.set()

    def wait_exit(self, rank_id: str, timeout_s: float) -> dict[str, Any] | None:
        return self.exits.pop(rank_id, None)

    def start_of(self, rank_id: str) -> None:
        """Not reported."""

    def pid_of(self, rank_id: str) -> None:
        """Not known."""

    def stop(self, child_id: str, grace_s: float) -> None:
        self.killed.append(child_id)


class Stage:
    """A worker with a host of ranks, and the messages that it has sent."""

    def __init__(self, folder: Path, server: FakeServer) -> None:
        self.messages: list[dict[str, Any]] = []
        self.tasks = {"ddptrain/r-1/1/0": SimpleNamespace(state="executing")}
        state = SimpleNamespace(tasks=self.tasks, total_resources={SLOT_RESOURCE: 2}, nthreads=2)
        worker = SimpleNamespace(name="w", address="tcp://127.0.0.1:1", state=state, plugins={}, nanny=None)
        worker.log_event = self._take
        self.worker = cast(Worker, worker)
        client = cast(RankServerClient, server)
        self.host = RankHost(client, lambda: client, {}, (), folder / "scratch")
        self.host.setup(self.worker)

    def _take(self, topic: str, message: dict[str, Any]) -> None:
        if topic == rank_task.topic("r-1"):
            self.messages.append(message)

    def run(self, *specs: RankSpec) -> list[RankExit | Exception]:
        return rank_task._RanksTask(self.worker, self.host, specs).run()

    @property
    def notices(self) -> list[Notice]:
        return [cast(Notice, notice) for message in self.messages for notice in worker_notices.decode_all(message)]


def specs(count: int, **changes: Any) -> list[RankSpec]:
    return [make_spec(rank=rank, slot=rank, master_addr="127.0.0.1", **changes) for rank in range(count)]


def test_ranks_of_a_worker_start_together_and_their_notices_share_messages(tmp_path: Path) -> None:
    server = FakeServer()
    stage = Stage(tmp_path, server)
    ended = stage.run(*specs(3, master_port=0))
    assert [each.status for each in ended if isinstance(each, RankExit)] == [0, 1, 2]
    opened = stage.notices[0]
    assert isinstance(opened, worker_notices.StoreOpened)
    assert {spec.group.master_port for spec in server.started} == {opened.port}
    assert server.stores == ["ddptrain/r-1/1/0/store"]
    assert [len(message["notices"]) for message in stage.messages] == [1, 6]  # the store; growth and exit of each
    assert [type(notice) for notice in stage.notices[1:]] == [Growth, RankExit] * 3
    assert server.killed == []


def test_rank_that_cannot_be_started_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    stage = Stage(tmp_path, FakeServer(refused=1))
    ended = stage.run(*specs(3))
    assert [type(each) for each in ended] == [RankExit, RankServerLost, RankExit]
    assert Broken(1, 1, "it is gone") in stage.notices


def test_ranks_of_a_key_that_was_released_meanwhile_are_killed(tmp_path: Path) -> None:
    server = FakeServer()
    stage = Stage(tmp_path, server)
    stage.tasks["ddptrain/r-1/1/0"].state = "released"
    stage.run(*specs(2))
    assert {"ddptrain/r-1/1/0", "ddptrain/r-1/1/1"} <= set(server.killed)


def test_message_that_would_be_too_large_is_sent_before(tmp_path: Path) -> None:
    sent: list[dict[str, object]] = []
    batch = rank_task.NoticeBatch(sent.append)
    for offset in (0, 12_000):
        batch.add(OutputBytes(1, 0, "log", offset, b"x" * 12_000))
    batch.add(Growth(1, 0, 24_000, 0))
    assert len(sent) == 1
    batch.flush()
    batch.flush()
    assert [len(cast("list[object]", message["notices"])) for message in sent] == [1, 2]
