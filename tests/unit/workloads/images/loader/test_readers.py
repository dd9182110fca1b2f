"""Readers of images, and images that can't be read."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from ddptrain.storage.store import Listed, Location, NotFound, StoreForbidden, StoreUnreachable, Transient
from ddptrain.workloads.images.reader import Cache, Reader, ReadFailure
from tests.support import fake_time

# --- image reader ---


S3 = Location("s3://bucket/dogs")


class Scripted:
    """A store that gives of each key what its script says, the last thing for ever; there are no others."""

    def __init__(self, **scripts: list[bytes | Exception]) -> None:
        self.scripts = scripts
        self.asked: Counter[str] = Counter()

    def get(self, key: str) -> bytes:
        script = self.scripts.get(key, [NotFound(key)])
        answer = script[min(self.asked[key], len(script) - 1)]
        self.asked[key] += 1
        if isinstance(answer, Exception):
            raise answer
        return answer

    def reader(self, cache: Cache | None = None, deadline_s: float = 60) -> Reader:
        return Reader(S3, cache, deadline_s, opener=lambda *_: self)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What a reader would sleep for, in seconds; the clock goes on by it."""
    slept: list[float] = []
    fake_time.replace(monkeypatch, "sleep", slept.append)
    fake_time.replace(monkeypatch, "monotonic", lambda: sum(slept))
    return slept


def test_what_passes_is_tried_again_with_waits_that_grow_and_differ(pauses: list[float]) -> None:
    store = Scripted(a=[Transient("503"), Transient("reset"), Transient("timeout"), Transient("503"), b"image"])
    assert store.reader().read(Listed("a", 5, "")) == b"image"
    assert all(0.5 * full <= pause <= full for pause, full in zip(pauses, [0.1, 0.2, 0.4, 0.8], strict=True))
    assert pauses != [0.1, 0.2, 0.4, 0.8]


def test_transient_errors_until_the_deadline_are_an_error_with_the_last_reason(pauses: list[float]) -> None:
    reader = Scripted(a=[Transient("first"), Transient("503 Slow Down")]).reader()
    with pytest.raises(StoreUnreachable, match=r"gives no a since \S+ \(60 s\); the last error: 503 Slow Down"):
        reader.read(Listed("a", 5, ""))
    assert sum(pauses) == pytest.approx(60) and max(pauses) <= 5


def test_missing_and_forbidden_images_are_not_tried_again() -> None:
    store = Scripted(gone=[NotFound("gone")], closed=[StoreForbidden("the store refuses it")])
    assert store.reader().read(Listed("gone", -1, "")) == ReadFailure("gone", "it is no longer there")
    assert store.reader().read(Listed("closed", -1, "")) == ReadFailure("closed", "the store refuses it")
    assert store.asked == {"gone": 1, "closed": 1}


def test_body_cut_short_is_read_again() -> None:
    store = Scripted(a=[b"im", b"imag", b"image"])
    assert store.reader().read(Listed("a", 5, "")) == b"image"


def test_image_that_has_another_size_than_was_listed_is_a_fault() -> None:
    store = Scripted(a=[b"other image"])
    assert store.reader().read(Listed("a", 5, "")) == ReadFailure("a", "it has 11 bytes, and had 5 when it was listed")
    assert store.asked["a"] == 3
    assert store.reader().read(Listed("a", -1, "")) == b"other image", "whose size the store has not told"


def test_cache_is_asked_first_and_filled(tmp_path: Path) -> None:
    store = Scripted(a=[b"image"], gone=[NotFound("gone")])
    for _ in range(2):
        reader = store.reader(Cache(tmp_path, 1 << 20))
        assert reader.read(Listed("a", 5, "v1")) == b"image"
        assert isinstance(reader.read(Listed("gone", 5, "v1")), ReadFailure)
    assert store.asked == {"a": 1, "gone": 2}
    assert store.reader(Cache(tmp_path, 1 << 20)).read(Listed("a", 5, "v2")) == b"image"
    assert store.asked["a"] == 2, "another version"


class Slow:
    """A store whose answers take a while; it knows how many it gave at a time."""

    def __init__(self) -> None:
        self.lock, self.at_a_time, self.most, self.all = threading.Lock(), 0, 0, 0

    def get(self, key: str) -> bytes:
        with self.lock:
            self.at_a_time += 1
            self.all += 1
            self.most = max(self.most, self.at_a_time)
        time.sleep(0.01)
        with self.lock:
            self.at_a_time -= 1
        return key.encode()


def test_many_requests_are_under_way_and_no_more_than_asked_for() -> None:
    store = Slow()
    found = dict(Reader(S3, opener=lambda *_: store).read_all([Listed(str(n), -1, "") for n in range(100)], requests=8))
    assert found == {n: str(n).encode() for n in range(100)}
    assert 4 <= store.most <= 8


def test_images_that_nobody_takes_are_not_read_ahead_without_end() -> None:
    store = Slow()
    images = Reader(S3, opener=lambda *_: store).read_all((Listed(str(n), -1, "") for n in range(10_000)), requests=4)
    for _ in range(3):
        next(images)
    time.sleep(0.1)
    assert store.all <= 16
    images.close()  # type: ignore[attr-defined]
    assert store.all <= 24


def test_reader_can_be_pickled_also_after_it_has_read(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"image")
    reader = Reader(Location(str(tmp_path)), Cache(tmp_path / "cache", 1 << 20))
    assert reader.read(Listed("a.jpg", -1, "")) == b"image"
    assert dict(reader.read_all([Listed("a.jpg", -1, "")], 2)) == {0: b"image"}
    assert pickle.loads(pickle.dumps(reader)).read(Listed("a.jpg", -1, "")) == b"image"


def in_a_fork(check: Callable[[], object]) -> str:
    """What `check` raises in a forked child, "" for nothing."""
    context = multiprocessing.get_context("fork")
    mine, its = context.Pipe()

    def run() -> None:
        try:
            check()
            its.send("")
        except Exception as error:
            its.send(f"{type(error).__name__}: {error}")

    child = context.Process(target=run)
    child.start()
    try:
        return str(mine.recv()) if mine.poll(60) else "it hangs"
    finally:
        child.kill()
        child.join()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_fork_after_a_read_is_told_for_stores_that_do_not_survive_it(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"image")
    remote, local = Scripted(a=[b"image"]).reader(), Reader(Location(str(tmp_path)))
    for reader, key in ((remote, "a"), (local, "a.jpg")):
        assert dict(reader.read_all([Listed(key, -1, "")], 2)) == {0: b"image"}
    assert 'multiprocessing_context="forkserver"' in in_a_fork(lambda: dict(remote.read_all([Listed("a", -1, "")], 2)))
    assert in_a_fork(lambda: dict(local.read_all([Listed("a.jpg", -1, "")], 2))) == ""
    fresh = Scripted(a=[b"image"]).reader()
    assert in_a_fork(lambda: dict(fresh.read_all([Listed("a", -1, "")], 2))) == ""
