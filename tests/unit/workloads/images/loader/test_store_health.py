"""A store that is away: waited for, and told once that takes too long, while its images are not taken for bad ones."""

import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from ddptrain.storage.store import Location, NotFound, StoreUnreachable, Transient
from ddptrain.workloads.images.loader.image_reader import ImageRef, Reader, ReadFailure, RetryPolicy
from ddptrain.workloads.images.loader.store_health import StoreHealth
from tests.support import fake_time

S3 = Location("s3://bucket/dogs")
REFUSED = "s3://bucket/dogs/a: no connection (Connection refused)"


class Clock:
    """Goes on where somebody sleeps; `at` is done once the clock has gone past a time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.at: dict[float, Callable[[], object]] = {}

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        for due_s in [due_s for due_s in self.at if due_s <= self.now_s]:
            self.at.pop(due_s)()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    fake_time.replace(monkeypatch, "sleep", made.sleep)
    fake_time.replace(monkeypatch, "monotonic", lambda: made.now_s)
    return made


class Store:
    """Has the images a, b and c; is away from a time to another, and takes `hang_s` to say so.

    `failing` are times until which single images can't be had.
    """

    def __init__(self, clock: Clock, away: tuple[float, float], hang_s: float = 0.0, **failing: float) -> None:
        self.clock, self.away, self.hang_s, self.failing = clock, away, hang_s, failing
        self.asked: Counter[str] = Counter()

    def get(self, key: str) -> bytes:
        self.asked[key] += 1
        if self.away[0] <= self.clock.now_s < self.away[1]:
            self.clock.now_s += self.hang_s
            raise Transient(REFUSED)
        if self.clock.now_s < self.failing.get(key, 0):
            raise Transient("503 Slow Down")
        if key not in "abc":
            raise NotFound(key)
        return b"image"

    def reader(self) -> Reader:
        return Reader(S3, tries=RetryPolicy(), opener=lambda _: self)


ALWAYS = (0.0, 1e9)
NEVER = (0.0, 0.0)


def test_store_that_is_away_for_long_is_told_with_its_name_its_words_and_the_time(clock: Clock) -> None:
    fault = Store(clock, ALWAYS).reader().read(ImageRef("a"))
    assert isinstance(fault, ReadFailure)
    assert fault.reason == f"tried for 60 s; the last error: {REFUSED}"
    since = r"since \d\d:\d\d:\d\d \(60 s\)"
    assert re.fullmatch(
        rf"s3://bucket/dogs does not answer: no request has succeeded {since}; the last error: {re.escape(REFUSED)}",
        fault.away,
    )


def test_store_that_can_not_even_be_opened_for_a_while_is_waited_for(clock: Clock) -> None:
    store = Store(clock, NEVER)

    def opened(_: Location) -> Store:
        if clock.now_s < 50:
            raise StoreUnreachable("AWS did not answer within 5 s")
        return store

    assert Reader(S3, tries=RetryPolicy(), opener=opened).read(ImageRef("a")) == b"image"


def test_store_that_was_idle_before_it_went_away_is_given_as_long(clock: Clock) -> None:
    store = Store(clock, (900, 950))
    reader = store.reader()
    assert reader.read(ImageRef("b")) == b"image"
    clock.now_s = 901
    assert reader.read(ImageRef("a")) == b"image"
    assert 950 <= clock.now_s <= 956


def test_image_that_failed_before_the_store_went_away_waits_for_its_return(clock: Clock) -> None:
    store = Store(clock, (30, 85), a=30)
    reader = store.reader()
    clock.at[25] = lambda: reader.read(ImageRef("b"))
    assert reader.read(ImageRef("a")) == b"image", "its own 60 s are over in the midst of the 55 s"
    assert 85 <= clock.now_s <= 91


def test_store_that_came_back_during_the_last_try_is_asked_once_more(clock: Clock) -> None:
    assert Store(clock, (0, 50), hang_s=20).reader().read(ImageRef("a")) == b"image"
    assert clock.now_s > 60


def test_image_that_fails_alone_is_a_bad_one_though_nothing_else_was_wanted_meanwhile(clock: Clock) -> None:
    store = Store(clock, NEVER, a=1e9)
    reader = store.reader()
    assert reader.read(ImageRef("b")) == b"image"
    clock.now_s = 1000
    fault = reader.read(ImageRef("a"))
    assert fault == ReadFailure("a", "tried for 60 s; the last error: 503 Slow Down") and fault.away == ""
    assert store.asked["b"] == 2, "asked for what the store has given before"


def test_first_image_of_a_process_may_be_a_bad_one(clock: Clock) -> None:
    fault = Store(clock, NEVER, a=1e9).reader().read(ImageRef("a"))
    assert isinstance(fault, ReadFailure) and fault.away == ""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "mounted" / "dogs"
    made.mkdir(parents=True)
    for key in "abc":
        (made / key).write_bytes(b"image")
    return made


def unmount(folder: Path, point: Path) -> None:
    """As if the file system at `point` were not there, which leaves an empty folder."""
    point.rename(folder.parents[1] / "elsewhere")
    point.mkdir()


@pytest.mark.parametrize("how", ["moved", "unmounted at it", "unmounted above it"])
def test_folder_that_goes_away_is_a_store_that_is_away(clock: Clock, folder: Path, how: str) -> None:
    reader = Reader(Location(str(folder)), tries=RetryPolicy())
    assert reader.read(ImageRef("a")) == b"image"
    if how == "moved":
        folder.rename(folder.with_name("elsewhere"))
    else:
        unmount(folder, folder if how == "unmounted at it" else folder.parent)
    fault = reader.read(ImageRef("b"))
    assert isinstance(fault, ReadFailure) and clock.now_s == pytest.approx(60)
    what = "is empty" if how == "unmounted at it" else "does not exist"
    said = f"the folder {folder} {what} on {socket.gethostname()}"
    assert re.fullmatch(rf"{folder} does not answer: no request .*\(60 s\); the last error: {said}: .*", fault.away), (
        fault.away
    )


def test_folder_that_comes_back_is_waited_for(clock: Clock, folder: Path) -> None:
    reader = Reader(Location(str(folder)), tries=RetryPolicy())
    assert reader.read(ImageRef("a")) == b"image"
    elsewhere = folder.rename(folder.with_name("elsewhere"))
    clock.at[40] = lambda: elsewhere.rename(folder)
    assert reader.read(ImageRef("b")) == b"image"


def test_folder_that_a_host_has_never_seen_is_told_at_once(clock: Clock, tmp_path: Path) -> None:
    fault = Reader(Location(str(tmp_path / "none")), tries=RetryPolicy()).read(ImageRef("a"))
    said = (
        f"the folder {tmp_path / 'none'} does not exist on {socket.gethostname()}: every rank must be able to read it"
    )
    assert fault == ReadFailure("a", said, said) and clock.now_s == 0


def test_image_that_is_gone_from_a_folder_that_is_there_is_a_bad_one(clock: Clock, folder: Path) -> None:
    (folder / "a").unlink()
    assert Reader(Location(str(folder)), tries=RetryPolicy()).read(ImageRef("a")) == ReadFailure(
        "a", "it is no longer there"
    )


def test_many_that_find_the_store_away_ask_for_it_together() -> None:
    asked = Counter[str]()

    class Refusing:
        def get(self, key: str) -> bytes:
            asked[key] += 1
            time.sleep(0.02)
            tried = 0
            while key != "a" and tried != asked["a"]:  # however far apart the threads are, they come to wait for this
                tried = asked["a"]
                time.sleep(0.3)
            raise Transient(REFUSED)

    reader = Reader(S3, tries=RetryPolicy(0.2, 0.01, 0.02), opener=lambda _: Refusing())
    faults: list[bytes | ReadFailure] = []
    threads = [threading.Thread(target=lambda: faults.append(reader.read(ImageRef("a")))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(isinstance(fault, ReadFailure) and fault.away for fault in faults) and len(faults) == 16
    assert sum(asked.values()) - asked["a"] <= 8


class TestProbe:
    """StoreHealth by itself."""

    def test_any_error_but_a_transient_one_is_an_answer(self, clock: Clock) -> None:
        def fail(error: Exception) -> Callable[[str], object]:
            def get(key: str) -> object:
                raise error

            return get

        health = StoreHealth()
        clock.now_s = 10.0
        assert health.probe(5.0, fail(NotFound("x")))
        assert not health.probe(6.0, fail(Transient("503")))
        assert not health.probe(9.0, lambda key: pytest.fail("a newer probe had no answer"))
        clock.now_s = 20.0
        assert health.probe(15.0, lambda key: None)
