"""Readers of images, and images that can't be read."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image

from ddptrain.storage.store import Location, NotFound, StoreForbidden, StoreUnreachable, Transient
from ddptrain.workloads.images import predict
from ddptrain.workloads.images.data.predict_inputs import InputProblem, PredictInput
from ddptrain.workloads.images.loader.cache import Cache
from ddptrain.workloads.images.loader.image_reader import ImageRef, Reader, ReadFailure, RetryPolicy
from ddptrain.workloads.images.predict import decoded
from tests.support import fake_time

# --- image reader ---


S3 = Location("s3://bucket/dogs")
QUICK = RetryPolicy(deadline_s=60, first_wait_s=0.001, longest_wait_s=0.01)


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

    def reader(self, cache: Cache | None = None, tries: RetryPolicy = QUICK) -> Reader:
        return Reader(S3, cache, tries, opener=lambda _: self)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What a reader would sleep for, in seconds; the clock goes on by it."""
    slept: list[float] = []
    fake_time.replace(monkeypatch, "sleep", slept.append)
    fake_time.replace(monkeypatch, "monotonic", lambda: sum(slept))
    return slept


def test_what_passes_is_tried_again_with_waits_that_grow_and_differ(pauses: list[float]) -> None:
    store = Scripted(a=[Transient("503"), Transient("reset"), Transient("timeout"), Transient("503"), b"image"])
    assert store.reader(tries=RetryPolicy()).read(ImageRef("a", 5)) == b"image"
    assert all(0.5 * full <= pause <= full for pause, full in zip(pauses, [0.1, 0.2, 0.4, 0.8], strict=True))
    assert pauses != [0.1, 0.2, 0.4, 0.8]


def test_transient_errors_until_the_deadline_are_an_error_with_the_last_reason(pauses: list[float]) -> None:
    reader = Scripted(a=[Transient("first"), Transient("503 Slow Down")]).reader(tries=RetryPolicy())
    with pytest.raises(StoreUnreachable, match=r"gives no a since \S+ \(60 s\); the last error: 503 Slow Down"):
        reader.read(ImageRef("a", 5))
    assert sum(pauses) == pytest.approx(60) and max(pauses) <= 5


def test_missing_and_forbidden_images_are_not_tried_again() -> None:
    store = Scripted(gone=[NotFound("gone")], closed=[StoreForbidden("the store refuses it")])
    assert store.reader().read(ImageRef("gone")) == ReadFailure("gone", "it is no longer there")
    assert store.reader().read(ImageRef("closed")) == ReadFailure("closed", "the store refuses it")
    assert store.asked == {"gone": 1, "closed": 1}


def test_body_cut_short_is_read_again() -> None:
    store = Scripted(a=[b"im", b"imag", b"image"])
    assert store.reader().read(ImageRef("a", 5)) == b"image"


def test_image_that_has_another_size_than_was_listed_is_a_fault() -> None:
    store = Scripted(a=[b"other image"])
    assert store.reader().read(ImageRef("a", 5)) == ReadFailure("a", "it has 11 bytes, and had 5 when it was listed")
    assert store.asked["a"] == 3
    assert store.reader().read(ImageRef("a")) == b"other image", "whose size the store has not told"


def test_cache_is_asked_first_and_filled(tmp_path: Path) -> None:
    store = Scripted(a=[b"image"], gone=[NotFound("gone")])
    for _ in range(2):
        reader = store.reader(Cache(tmp_path, 1 << 20))
        assert reader.read(ImageRef("a", 5, "v1")) == b"image"
        assert isinstance(reader.read(ImageRef("gone", 5, "v1")), ReadFailure)
    assert store.asked == {"a": 1, "gone": 2}
    assert store.reader(Cache(tmp_path, 1 << 20)).read(ImageRef("a", 5, "v2")) == b"image"
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
    found = dict(Reader(S3, opener=lambda _: store).read_all([ImageRef(str(n)) for n in range(100)], requests=8))
    assert found == {n: str(n).encode() for n in range(100)}
    assert 4 <= store.most <= 8


def test_images_that_nobody_takes_are_not_read_ahead_without_end() -> None:
    store = Slow()
    images = Reader(S3, opener=lambda _: store).read_all((ImageRef(str(n)) for n in range(10_000)), requests=4)
    for _ in range(3):
        next(images)
    time.sleep(0.1)
    assert store.all <= 16
    images.close()  # type: ignore[attr-defined]
    assert store.all <= 24


def test_reader_can_be_pickled_also_after_it_has_read(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"image")
    reader = Reader(Location(str(tmp_path)), Cache(tmp_path / "cache", 1 << 20))
    assert reader.read(ImageRef("a.jpg")) == b"image"
    assert dict(reader.read_all([ImageRef("a.jpg")], 2)) == {0: b"image"}
    assert pickle.loads(pickle.dumps(reader)).read(ImageRef("a.jpg")) == b"image"


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
        assert dict(reader.read_all([ImageRef(key)], 2)) == {0: b"image"}
    assert 'multiprocessing_context="forkserver"' in in_a_fork(lambda: dict(remote.read_all([ImageRef("a")], 2)))
    assert in_a_fork(lambda: dict(local.read_all([ImageRef("a.jpg")], 2))) == ""
    fresh = Scripted(a=[b"image"]).reader()
    assert in_a_fork(lambda: dict(fresh.read_all([ImageRef("a")], 2))) == ""


# --- The inputs of predict are read by many threads, and come in their order with their image or the reason ---


def picture(path: Path, red: int) -> PredictInput:
    data = io.BytesIO()
    Image.new("RGB", (12, 10), (red, 0, 0)).save(data, "PNG")
    path.write_bytes(data.getvalue())
    return PredictInput(str(path))


def test_images_and_reasons_come_in_the_order_of_the_inputs(tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"no image")
    os.mkfifo(tmp_path / "fifo.png")
    inputs: list[PredictInput | InputProblem] = [
        picture(tmp_path / "one.png", 10),
        InputProblem("missing", "no such file or folder"),
        PredictInput(str(tmp_path / "broken.png")),
        PredictInput(str(tmp_path / "fifo.png")),
        PredictInput(str(tmp_path / "gone.png")),
        picture(tmp_path / "two.png", 20),
    ]
    found = [*decoded(inputs, size=8, ahead=2)]
    assert [one for one, _ in found] == inputs
    results = [image if isinstance(image, str) else (image.shape, int(image[0, 0, 0])) for _, image in found]
    assert results == [
        ((3, 8, 8), 10),
        "no such file or folder",
        "not an image of a known format (JPEG, PNG, BMP, GIF, WEBP, TIFF)",
        "is not a regular file",
        "No such file or directory",
        ((3, 8, 8), 20),
    ]


def test_pillow_does_not_warn_about_an_image_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # above it pillow warns, above twice as many it refuses
    ((_, image),) = decoded([picture(tmp_path / "one.png", 10)], 8, 1)
    assert not isinstance(image, str)


def test_file_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = picture(tmp_path / "one.png", 10)
    size = os.path.getsize(one.name)
    monkeypatch.setattr(predict, "_MOST_BYTES", size)
    ((_, image),) = decoded([one], 8, 1)
    assert not isinstance(image, str)
    monkeypatch.setattr(predict, "_MOST_BYTES", size - 1)
    assert [*decoded([one], 8, 1)] == [(one, f"has {size:,} bytes, which is too large for an image")]


def test_no_more_inputs_are_taken_than_are_read_ahead(tmp_path: Path) -> None:
    one, taken = picture(tmp_path / "one.png", 10), 0

    def inputs() -> Iterator[PredictInput]:
        nonlocal taken
        for _ in range(20):
            taken += 1
            yield one

    images = decoded(inputs(), 8, ahead=5)
    next(images)
    assert taken == 6
    assert len([*images]) == 19
