"""The gang on its Dask cluster: reserve slots, start one task a rank, hear of them, stop them, fetch from them."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from distributed import Client, Future

from ddptrain.clusters import slots
from ddptrain.driver.inbox import Inbox, Notice, TaskFailed, WorkerLost
from ddptrain.errors import ClusterError
from ddptrain.spec import SLOT_RESOURCE, RankSpec
from ddptrain.worker import task

_ALL_TOPIC = "all"  # where the scheduler tells of workers that come and go
_PING_S = 0.05
_ORDER_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where one rank runs; `scratch` is its worker's folder, `shared` whether the driver sees it too."""

    rank: int
    local_rank: int
    local_world_size: int
    node_rank: int
    slot: slots.Slot
    scratch: Path
    shared: bool


class Gang:
    """One attempt's ranks on a cluster; closing it frees the slots and ends what still runs."""

    def __init__(self, client: Client, run_id: str, inbox: Inbox) -> None:
        self.client = client
        self.run_id = run_id
        self.inbox = inbox
        self.futures: dict[int, Future[str]] = {}
        self._echo: set[str] = set()
        self._topic = task.topic(run_id)
        self._workers: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reserve(
        self,
        ranks: int | None,
        *,
        start_timeout_s: float,
        wait_s: float,
        worker_fault: Callable[[], str | None],
    ) -> list[Place]:
        """Get slots for all ranks (None: for as many as there are) or raise ClusterError, after the waits allowed.

        `start_timeout_s` is for workers to appear, `wait_s` for slots that other runs hold; `worker_fault` tells of a
        worker that will never appear.
        """
        self.client.register_plugin(slots.SlotBook())
        started = time.monotonic()
        while True:
            answer = self.client.run_on_scheduler(slots.reserve, self.client.id, self.run_id, ranks)
            if answer["slots"] is not None:
                return self._placed([slots.Slot(*item) for item in answer["slots"]])
            if (fault := worker_fault()) is not None:
                raise ClusterError(fault)
            waited = time.monotonic() - started
            enough = answer["total"] >= answer["asked"]
            if waited >= (wait_s if enough else start_timeout_s):
                raise ClusterError(_shortage(answer, waited))
            time.sleep(0.01 if waited < 5.0 else 0.2)

    def _placed(self, chosen: Sequence[slots.Slot]) -> list[Place]:
        hosts = list(dict.fromkeys(slot.host for slot in chosen))
        size = Counter(slot.host for slot in chosen)
        self._workers = sorted({slot.worker for slot in chosen})
        about = self.client.run(task.describe_host, workers=self._workers)
        seen: Counter[str] = Counter()
        places = []
        for rank, slot in enumerate(chosen):
            scratch = Path(about[slot.worker]["scratch"])
            shared = _same_token(scratch / "token", about[slot.worker]["token"])
            places.append(Place(rank, seen[slot.host], size[slot.host], hosts.index(slot.host), slot, scratch, shared))
            seen[slot.host] += 1
        return places

    def subscribe(self) -> None:
        """Hear every notice of the run from now on, and of workers that are lost. Raises ClusterError after 10 s."""
        self.client.subscribe_topic(self._topic, self._on_notice)
        self.client.subscribe_topic(_ALL_TOPIC, self._on_all)
        ping = uuid.uuid4().hex
        deadline = time.monotonic() + 10.0
        while ping not in self._echo:
            if time.monotonic() > deadline:
                raise ClusterError("the Dask scheduler did not echo an event within 10 s: is it overloaded?")
            self.client.log_event(self._topic, {"ping": ping})
            pause_until = time.monotonic() + _PING_S
            while ping not in self._echo and time.monotonic() < pause_until:
                time.sleep(0.001)

    def _on_notice(self, event: tuple[float, Mapping[str, Any]]) -> None:
        message = event[1]
        if "ping" in message:
            self._echo.add(message["ping"])
        else:
            self.inbox.put(Notice(message))

    def _on_all(self, event: tuple[float, Any]) -> None:
        message = event[1]
        if isinstance(message, Mapping) and message.get("action") == "remove-worker":
            self.inbox.put(WorkerLost(str(message.get("worker"))))

    def submit(self, spec: RankSpec, worker: str) -> None:
        """Start one rank on its worker."""
        future = self.client.submit(
            task.run_rank,
            spec.to_json(),
            key=spec.key,
            workers=[worker],
            allow_other_workers=False,
            resources={SLOT_RESOURCE: 1},
            pure=False,
            retries=0,
        )
        self.futures[spec.rank] = future
        future.add_done_callback(lambda done: self._on_done(spec.rank, done))

    def _on_done(self, rank: int, future: Future[str]) -> None:
        if future.status == "error":
            self.inbox.put(TaskFailed(rank, str(future.exception())))

    @property
    def connected(self) -> bool:
        """Whether the scheduler is there."""
        return self.client.status == "running"

    def forget(self, worker: str) -> None:
        """A worker is lost: ask nothing of it any more, for that would only wait for a connection."""
        self._workers = [address for address in self._workers if address != worker]

    def stop(self, specs: Iterable[RankSpec], grace_s: float | None) -> None:
        """Have the workers stop these ranks: SIGTERM, `grace_s` (None: the run's), SIGKILL. Does not wait for it."""
        keys = [spec.key for spec in specs]
        if not keys or not self._workers:
            return
        with contextlib.suppress(Exception):  # a worker that is gone has no ranks to stop
            self.client.run(task.stop_ranks, keys, grace_s, workers=self._workers, wait=False)

    def fetch(self, worker: str, path: Path, offset: int, size_bytes: int) -> bytes:
        """Bytes of a file in a worker's spool, through the scheduler. Raises ClusterError where they can't be had."""
        try:
            answer = self.client.run(task.read_spool, str(path), offset, size_bytes, workers=[worker])
            return bytes(answer[worker])
        except Exception as error:
            raise ClusterError(f"could not read {path} from the worker {worker}: {error}") from error

    def close(self) -> None:
        """Give the slots back, let the keys go (which ends whatever still runs), and forget the topic."""
        steps = (
            lambda: self.client.unsubscribe_topic(_ALL_TOPIC),
            lambda: self.client.unsubscribe_topic(self._topic),
            self._release_futures,
            lambda: self.client.run_on_scheduler(slots.release, self.run_id),
            self._remove_spools,
            lambda: self.client.run_on_scheduler(_drop_topic, self._topic),
        )
        for step in steps if self.connected else ():
            with contextlib.suppress(Exception):  # the cluster may be gone: then there is nothing to give back
                step()

    def _remove_spools(self) -> None:
        if self._workers:
            self.client.run(task.remove_spool, self.run_id, workers=self._workers, on_error="ignore")

    def _release_futures(self) -> None:
        self.client.cancel(list(self.futures.values()), force=True)
        self.futures.clear()


def _same_token(path: Path, token: str) -> bool:
    try:
        return path.read_text() == token
    except (OSError, UnicodeDecodeError):
        return False


def _shortage(answer: Mapping[str, Any], waited_s: float) -> str:
    holders = f"; held by {', '.join(answer['holders'])}" if answer["holders"] else ""
    return (
        f"{answer['asked']} slots were asked for, {answer['free']} of {answer['total']} are free after "
        f"{waited_s:.0f} s{holders}. Ask for fewer with --ranks, or start more "
        "workers (python -m ddptrain.worker --scheduler ADDRESS --slots N)"
    )


def _drop_topic(topic: str, dask_scheduler: Any) -> None:
    """For run_on_scheduler: the scheduler keeps a topic's last messages for ever otherwise."""
    broker = getattr(dask_scheduler, "_broker", None)
    if broker is not None:
        broker._topics.pop(topic, None)  # noqa: SLF001  # there is no public way
