"""What a worker group asks the scheduler and the workers, and what it makes of their answers, silence and errors."""

from __future__ import annotations

import errno
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from distributed.comm.core import CommClosedError

from ddptrain import log
from ddptrain.clusters.scheduler import slots
from ddptrain.clusters.scheduler.slots import Slot
from ddptrain.driver.attempt.inbox import WorkerLost
from ddptrain.driver.worker_group import dask_call
from ddptrain.driver.worker_group import worker_group as module
from ddptrain.driver.worker_group.rank_place import RankPlace
from ddptrain.driver.worker_group.reservation import SlotRequest, WaitHooks
from ddptrain.driver.worker_group.worker_group import WorkerGroup
from ddptrain.errors import ClusterError
from ddptrain.protocol import worker_notices
from ddptrain.protocol.commands import Command
from ddptrain.worker import driver_calls
from tests.support.fake_time import Clock
from tests.unit.notes import Notes
from tests.unit.specs import make_spec

A, B = "tcp://a:1", "tcp://b:1"
ABOUT = {"scratch": "/s", "token": "t", "gpus": "", "hostname": "name"}


class Client:
    """A client that notes its calls, and answers those of a function as the test says: one after the other."""

    id = "client-1"
    scheduler = SimpleNamespace(address="tcp://s:1")
    status = "running"

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.answers: dict[Any, list[Any]] = {}
        self.handlers: dict[str, Callable[[Any], None]] = {}

    def answer(self, function: Any, *answers: Any) -> None:
        self.answers[function] = list(answers)

    def run(self, function: Any, *arguments: Any, **options: Any) -> Any:
        self.calls.append((function, *arguments, options))
        answers = self.answers.get(function)
        found = answers.pop(0) if answers else None
        if isinstance(found, Exception):
            raise found
        return found

    run_on_scheduler = run

    def nthreads(self) -> dict[str, int]:
        return {A: 1}

    def subscribe_topic(self, topic: str, handler: Callable[[Any], None]) -> None:
        self.handlers[topic] = handler

    def log_event(self, topic: str, message: Any) -> None:
        self.calls.append(("log_event", topic, message))

    def cancel(self, futures: list[Any], *, force: bool) -> None:
        self.calls.append(("cancel", futures, force))

    def get(self, graph: Any, keys: list[str], *, sync: bool) -> list[Any]:
        layers = [graph.layers[key] for key in keys]
        self.calls.append(("get", [layer.annotations.get("resources") for layer in layers], sync))
        return [Notes([], "future", key=key, done=lambda: False, status="pending") for key in keys]


class Waits:
    """Stands for dask_call: `outcomes` are the answers or errors of the next waits."""

    def __init__(self, real: Any, *outcomes: Any) -> None:
        self.outcomes = list(outcomes)
        self.seen: list[tuple[Any, float, int]] = []
        self.sent: list[Any] = []
        self.submit = real.submit

    def wait_for_answer(self, client: Any, question: Any, patience: Callable[[], float], heard: Any) -> Any:
        self.seen.append((question, patience(), heard()))
        found = self.outcomes.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    def send(self, client: Any, question: Any) -> None:
        self.sent.append(question)


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def news() -> list[tuple[Any, ...]]:
    return []


@pytest.fixture
def group(client: Client, news: list[tuple[Any, ...]]) -> WorkerGroup:
    made = WorkerGroup(cast("Any", client), "r-1", queue.SimpleQueue(), 30.0, news=cast("Any", Notes(news, "news")))
    made._workers = {A, B}
    return made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[Waits]:
    made = Waits(dask_call)
    monkeypatch.setattr(module, "dask_call", made)
    yield made
    assert not made.outcomes


def hooks(check: Any = None) -> WaitHooks:
    return WaitHooks(check, lambda: None, lambda: "", lambda _: None, "")


def place(rank: int, worker: str) -> RankPlace:
    return RankPlace(rank, 0, 1, 0, Slot(worker, "h", 0, False, True), "name", Path("/s"), False)


# --- reservation ---


def test_worker_that_the_scheduler_does_not_know_is_checked_once_and_asked_what_it_offers(
    group: WorkerGroup, client: Client
) -> None:
    client.answer(slots.reserve, {"unknown": [A, B]}, {"slots": [(A, "a", 0, False, True)], "lost_after_s": 7.0})
    client.answer(driver_calls.describe_offer, {A: {"slots": 2, "gpus": 1}})
    client.answer(driver_calls.describe_host, {A: ABOUT})
    checked: list[list[str]] = []
    (found,) = group.reserve(SlotRequest(1, False, 5.0, 0.0), hooks(checked.append))
    assert (found.slot, found.hostname, found.shared) == (Slot(A, "a", 0, False, True), "name", False)
    assert checked == [[A], [B]]
    assert client.calls[1:3] == [
        (driver_calls.describe_offer, {"workers": [A, B], "on_error": "return"}),
        (slots.learn, {A: (2, 1), B: (0, 0)}, {}),
    ]
    options = {"lost_after_s": 7.0, "workers": [A], "on_error": "return"}
    assert client.calls[-1] == (driver_calls.describe_host, "r-1", options)
    assert group.has(A) and not group.has(B)


def test_known_worker_is_not_checked_again(group: WorkerGroup, client: Client) -> None:
    client.answer(slots.reserve, {"unknown": [A]}, {"slots": []})
    client.answer(driver_calls.describe_offer, {})
    client.answer(driver_calls.describe_host, {})
    checked: list[list[str]] = []
    assert group.reserve(SlotRequest(None, False, 5.0, 0.0), hooks(checked.append)) == []
    assert checked == [[A]]
    client.answer(slots.reserve, {"unknown": [B]}, {"slots": []})
    client.answer(driver_calls.describe_offer, {})
    client.answer(driver_calls.describe_host, {})
    assert group.reserve(SlotRequest(None, False, 5.0, 0.0), hooks()) == []  # a cluster of ddptrain needs no check


def test_refusal_waits_for_another_number(group: WorkerGroup, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal: dict[str, Any] = {
        "asked": 3,
        "free": 1,
        "total": 2,
        "place": 1,
        "holders": (),
        "hosts": {},
        "of_any_kind": 2,
    }
    client.answer(slots.reserve, {"refusal": refusal}, {"slots": []})
    client.answer(driver_calls.describe_host, {})
    waited: list[slots.Refusal] = []
    made: list[Any] = []

    class Queue:
        def __init__(self, *arguments: Any) -> None:
            made.append(arguments)

        def wait(self, refusal: slots.Refusal) -> int:
            waited.append(refusal)
            return 2

    monkeypatch.setattr(module, "SlotQueue", Queue)
    request, own = SlotRequest(3, True, 5.0, 60.0), hooks()
    group.reserve(request, own)
    assert waited == [slots.Refusal(**refusal)] and made == [(request, own)]
    asked = [call for call in client.calls if call[0] is slots.reserve]
    assert [call[1:4] for call in asked] == [("client-1", "r-1", 3), ("client-1", "r-1", 2)]


def test_scheduler_that_is_gone_is_named_with_its_address(group: WorkerGroup, client: Client) -> None:
    client.answer(slots.reserve, ConnectionError("cut"))
    with pytest.raises(
        ClusterError, match=r"^the Dask scheduler has ended, or the network to it is down: tcp://s:1 \(cut\)$"
    ):
        group.reserve(SlotRequest(1, False, 5.0, 0.0), hooks())


def test_error_that_a_worker_explains_itself_names_worker_and_host(group: WorkerGroup, client: Client) -> None:
    error = ClusterError("no room in /tmp")
    client.answer(slots.reserve, {"slots": [(B, "b", 0, False, True), (A, "a", 0, False, True)]})
    client.answer(driver_calls.describe_host, {A: ABOUT, B: error})
    with pytest.raises(ClusterError) as raised:
        group.reserve(SlotRequest(2, False, 5.0, 0.0), hooks())
    assert str(raised.value) == f"the Dask worker {B} of host b can't run ranks: no room in /tmp"
    assert raised.value.__cause__ is error and client.calls[-1][-1]["workers"] == [A, B]


# --- messages ---


def test_group_hears_its_own_topics_once_an_event_of_its_own_has_come_back(
    group: WorkerGroup, client: Client, news: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    unpacked: list[object] = []
    monkeypatch.setattr(log, "unpack", unpacked.append)
    monkeypatch.setattr(module, "_PING_S", 0.0)
    sent: list[Any] = []

    def echo(topic: str, message: dict[str, str]) -> None:
        sent.append((topic, message))
        client.handlers[topic]((1.0, {"ping": "of another"} if len(sent) < 3 else message))

    monkeypatch.setattr(client, "log_event", echo)
    group.subscribe()
    assert sent == [("ddptrain/r-1", {"ping": group._ping})] * 3 and len(group._ping) == 32
    assert list(client.handlers) == ["ddptrain/r-1", "ddptrain/r-1/log"]
    client.handlers["ddptrain/r-1/log"]((1.0, "packed"))
    assert unpacked == ["packed"]
    assert news == [("news.add", "r-1", group._on_all)] and group.inbox.empty()


@pytest.mark.parametrize(("seconds", "tries"), [(5.0, 3), (5.1, 2)])
def test_scheduler_that_echoes_nothing_within_ten_seconds_is_overloaded(
    group: WorkerGroup, client: Client, clock: Clock, monkeypatch: pytest.MonkeyPatch, seconds: float, tries: int
) -> None:
    monkeypatch.setattr(module, "_PING_S", 0.0)

    def log_event(*call: object) -> None:
        client.calls.append(call)
        clock.sleep(seconds)

    monkeypatch.setattr(client, "log_event", log_event)
    with pytest.raises(ClusterError, match="did not echo an event within 10 s"):
        group.subscribe()
    assert len(client.calls) == tries


def test_ten_rejected_messages_are_logged_and_all_are_counted(
    group: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    monkeypatch.setattr(module, "_log", SimpleNamespace(info=lambda text, reason: logged.append(reason)))
    for number in range(12):
        group.reject(f"reason {number}")
    assert (group.rejected, group.first_rejected) == (12, "reason 0")
    assert logged == [f"reason {number}" for number in range(10)]


# --- orders ---


def test_orders_go_to_all_workers_that_are_there_and_are_not_waited_for(
    group: WorkerGroup, client: Client, waits: Waits
) -> None:
    specs = [make_spec(rank=0), make_spec(rank=1)]
    client.answer(driver_calls.stop_ranks, "stop")
    client.answer(driver_calls.send_command, "command")
    group.stop(specs, 2.5)
    group.tell(specs[:1], Command.STACKS)
    options = {"workers": [A, B], "asynchronous": True}
    keys = [spec.key for spec in specs]
    assert client.calls == [
        (driver_calls.stop_ranks, "r-1", keys, 2.5, options),
        (driver_calls.send_command, "r-1", keys[:1], "stacks", options),
    ]
    assert waits.sent == ["stop", "command"]


def test_order_for_nobody_is_not_sent_and_a_closing_client_is_no_error(
    group: WorkerGroup, client: Client, waits: Waits
) -> None:
    group.stop([], 1.0)
    client.answer(driver_calls.stop_ranks, RuntimeError("closing"))
    group.stop([make_spec()], 1.0)
    group._workers = set()
    group.stop([make_spec()], 1.0)
    assert len(client.calls) == 1 and waits.sent == []


def test_slots_that_are_no_resource_of_dask_take_none(group: WorkerGroup, client: Client) -> None:
    group.submit([make_spec(rank=0), make_spec(rank=1)], [Slot(A, "a", 0, False, False), Slot(B, "b", 0, False, True)])
    assert client.calls == [("get", [None, {"slot": 1}], False)]


# --- secrets ---


def test_specs_with_secrets_are_encrypted_for_their_workers_and_the_others_stay(
    group: WorkerGroup, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = [make_spec(rank=rank) for rank in range(4)]
    places = [place(0, A), place(1, B), place(2, A), place(3, "tcp://c:1")]
    monkeypatch.setattr(module, "has_secrets", lambda spec: spec.rank in (1, 2))
    monkeypatch.setattr(
        module,
        "encrypt_specs",
        lambda specs, keys: [f"{spec.rank} for {key}" for spec, key in zip(specs, keys, strict=True)],
    )
    client.answer(driver_calls.encryption_key, {A: "key-a", B: "key-b"})
    sealed: list[object] = list(group.sealed(specs, places))
    assert sealed == [specs[0], "1 for key-b", "2 for key-a", specs[3]]
    assert client.calls == [(driver_calls.encryption_key, "r-1", {"workers": [A, B]})]
    monkeypatch.setattr(module, "has_secrets", lambda spec: False)
    assert group.sealed(specs, places) == specs and len(client.calls) == 1


def test_secrets_are_not_sent_to_workers_without_keys(
    group: WorkerGroup, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "has_secrets", lambda spec: True)
    client.answer(driver_calls.encryption_key, OSError("cut"))
    with pytest.raises(ClusterError, match="the workers have no keys to encrypt the ranks' environment: cut"):
        group.sealed([make_spec()], [place(0, A)])


# --- files ---

QUESTION = (driver_calls.read_spool, "r-1", "/s/log", 5, 9, {"workers": [A], "asynchronous": True})


def test_bytes_of_a_file_are_read_from_its_worker(group: WorkerGroup, client: Client, waits: Waits) -> None:
    client.answer(driver_calls.read_spool, "question")
    waits.outcomes = [{A: bytearray(b"ab")}]
    assert group.fetch(A, Path("/s/log"), 5, 9) == b"ab"
    assert client.calls == [QUESTION] and waits.seen == [("question", 120.0, 0)]


def test_worker_with_ranks_may_be_silent_for_as_long_as_they_and_each_notice_counts(
    group: WorkerGroup, client: Client, waits: Waits
) -> None:
    group.submit([make_spec(rank=1)], [Slot(A, "a", 0, False, True)])
    group._on_notice((1.0, worker_notices.encode(worker_notices.Growth(1, 1, 10, 20))))
    group._on_notice((1.0, worker_notices.encode(worker_notices.Growth(1, 3, 10, 20))))  # a rank of nobody
    waits.outcomes = [{A: b""}, {B: b""}]
    group.fetch(A, Path("/s/log"), 0, 9)
    group.fetch(B, Path("/s/log"), 0, 9)
    assert [seen[1:] for seen in waits.seen] == [(30.0, 1), (120.0, 0)]
    group.futures[1] = cast("Any", SimpleNamespace(done=lambda: True))
    assert group._patience_s(A) == 120.0
    group.lost_after_s = 200.0
    assert group._patience_s(A) == 200.0
    group.forget(A)
    assert group._patience_s(A) == 0.0


@pytest.mark.parametrize("error", [CommClosedError("closed"), OSError("Timed out")])
def test_network_that_is_cut_for_a_short_time_only_delays_an_answer(
    group: WorkerGroup, client: Client, waits: Waits, clock: Clock, error: OSError
) -> None:
    waits.outcomes = [error, error, {A: b"x"}]
    assert group.fetch(A, Path("/s/log"), 5, 9) == b"x"
    assert client.calls == [QUESTION] * 3 and clock.now == 101.0


@pytest.mark.parametrize(
    ("error", "has", "connected", "tries"),
    [
        (FileNotFoundError(errno.ENOENT, "no file"), True, True, 1),  # the worker's answer
        (ConnectionError("no"), True, True, 1),
        (OSError(errno.EIO, "bad disk"), True, True, 1),
        (CommClosedError("closed"), False, True, 1),
        (CommClosedError("closed"), True, False, 1),
        (CommClosedError("closed"), True, True, 62),  # for 30 s, every half second
    ],
)
def test_other_errors_and_a_long_cut_end_the_wait(
    group: WorkerGroup,
    client: Client,
    waits: Waits,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    error: OSError,
    has: bool,
    connected: bool,
    tries: int,
) -> None:
    def fail(*_: object) -> None:
        group._workers = {A} if has else set()
        raise error

    monkeypatch.setattr(waits, "wait_for_answer", fail)
    monkeypatch.setattr(client, "status", "running" if connected else "closed")
    with pytest.raises(ClusterError, match="could not read /s/log from the worker tcp://a:1: ") as raised:
        group.fetch(A, Path("/s/log"), 5, 9)
    assert raised.value.__cause__ is error and len(client.calls) == tries
    assert group.inbox.empty()


def test_worker_that_is_silent_for_too_long_is_lost(group: WorkerGroup, waits: Waits, clock: Clock) -> None:
    waits.outcomes = [TimeoutError("no answer")]
    with pytest.raises(ClusterError, match="from the worker tcp://a:1: no answer"):
        group.fetch(A, Path("/s/log"), 5, 9)
    assert group.inbox.get_nowait() == WorkerLost(A) and not group.has(A)
    assert clock.now == 100.0
    with pytest.raises(ClusterError, match="could not read /s/log from the worker tcp://a:1: it is lost"):
        group.fetch(A, Path("/s/log"), 5, 9)
    assert group.inbox.empty()


def test_loss_of_a_worker_is_waited_for_half_a_second_before_an_error_is_told(
    group: WorkerGroup, waits: Waits, clock: Clock
) -> None:
    waits.outcomes = [ValueError("no")]
    with pytest.raises(ClusterError):
        group.fetch(A, Path("/s/log"), 5, 9)
    assert clock.now == pytest.approx(100.5, abs=0.02) and group.inbox.empty()


# --- the end ---


def test_end_of_an_attempt_releases_each_task_once(group: WorkerGroup, client: Client) -> None:
    one, two = SimpleNamespace(key="1"), SimpleNamespace(key="2")
    group.futures = cast("Any", {0: one, 1: one, 2: two})
    group.end_attempt()
    assert client.calls == [("cancel", [one, two], True)] and group.futures == {}


def test_close_releases_tasks_and_slots_whatever_fails_on_the_way(
    group: WorkerGroup,
    client: Client,
    news: list[tuple[Any, ...]],
    waits: Waits,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client.answer(slots.release, "question", "question")
    waits.outcomes = [None, TimeoutError("no answer")]
    with group:
        pass
    assert news == [("news.remove", "r-1")]
    release = (slots.release, "r-1", {"client": "client-1", "asynchronous": True})
    assert client.calls == [("cancel", [], True), release] and waits.seen == [("question", 3.0, 0)]

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("closing")

    monkeypatch.setattr(group, "_news", SimpleNamespace(remove=fail))
    monkeypatch.setattr(client, "cancel", fail)
    group.close()
    assert client.calls[2:] == [release]
    monkeypatch.setattr(client, "status", "closed")
    group.close()
    assert len(client.calls) == 3
