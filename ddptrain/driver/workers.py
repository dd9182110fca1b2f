"""The workers of a run on their Dask cluster: reserves slots, submits and stops ranks, and receives their notices.

Of a run only this file talks to Dask.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import dask
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from distributed import Client, Future
from distributed.comm.core import CommClosedError

from ddptrain.clusters.scheduler import slots
from ddptrain.config.rank_settings import LOST_AFTER_S
from ddptrain.driver.inbox import Inbox, TaskFailed, WorkerLost
from ddptrain.driver.ranks import RankPlace, rank_places
from ddptrain.driver.reservation import SlotQueue, SlotRequest, WaitHooks
from ddptrain.errors import ClusterError, DdptrainError, UsageError, one_line
from ddptrain.file_ops import sha256
from ddptrain.log import Log
from ddptrain.protocol.commands import Command
from ddptrain.protocol.news import NewsError, decode
from ddptrain.protocol.rank_spec import SLOT_RESOURCE, RankSpec
from ddptrain.worker import driver_calls, rank_task
from ddptrain.worker.spool import READ_LIMIT_BYTES

_MOST_LOGGED = 10  # rejected messages
_SUBSCRIBE_S = 10.0
_FIRST_PING_S = 0.004
_PING_S = 0.05
_AGAIN_S = 0.5  # between a request that did not reach a worker and the next try
_LOSS_S = 0.5  # between a broken connection and the message that its worker is lost
_RELEASE_S = 3.0  # for the scheduler to take the slots back
_POLL_S = 0.2
_SPECS_PER_CALL = 128  # unless a worker alone has more: some 10 kB
_log = Log(__name__)
_worker_log = Log("ddptrain.worker")  # what workers have decided
_LARGEST_GRAPH = "1 GiB"  # Dask advises against 10 MB, which are the specs of some thousand ranks

Question = Coroutine[Any, Any, Any]  # the type of Client.run(..., asynchronous=True) and similar methods
_TOPIC = "all"  # the topic of messages about new and lost workers

Handler = Callable[[tuple[float, Any]], None]


class Workers:
    """The ranks of a run on a cluster. Closing it frees the slots and ends what still runs.

    rejected: how many messages of workers were not valid; first_rejected: the reason for the first of them.
    """

    def __init__(
        self,
        client: Client,
        run_id: str,
        inbox: Inbox,
        lost_after_s: float = LOST_AFTER_S,
        *,
        foreign: bool = True,
        news: ClusterNews | None = None,
    ) -> None:
        """A worker may be silent for `lost_after_s`; a cluster that is not `foreign` adapts its limits to this value.

        `news` is shared by the worker groups of a client; by default there is only this one.
        """
        self.client = client
        self.run_id = run_id
        self.inbox = inbox
        self.lost_after_s = lost_after_s
        self._cluster_limit_s = None if foreign else lost_after_s
        self.futures: dict[int, Future[None]] = {}  # the task of each rank
        scheduler: Any = client.scheduler  # None only before it has connected
        self._address = str(scheduler.address)
        self._news = news or ClusterNews(client)
        self._ping = uuid.uuid4().hex
        self._echoed = threading.Event()
        self._topic = rank_task.topic(run_id)
        self._workers: set[str] = set()
        self._avoided: set[str] = set()
        self.rejected = 0
        self.first_rejected = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reserve(self, request: SlotRequest, hooks: WaitHooks) -> list[RankPlace]:
        """Reserve slots for all ranks. Raises ClusterError after the longest allowed wait."""
        checked = list(self.client.nthreads())
        if hooks.check is not None:
            hooks.check(checked)
        queue = SlotQueue(request, hooks)
        count = request.ranks
        while True:
            answer = self._ask_for_slots(request, count)
            if "unknown" in answer:
                new = [worker for worker in answer["unknown"] if worker not in checked]
                if hooks.check is not None and new:
                    hooks.check(new)
                self._learn(answer["unknown"])
            elif "slots" in answer:
                chosen = [slots.Slot(*item) for item in answer["slots"]]
                return self._placed(chosen, answer.get("lost_after_s"))
            else:
                _log.debug("no slots yet", **answer["refusal"])
                count = queue.wait(slots.Refusal(**answer["refusal"]))

    def _ask_for_slots(self, request: SlotRequest, count: int | None) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = self.client.run_on_scheduler(
                slots.reserve,
                self.client.id,
                self.run_id,
                count,
                gpus_only=request.gpus_only,
                in_line=request.wait_s > 0,
                without=sorted(self._avoided),
                lost_after_s=self._cluster_limit_s,
                priority=request.priority,
            )
        except OSError as error:  # what Dask raises if the scheduler went while we waited
            text = f"the Dask scheduler has ended, or the network to it is down: {self._address} ({error})"
            raise ClusterError(text) from error
        return answer

    def _learn(self, workers: list[str]) -> None:
        """Ask workers that ddptrain did not start how many slots they have, and report that to the scheduler.

        Raises ClusterError if a worker can't list its GPUs.
        """
        about = self.client.run(driver_calls.describe_offer, workers=workers, on_error="return")
        offers = dict.fromkeys(workers, (0, 0))  # a worker that does not answer offers nothing
        for worker, offer in about.items():
            if isinstance(offer, ClusterError):
                raise ClusterError(f"the worker {worker} can't be used: {offer}")
            if not isinstance(offer, Exception):
                offers[worker] = offer
        self.client.run_on_scheduler(slots.learn, offers)

    def _placed(self, chosen: Sequence[slots.Slot], lost_after_s: float | None) -> list[RankPlace]:
        # A worker that is avoided was lost after the scheduler had reserved its slots.
        self._workers = {slot.worker for slot in chosen} - self._avoided
        about = self._about({slot.worker: slot.host for slot in chosen}, lost_after_s)
        shared = {worker: _same_token(Path(of["scratch"]) / "token", of["token"]) for worker, of in about.items()}
        places = rank_places(chosen, about, shared)
        for place in places:
            where = {"worker": place.slot.worker, "slot": place.slot.index, "gpu": place.gpu or None}
            _log.info("rank placed", rank=place.rank, host=place.host, shares_files=place.shared, **where)
        return places

    def _about(self, hosts: Mapping[str, str], lost_after_s: float | None) -> Mapping[str, Mapping[str, str]]:
        """Return the descriptions of the workers' hosts. Raises ClusterError, which names the host, if one fails."""
        about: Mapping[str, Any] = self.client.run(
            driver_calls.describe_host,
            self.run_id,
            lost_after_s=lost_after_s,
            workers=sorted(hosts),
            on_error="return",
        )
        for worker, host in hosts.items():
            if isinstance(error := about[worker], Exception):
                fault = "can't run ranks" if isinstance(error, ClusterError) else "does not answer"
                raise ClusterError(f"the Dask worker {worker} of host {host} {fault}: {error}") from error
        return about

    def subscribe(self) -> None:
        """Receive news of the run's workers, and their losses, from now on. Raises ClusterError after 10 s."""
        self.client.subscribe_topic(self._topic, self._on_news)
        self._news.add(self.run_id, self._on_all)
        deadline, pause_s = time.monotonic() + _SUBSCRIBE_S, _FIRST_PING_S
        while not self._echoed.is_set():
            if time.monotonic() > deadline:
                raise ClusterError("the Dask scheduler did not echo an event within 10 s: is it overloaded?")
            self.client.log_event(self._topic, {"ping": self._ping})  # it may overtake the subscription
            self._echoed.wait(pause_s)
            pause_s = min(2 * pause_s, _PING_S)

    def _on_news(self, event: tuple[float, object]) -> None:
        message = event[1]
        if isinstance(message, Mapping) and "ping" in message:
            if message["ping"] == self._ping:
                self._echoed.set()
            return
        try:
            news = decode(message)
        except NewsError as error:
            self.reject(str(error))
            return
        for line in news.log:
            _worker_log.info(line.text, run=self.run_id, attempt=news.attempt, rank=line.rank, worker=news.worker)
        self.inbox.put(news)

    def reject(self, reason: str) -> None:
        """Count a message of a worker that is not valid."""
        self.rejected += 1
        self.first_rejected = self.first_rejected or reason
        if self.rejected <= _MOST_LOGGED:
            _log.info("message rejected", reason=reason)

    def _on_all(self, event: tuple[float, Any]) -> None:
        message = event[1]
        if not isinstance(message, Mapping):
            return
        if message.get("action") == "add-worker":
            self._avoided.discard(str(message.get("worker")))  # it is back, or a new worker has its port
        if message.get("action") == "remove-worker":
            self.forget(str(message.get("worker")))  # at once: threads that wait for its answer must not wait longer
            self.inbox.put(WorkerLost(str(message.get("worker"))))

    def give(self, specs: Sequence[RankSpec], places: Sequence[RankPlace]) -> None:
        """Send the specs of an attempt to the workers of their ranks. Does not wait.

        They are not part of the ranks' tasks, because the scheduler keeps tasks and shows them to all of its clients.
        """
        by_worker: dict[str, list[RankSpec]] = {}
        for spec, place in zip(specs, places, strict=True):
            by_worker.setdefault(place.slot.worker, []).append(spec)
        send(self.client, self._give(by_worker))

    async def _give(self, by_worker: Mapping[str, Sequence[RankSpec]]) -> None:
        calls: list[dict[str, Sequence[RankSpec]]] = []  # several workers in one, which get the specs of all of them
        for worker, specs in by_worker.items():
            if not calls or sum(map(len, calls[-1].values())) + len(specs) > _SPECS_PER_CALL:
                calls.append({})
            calls[-1][worker] = specs

        async def give(call: Mapping[str, Sequence[RankSpec]]) -> None:
            specs = [spec for of_worker in call.values() for spec in of_worker]
            data = zlib.compress(json.dumps({spec.rank: spec.to_json() for spec in specs}).encode(), level=1)
            run = partial(self.client.run, workers=list(call), on_error="return", asynchronous=True)
            try:
                answers = await run(driver_calls.give_specs, self.run_id, specs[0].attempt, data)
            except Exception as error:  # Dask raises any type if the scheduler has ended
                answers = dict.fromkeys(call, error)
            if failed := {worker: answer for worker, answer in answers.items() if isinstance(answer, Exception)}:
                await asyncio.sleep(_LOSS_S)
            for worker, raised in failed.items():
                text = f"its worker {worker} did not take its spec: {one_line(raised)}"
                for spec in call[worker] if self.has(worker) else ():  # a lost worker has a message of its own
                    self.inbox.put(TaskFailed(spec.attempt, spec.rank, text))

        await asyncio.gather(*map(give, calls))

    def submit(self, specs: Sequence[RankSpec], chosen: Sequence[slots.Slot]) -> None:
        """Start these ranks in their slots, by one Dask task for each worker, all of them in one message.

        Client.submit would cost the driver eight times as much, and the scheduler would read one graph after another.
        """
        by_worker: dict[str, list[RankSpec]] = {}
        for spec, slot in zip(specs, chosen, strict=True):
            by_worker.setdefault(slot.worker, []).append(spec)
            _log.info("rank ordered", rank=spec.rank, worker=slot.worker, slot=slot.index, port=spec.group.master_port)
        counted = {slot.worker for slot in chosen if slot.counted}
        layers = {}
        for worker, group in by_worker.items():
            first = group[0]
            order = rank_task.Order(self.run_id, first.attempt, [spec.rank for spec in group], first.group.master_port)
            annotations: dict[str, Any] = {"workers": [worker], "allow_other_workers": False}
            annotations |= {"resources": {SLOT_RESOURCE: len(group)}} if worker in counted else {}
            layers[first.key] = MaterializedLayer({first.key: (rank_task.run_ranks, order)}, annotations=annotations)
        graph = HighLevelGraph(layers, {key: set() for key in layers})
        with dask.config.set({"distributed.admin.large-graph-warning-threshold": _LARGEST_GRAPH}):
            futures: list[Future[None]] = self.client.get(graph, list(layers), sync=False)
        for group, future in zip(by_worker.values(), futures, strict=True):
            self.futures.update((spec.rank, future) for spec in group)
            future.add_done_callback(partial(self._on_done, group))

    def _on_done(self, group: Sequence[RankSpec], future: Future[None]) -> None:
        if self.futures.get(group[0].rank) is not future:
            return  # of an earlier attempt
        match future.status:
            case "error":
                text = str(future.exception())
            case "cancelled" if self.connected:  # Client.restart or Client.cancel of another program
                text = "its Dask task was cancelled: has somebody restarted the cluster's workers?"
            case "cancelled":
                text = f"the Dask scheduler has ended, or the network to it is down: {self._address}"
            case _:
                return
        for spec in group:
            self.inbox.put(TaskFailed(spec.attempt, spec.rank, text))

    @property
    def connected(self) -> bool:
        """Whether the scheduler can be reached."""
        return self.client.status == "running"

    def forget(self, worker: str) -> None:
        """Send nothing more to a lost worker, which would only wait for a connection; reserve none of its slots."""
        _log.info("worker lost", worker=worker, of_this_run=self.has(worker))
        self._workers.discard(worker)
        self.avoid(worker)

    def avoid(self, worker: str) -> None:
        """Reserve no more slots of this worker, which is lost or about to stop."""
        _log.info("worker is avoided from now on", worker=worker)
        self._avoided.add(worker)

    def has(self, worker: str) -> bool:
        """Return whether this is a worker of the group that is not known to be lost."""
        return worker in self._workers

    def stop(self, specs: Sequence[RankSpec], grace_s: float) -> None:
        """Send these ranks SIGTERM, and SIGKILL after `grace_s`. Does not wait."""
        _log.info("stopping ranks: SIGTERM, then SIGKILL", ranks=[spec.rank for spec in specs], grace_s=grace_s)
        self._order(driver_calls.stop_ranks, [spec.key for spec in specs], grace_s)

    def _order(self, function: Callable[..., Any], keys: list[str], what: object) -> None:
        """Call a function on every worker of the group with these keys; each worker ignores those of the others."""
        if not keys or not self._workers:
            return
        workers = sorted(self._workers)
        with contextlib.suppress(Exception):  # a lost worker has no ranks; a closing client raises any type
            run = self.client.run(function, self.run_id, keys, what, workers=workers, asynchronous=True)
            send(self.client, run)

    def tell(self, specs: Sequence[RankSpec], command: Command, text: str | None = None) -> None:
        """Send these ranks a command, INPUT with a text. Does not wait."""
        _log.info("command to ranks", command=str(command), ranks=[spec.rank for spec in specs])
        order = str(command) if text is None else f"{command} {json.dumps(text)}"
        self._order(driver_calls.send_command, [spec.key for spec in specs], order)

    def fetch(self, worker: str, path: Path, offset: int, size_bytes: int) -> bytes:
        """Return bytes of a file in a worker's spool, through the scheduler. Waits until they are here or it is lost.

        Raises ClusterError if they can't be read.
        """
        try:
            if not self.has(worker):
                raise ConnectionError("it is lost")
            return self._answered(worker, driver_calls.read_spool, str(path), offset, size_bytes)
        except Exception as error:  # a worker's own exception arrives as it was raised there
            deadline = time.monotonic() + _LOSS_S
            while self.has(worker) and time.monotonic() < deadline:  # the message that it is lost is sent later
                time.sleep(0.01)
            raise ClusterError(f"could not read {path} from the worker {worker}: {error}") from error

    def _answered(self, worker: str, function: Callable[..., Any], *arguments: object) -> bytes:
        """Call a function on a worker and return its answer. A network cut shorter than lost_after_s only delays it."""
        deadline = time.monotonic() + self.lost_after_s
        while True:
            run = self.client.run(function, *arguments, workers=[worker], asynchronous=True)
            try:
                asked = send(self.client, run)
                while not concurrent.futures.wait([asked], _POLL_S).done:
                    if not self.has(worker):  # without news for lost_after_s, the attempt has given it up
                        asked.cancel()
                        raise ConnectionError("it is lost")
                return bytes(asked.result()[worker])
            except OSError as error:
                late = time.monotonic() > deadline or not self.has(worker) or not self.connected
                if late or not _of_network(error):
                    raise
            time.sleep(_AGAIN_S)

    def close(self) -> None:
        """Release the tasks, which ends whatever still runs, and the slots, which removes the run from the cluster."""
        if not self.connected:
            return  # the scheduler has released everything
        with contextlib.suppress(Exception):  # Dask raises any type while a connection breaks; the next calls must run
            self._news.remove(self.run_id)
            self.client.unsubscribe_topic(self._topic)
        self.end_attempt()
        with contextlib.suppress(Exception):  # as above
            asked = self.client.run_on_scheduler(slots.release, self.run_id, client=self.client.id, asynchronous=True)
            send(self.client, asked).result(_RELEASE_S)

    def end_attempt(self) -> None:
        """Release the tasks of an attempt, which ends whatever still runs. The slots stay for the next attempt."""
        futures = list({future.key: future for future in self.futures.values()}.values())
        self.futures.clear()
        with contextlib.suppress(Exception):  # Dask raises any type while a connection breaks
            self.client.cancel(futures, force=True)

    def ask(self, workers: Sequence[str], function: Callable[..., Any], *arguments: object) -> dict[str, Any]:
        """Call a function on these workers; return the answers by worker.

        Raises ClusterError, which names a worker, and the first UsageError of a worker.
        """
        try:
            answers = dict(self.client.run(function, *arguments, workers=list(workers), on_error="return"))
        except DdptrainError:  # also a signal
            raise
        except Exception as error:  # Dask raises any type if the scheduler has ended
            answers = {", ".join(workers): error}
        for worker, answer in answers.items():
            if isinstance(answer, UsageError):
                raise answer
            if isinstance(answer, Exception):
                raise ClusterError(f"{worker}: {answer}") from answer
        return answers

    def place(
        self, places: Sequence[RankPlace], folder: Path, files: Sequence[str], manifest: str, what: str
    ) -> list[str]:
        """The path of a folder for each place's worker: the driver's own path, or that of a copy on the worker's host.

        A worker sees a folder if the file `manifest`, one of `files`, has the same text there. `what` names the
        folder's content in errors. Raises ClusterError.
        """
        host_of = {place.slot.worker: place.slot.host for place in places}
        try:
            text = (folder / manifest).read_text(encoding="utf-8")
            seen = self.ask(list(host_of), driver_calls.holds_file, str(folder / manifest), text)
            lacking = {worker: host for worker, host in host_of.items() if not seen[worker]}
            found = {**dict.fromkeys(host_of, str(folder)), **self.copy(lacking, folder, files, manifest)}
        except (ClusterError, OSError, UnicodeDecodeError) as error:
            raise ClusterError(f"could not copy {what} {folder} to the workers: {error}") from error
        return [found[place.slot.worker] for place in places]

    def copy(self, host_of: Mapping[str, str], folder: Path, files: Sequence[str], manifest: str) -> dict[str, str]:
        """Copy these files of a folder once to each host; return the path of the copy for each worker.

        Folders with different manifests get different copies. Raises ClusterError, which names the worker, and OSError.
        """
        found: dict[str, str] = {}
        text = (folder / manifest).read_text(encoding="utf-8") if host_of else ""
        copy = f"brought-{sha256(text.encode()).hexdigest()[:8]}-{folder.name}"
        while without := [worker for worker in host_of if worker not in found]:
            first = {host_of[worker]: worker for worker in reversed(without)}  # one for each host
            for name in files:
                paths = self._write(list(first.values()), f"{copy}/{name}", folder / name)
            found |= {worker: str(Path(path).parent) for worker, path in paths.items()}
            for host, worker in first.items():
                others = [each for each in without if host_of[each] == host and each != worker]
                path = str(Path(found[worker]) / manifest)
                seen = self.ask(others, driver_calls.holds_file, path, text) if others else {}
                found |= {other: found[worker] for other, is_seen in seen.items() if is_seen}
        return found

    def _write(self, workers: Sequence[str], path: str, file: Path) -> dict[str, str]:
        """Write a file into the run's scratch folder on each worker; return the paths there."""
        with file.open("rb") as source:
            paths = self.ask(workers, driver_calls.write_spool, self.run_id, path, 0, source.read(READ_LIMIT_BYTES))
            while data := source.read(READ_LIMIT_BYTES):
                offset = source.tell() - len(data)
                self.ask(workers, driver_calls.write_spool, self.run_id, path, offset, data)
        return paths


def _of_network(error: OSError) -> bool:
    """Return whether the request may not have reached the worker; other errors are the worker's answer."""
    return isinstance(error, CommClosedError) or (type(error) is OSError and error.errno is None)


def _same_token(path: Path, token: str) -> bool:
    try:
        return path.read_text() == token
    except (OSError, UnicodeDecodeError):
        return False


# --- messages of the scheduler about its workers ---


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


# --- calls of the cluster ---


def send(client: Client, question: Question) -> concurrent.futures.Future[Any]:
    """Send the question without waiting for the answer."""
    loop: Any = client.loop  # tornado's, around asyncio's
    return asyncio.run_coroutine_threadsafe(question, loop.asyncio_loop)
