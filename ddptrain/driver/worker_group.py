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
from distributed.comm.core import CommClosedError

from ddptrain.clusters.scheduler import slots
from ddptrain.driver import dask_call
from ddptrain.driver.messages import Inbox, Notice, TaskFailed, WorkerLost
from ddptrain.driver.reservation import Queue, Watchers, Wish
from ddptrain.errors import ClusterError
from ddptrain.protocol.encryption import has_secrets, seal_spec
from ddptrain.protocol.rank_spec import LOST_AFTER_S, SLOT_RESOURCE, RankSpec
from ddptrain.worker import tasks
from ddptrain.worker.spool import READ_LIMIT_BYTES

_ALL_TOPIC = "all"  # where the scheduler tells of workers that come and go
_PING_S = 0.05
_AGAIN_S = 0.5  # from a question that did not reach a worker to the next try
_ANSWER_S = 120.0  # for one that has no rank any more
_LOSS_S = 0.5  # from a broken connection to the word that its worker is lost
_GOODBYE_S = 3.0  # for the scheduler to take the slots back: longer, and it hangs


@dataclass(frozen=True, slots=True)
class Place:
    """Where one rank runs; `scratch` is its worker's folder, `shared` whether the driver sees it too."""

    rank: int
    local_rank: int
    local_world_size: int
    node_rank: int
    slot: slots.Slot
    hostname: str
    scratch: Path
    shared: bool
    gpu: str = ""  # the slot's device, as CUDA_VISIBLE_DEVICES names it

    @property
    def host(self) -> str:
        """The host in words: its name, and the address that the cluster knows it by."""
        known = self.slot.host
        return self.hostname if known in {self.hostname, "127.0.0.1", "::1"} else f"{self.hostname} ({known})"


class Gang:
    """One attempt's ranks on a cluster; closing it frees the slots and ends what still runs."""

    def __init__(
        self,
        client: Client,
        run_id: str,
        inbox: Inbox,
        lost_after_s: float = LOST_AFTER_S,
        *,
        foreign: bool = True,
    ) -> None:
        """A worker of the gang may be silent for `lost_after_s`; a cluster that is not `foreign` follows that."""
        self.client = client
        self.run_id = run_id
        self.inbox = inbox
        self.lost_after_s = lost_after_s
        self._cluster_limit_s = None if foreign else lost_after_s
        self.futures: dict[int, Future[str]] = {}
        scheduler: Any = client.scheduler  # None only before it has connected
        self._address = str(scheduler.address)
        self._echo: set[str] = set()
        self._topic = tasks.topic(run_id)
        self._workers: set[str] = set()
        self._avoided: set[str] = set()
        self._worker_of: dict[int, str] = {}
        self._heard: Counter[str] = Counter()  # notices, by worker

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reserve(self, wish: Wish, watchers: Watchers) -> list[Place]:
        """Get slots for all ranks, or raise ClusterError after the waits allowed."""
        checked = list(self.client.nthreads())
        if watchers.check is not None:
            watchers.check(checked)
        queue = Queue(wish, watchers)
        count = wish.ranks
        while True:
            answer = self._ask_for_slots(wish, count)
            if "unknown" in answer:
                new = [worker for worker in answer["unknown"] if worker not in checked]
                if watchers.check is not None and new:
                    watchers.check(new)
                self._learn(answer["unknown"])
            elif "slots" in answer:
                chosen = [slots.Slot(*item) for item in answer["slots"]]
                return self._placed(chosen, answer.get("lost_after_s"))
            else:
                count = queue.wait(slots.Refusal(**answer["refusal"]))

    def _ask_for_slots(self, wish: Wish, count: int | None) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = self.client.run_on_scheduler(
                slots.reserve,
                self.client.id,
                self.run_id,
                count,
                gpus_only=wish.gpus_only,
                in_line=wish.wait_s > 0,
                without=sorted(self._avoided),
                lost_after_s=self._cluster_limit_s,
            )
        except OSError as error:  # so it is for Dask when it went while we waited in line
            text = f"the Dask scheduler is gone, or the network to it: {self._address} ({error})"
            raise ClusterError(text) from error
        return answer

    def _learn(self, workers: list[str]) -> None:
        """Ask workers that are not ours what they offer, and tell the book."""
        about = self.client.run(tasks.offer, workers=workers, on_error="ignore")
        offers = dict.fromkeys(workers, (0, 0))  # who does not answer offers nothing
        offers |= {worker: (offer["slots"], offer["gpus"]) for worker, offer in about.items()}
        self.client.run_on_scheduler(slots.learn, offers)

    def _placed(self, chosen: Sequence[slots.Slot], lost_after_s: float | None) -> list[Place]:
        hosts = list(dict.fromkeys(slot.host for slot in chosen))
        size = Counter(slot.host for slot in chosen)
        self._workers = {slot.worker for slot in chosen}
        about = self._about({slot.worker: slot.host for slot in chosen}, lost_after_s)
        seen: Counter[str] = Counter()
        places = []
        for rank, slot in enumerate(chosen):
            of_worker = about[slot.worker]
            scratch = Path(of_worker["scratch"])
            gpus = of_worker["gpus"].split(",")
            places.append(
                Place(
                    rank=rank,
                    local_rank=seen[slot.host],
                    local_world_size=size[slot.host],
                    node_rank=hosts.index(slot.host),
                    slot=slot,
                    hostname=of_worker["hostname"],
                    scratch=scratch,
                    shared=_same_token(scratch / "token", of_worker["token"]),
                    gpu=gpus[slot.index] if slot.index < len(gpus) else "",
                )
            )
            seen[slot.host] += 1
        return places

    def _about(self, hosts: Mapping[str, str], lost_after_s: float | None) -> Mapping[str, Mapping[str, str]]:
        """What workers tell of themselves. Raises ClusterError that names the host of one that can't."""
        about: Mapping[str, Any] = self.client.run(
            tasks.describe_host,
            self.run_id,
            lost_after_s=lost_after_s,
            workers=sorted(hosts),
            on_error="return",
        )
        for worker, host in hosts.items():
            if isinstance(error := about[worker], ClusterError):
                raise error
            if isinstance(error, Exception):
                raise ClusterError(f"the Dask worker {worker} of host {host} does not answer: {error}") from error
        return about

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
            self._heard[self._worker_of.get(int(message["rank"]), "")] += 1
            self.inbox.put(Notice(message))

    def _on_all(self, event: tuple[float, Any]) -> None:
        message = event[1]
        if not isinstance(message, Mapping):
            return
        if message.get("action") == "add-worker":
            self._avoided.discard(str(message.get("worker")))  # it is back, or another one has its port
        if message.get("action") == "remove-worker":
            self.forget(str(message.get("worker")))  # at once: who is asking it something waits in vain
            self.inbox.put(WorkerLost(str(message.get("worker"))))

    def sealed(self, specs: Sequence[RankSpec], places: Sequence[Place]) -> list[RankSpec]:
        """The same, each one's secrets readable by its worker alone: specs are tasks, which a scheduler shows to many.

        Raises ClusterError where a worker does not answer.
        """
        workers = sorted({place.slot.worker for place, spec in zip(places, specs, strict=True) if has_secrets(spec)})
        if not workers:
            return list(specs)
        try:
            keys = self.client.run(tasks.sealing_key, self.run_id, workers=workers)
        except Exception as error:
            raise ClusterError(f"the workers have no keys to seal the ranks' environment with: {error}") from error
        return [
            seal_spec(spec, keys[place.slot.worker]) if has_secrets(spec) else spec
            for spec, place in zip(specs, places, strict=True)
        ]

    def submit(self, spec: RankSpec, slot: slots.Slot) -> None:
        """Start one rank in its slot."""
        future = self.client.submit(
            tasks.run_rank,
            spec.to_json(),
            key=spec.key,
            workers=[slot.worker],
            allow_other_workers=False,
            resources={SLOT_RESOURCE: 1} if slot.counted else None,
            pure=False,
            retries=0,
        )
        self.futures[spec.rank] = future
        self._worker_of[spec.rank] = slot.worker
        future.add_done_callback(lambda done: self._on_done(spec, done))

    def _on_done(self, spec: RankSpec, future: Future[str]) -> None:
        if self.futures.get(spec.rank) is not future:
            return  # of an attempt that is over
        if future.status == "error":
            self.inbox.put(TaskFailed(spec.attempt, spec.rank, str(future.exception())))
        elif future.status == "cancelled":
            self.inbox.put(
                TaskFailed(
                    spec.attempt, spec.rank, f"the Dask scheduler is gone, or the network to it: {self._address}"
                )
            )

    @property
    def connected(self) -> bool:
        """Whether the scheduler is there."""
        return self.client.status == "running"

    def forget(self, worker: str) -> None:
        """A worker is lost: ask nothing of it any more, for that would only wait for a connection."""
        self._workers.discard(worker)
        self.avoid(worker)

    def avoid(self, worker: str) -> None:
        """Take no slots of this worker any more: it is lost, or about to go."""
        self._avoided.add(worker)

    def has(self, worker: str) -> bool:
        """Whether a worker of the gang is there, as far as is known."""
        return worker in self._workers

    def stop(self, specs: Iterable[RankSpec], grace_s: float | None) -> None:
        """Have the workers stop these ranks: SIGTERM, `grace_s` (None: the run's), SIGKILL. Does not wait for it."""
        self._order(tasks.stop_ranks, [spec.key for spec in specs], grace_s)

    def _order(self, function: Callable[..., Any], keys: list[str], what: object) -> None:
        """Have every worker do something with its own ones of these keys."""
        if not keys or not self._workers:
            return
        workers = sorted(self._workers)
        with contextlib.suppress(Exception):  # a worker that is gone has no ranks any more
            run = self.client.run(function, self.run_id, keys, what, workers=workers, asynchronous=True)
            dask_call.order(self.client, run)

    def tell(self, specs: Iterable[RankSpec], order: str) -> None:
        """Give these ranks an order. Does not wait for it."""
        self._order(tasks.tell_ranks, [spec.key for spec in specs], order)

    def fetch(self, worker: str, path: Path, offset: int, size_bytes: int) -> bytes:
        """Bytes of a file in a worker's spool, through the scheduler. Raises ClusterError where they can't be had.

        A worker that is silent for too long meanwhile is lost; the inbox tells of it.
        """
        try:
            if not self.has(worker):
                raise ConnectionError("it is lost")
            return self._answered(worker, tasks.read_spool, self.run_id, str(path), offset, size_bytes)
        except Exception as error:
            self._check_on(worker, error)
            raise ClusterError(f"could not read {path} from the worker {worker}: {error}") from error

    def _answered(self, worker: str, function: Callable[..., Any], *words: object) -> bytes:
        """What a worker answers. A network that is cut for less than lost_after_s only delays it."""
        deadline = time.monotonic() + self.lost_after_s
        while True:
            run = self.client.run(function, *words, workers=[worker], asynchronous=True)
            try:
                answer = dask_call.answer(
                    self.client, run, lambda: self._patience_s(worker), lambda: self._heard[worker]
                )
                return bytes(answer[worker])
            except OSError as error:
                late = time.monotonic() > deadline or not self.has(worker) or not self.connected
                if late or not _of_network(error):
                    raise
            time.sleep(_AGAIN_S)

    def _patience_s(self, worker: str) -> float:
        """How long an answer of a worker is waited for without a word from any of its ranks."""
        if not self.has(worker):
            return 0.0
        speaks = any(self._worker_of[rank] == worker for rank, future in [*self.futures.items()] if not future.done())
        return self.lost_after_s if speaks else max(_ANSWER_S, self.lost_after_s)

    def _check_on(self, worker: str, error: Exception) -> None:
        """Find out whether an error means that a worker is lost, before others draw conclusions from it."""
        if isinstance(error, TimeoutError) and self.has(worker):
            self.forget(worker)
            self.inbox.put(WorkerLost(worker))
        deadline = time.monotonic() + _LOSS_S
        while self.has(worker) and time.monotonic() < deadline:
            time.sleep(0.01)

    def close(self) -> None:
        """Let the keys go, which ends whatever still runs, and give the slots back, which clears up on the cluster."""
        if not self.connected:
            return  # then there is nothing to give back
        with contextlib.suppress(Exception):
            self.client.unsubscribe_topic(_ALL_TOPIC)  # not that of the run: it goes as a whole, and this may come late
        with contextlib.suppress(Exception):
            self._release_futures()
        with contextlib.suppress(Exception):
            asked = self.client.run_on_scheduler(slots.release, self.run_id, asynchronous=True)
            dask_call.answer(self.client, asked, lambda: _GOODBYE_S, lambda: 0)

    def end_attempt(self) -> None:
        """Let the keys of an attempt go, which ends whatever may still run; slots and workers stay for the next one."""
        with contextlib.suppress(Exception):
            self._release_futures()

    def _release_futures(self) -> None:
        futures = list(self.futures.values())
        self.futures.clear()
        self.client.cancel(futures, force=True)

    def place(self, places: Iterable[Place], folder: Path, files: Sequence[str], manifest: str, what: str) -> list[str]:
        """The path under which each place's worker finds a folder: the driver's own, or a copy that is made there.

        `manifest` is the file by whose text a worker knows that it sees the driver's; `what` is in the folder, for
        errors. Raises ClusterError.
        """
        found: dict[str, str] = {}
        marker = folder / manifest
        for worker in dict.fromkeys(place.slot.worker for place in places):
            try:
                text = marker.read_text(encoding="utf-8")
                seen = self.client.run(tasks.holds_file, str(marker), text, workers=[worker])[worker]
                found[worker] = str(folder) if seen else self._copied(worker, folder, files)
            except Exception as error:
                raise ClusterError(f"could not bring {what} {folder} to the worker {worker}: {error}") from error
        return [found[place.slot.worker] for place in places]

    def _copied(self, worker: str, folder: Path, files: Sequence[str]) -> str:
        target = ""
        for name in files:
            with (folder / name).open("rb") as file:
                offset = 0
                while (data := file.read(READ_LIMIT_BYTES)) or not offset:
                    path = f"brought-{folder.name}/{name}"
                    answer = self.client.run(tasks.write_spool, self.run_id, path, offset, data, workers=[worker])
                    target = str(Path(answer[worker]).parent)
                    offset += len(data)
                    if not data:
                        break
        return target


def _of_network(error: OSError) -> bool:
    """Whether the question may not have reached the worker; other errors are the worker's answer."""
    return isinstance(error, CommClosedError) or (type(error) is OSError and error.errno is None)


def _same_token(path: Path, token: str) -> bool:
    try:
        return path.read_text() == token
    except (OSError, UnicodeDecodeError):
        return False
