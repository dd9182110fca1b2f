"""Reads images from a store, with retries, many requests at a time, and a cache on the local disk.

`source: builtin` is a store as well: its images are drawn when they are read, so that a first run needs no data.
"""

from __future__ import annotations

import io
import math
import os
import random
import secrets
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddptrain.errors import DdptrainError
from ddptrain.file_ops import publish, sha256, try_lock
from ddptrain.storage.sources import open_source
from ddptrain.storage.store import (
    BUILTIN,
    UNKNOWN_SIZE,
    Limits,
    Listed,
    Location,
    NotFound,
    Source,
    StoreMissing,
    StoreUnreachable,
    Transient,
)

REQUESTS = 32
SURVIVE_A_FORK = {"file", BUILTIN}  # protocols without connections
# Errors after which a retry may help: a missing folder may be mounted again.
TRANSIENT = (Transient, StoreUnreachable, StoreMissing)
_PER_PROCESS = {"_store", "_pool", "_pid", "_lock", "_has_read"}  # attributes that are not pickled
_TIMEOUT_S = 20.0  # of a request
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 5.0  # between two attempts: it doubles, and is varied by a factor of 0.5 to 1
_SAME_WRONG_SIZE = 3  # equal wrong sizes that show that the image was replaced since the listing
_CRC_BYTES = 4
_UNFINISHED = ".new-"
_UNFINISHED_S = 3600.0  # older unfinished files belong to processes that were killed
_KEPT = 0.8  # share of the cache that a sweep leaves
_SWEEPS = 80  # a process sweeps after it has written 1/80 of the cache

SHAPES = ("circle", "cross", "ring", "square", "star", "triangle")  # the classes of `source: builtin`
EACH = 100
SIZE = 48  # pixels
_DARK, _LIGHT = 90, 150  # the lightest background, and the darkest shape


@dataclass(frozen=True, slots=True)
class ReadFailure:
    """Why an image can't be read, also later."""

    key: str
    reason: str


class Reader:
    """Reads images of one location; thread-safe and picklable. Transient errors are retried for `deadline_s`.

    The store is opened by the first read in a process, so that it is never opened before a fork.
    """

    _store: Source | None
    _pool: ThreadPoolExecutor | None
    _pid: int  # of the process that opened the store; 0 for none
    _lock: threading.Lock
    _has_read: bool  # whether the store has returned an image in this process

    def __init__(
        self,
        location: Location,
        cache: Cache | None = None,
        deadline_s: float = 60.0,
        opener: Callable[[Location, Limits], Any] | None = None,
    ) -> None:
        self._location, self._cache, self._deadline_s = location, cache, deadline_s
        self._opener = opener or open_images
        self._reset()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _PER_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._reset()

    def read(self, image: Listed) -> bytes | ReadFailure:
        """Return the whole content of an image. Raises StoreUnreachable if errors are transient until the deadline."""
        if self._cache is not None:
            known = self._cache.get(self._location.url, image.key, image.version)
            if known is not None and (image.size_bytes < 0 or image.size_bytes == len(known)):
                return known
        data = self._fetch(image)
        if self._cache is not None and isinstance(data, bytes):
            self._cache.put(self._location.url, image.key, image.version, data)
        return data

    def read_all(self, images: Iterable[Listed], requests: int = REQUESTS) -> Iterator[tuple[int, bytes | ReadFailure]]:
        """(position, content) of each image, as they arrive; at most 2 x `requests` results wait to be taken."""
        self._open()  # discards the pool of a parent process: its threads do not exist here
        pending: dict[Future[bytes | ReadFailure], int] = {}
        pool = self._pool = self._pool or ThreadPoolExecutor(requests, thread_name_prefix="ddptrain-read")
        try:
            for place, image in enumerate(images):
                if len(pending) >= 2 * requests:
                    yield from _finished(pending)
                pending[pool.submit(self.read, image)] = place
            while pending:
                yield from _finished(pending)
        finally:
            for future in pending:
                future.cancel()

    def _fetch(self, image: Listed) -> bytes | ReadFailure:
        began, pause_s, wrong_sizes = time.monotonic(), _FIRST_WAIT_S, Counter[int]()
        while True:
            try:
                data = self._open().get(image.key)
                self._has_read = True
                if image.size_bytes < 0 or len(data) == image.size_bytes:
                    return data
                wrong_sizes[len(data)] += 1
                problem = f"it has {len(data):,} bytes, and had {image.size_bytes:,} when it was listed"
                if wrong_sizes[len(data)] == _SAME_WRONG_SIZE:
                    return ReadFailure(image.key, problem)
            except NotFound:
                return ReadFailure(image.key, "it is no longer there")
            except StoreMissing as error:
                if not self._has_read:  # a folder that this host never had will not appear
                    raise StoreUnreachable(str(error)) from None
                problem = str(error)
            except TRANSIENT as error:
                problem = str(error)
            except DdptrainError as error:  # such as forbidden: a retry can't help
                return ReadFailure(image.key, str(error))
            left_s = began + self._deadline_s - time.monotonic()
            if left_s <= 0:
                # The time of day makes two failures different: equal failures in a row are not restarted.
                clock = time.strftime("%H:%M:%S", time.localtime(time.time() - self._deadline_s))
                raise StoreUnreachable(
                    f"{self._location.description} gives no {image.key} since {clock} ({self._deadline_s:g} s); the "
                    f"last error: {problem}; when it is back, failure.max_restarts or --resume continues from the "
                    "newest checkpoint"
                )
            time.sleep(min(left_s, pause_s * random.uniform(0.5, 1)))
            pause_s = min(2 * pause_s, _LONGEST_WAIT_S)

    def _open(self) -> Source:
        """Return the store of this process. Raises RuntimeError after a fork of a process that had connections."""
        if self._pid not in {0, os.getpid()}:
            if self._location.protocol not in SURVIVE_A_FORK:
                raise RuntimeError(
                    "this process was forked from one that has read images, whose connections don't work here: give "
                    'the DataLoader multiprocessing_context="forkserver"'
                )
            self._reset()
        with self._lock:
            if self._store is None:
                self._store = self._opener(self._location, Limits(_TIMEOUT_S))
                self._pid = os.getpid()
            return self._store

    def _reset(self) -> None:
        """Reset the attributes that belong to one process."""
        self._store, self._pool, self._pid = None, None, 0
        self._lock, self._has_read = threading.Lock(), False


def _finished(pending: dict[Future[bytes | ReadFailure], int]) -> Iterator[tuple[int, bytes | ReadFailure]]:
    """Wait for at least one result, and yield all that are done."""
    done, _ = wait(pending, return_when=FIRST_COMPLETED)
    for future in done:
        yield pending.pop(future), future.result()


class Cache:
    """A folder of images with a maximal size, shared by ranks and runs; the least recently used ones are deleted first.

    Any number of processes can use it. Entries appear by renaming. A process sweeps before its first write, and each
    time it has written 1/80 of `max_bytes`; while another process is sweeping, it writes 2/80 at most. So the folder
    stays below `max_bytes` with nine writers. File system errors are never raised: unreadable entries are missing,
    failed writes are skipped, and `tell` gets the reason of the first one.
    """

    def __init__(self, folder: Path, max_bytes: int, tell: Callable[[str], None] = lambda text: None) -> None:
        self._folder, self._max_bytes, self._tell = folder, max_bytes, tell
        self._written, self._has_swept = 0, False  # bytes since the last sweep of this process

    def __reduce__(self) -> tuple[type[Cache], tuple[Path, int]]:
        return Cache, (self._folder, self._max_bytes)

    def get(self, url: str, key: str, version: str) -> bytes | None:
        """Return the content of an image, if it is cached; a damaged entry is deleted."""
        path = self._path(url, key, version)
        try:
            with path.open("rb", buffering=0) as file:
                content = file.read()
                with suppress(OSError):  # of another user, or on a read-only disk
                    os.utime(file.fileno())
        except OSError:
            return None
        data = content[_CRC_BYTES:]
        if content[:_CRC_BYTES] == _checksum(data):
            return data
        with suppress(OSError):
            path.unlink()
        return None

    def put(self, url: str, key: str, version: str, data: bytes) -> None:
        """Cache an image, unless it is larger than 1/80 of the cache or the disk is full."""
        n_bytes = len(data) + _CRC_BYTES
        if n_bytes * _SWEEPS > self._max_bytes:
            return
        path = self._path(url, key, version)
        new = path.with_name(_UNFINISHED + secrets.token_hex(8))
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._written += n_bytes
            shares = self._written * _SWEEPS / self._max_bytes
            if (shares > 1 or not self._has_swept) and not self._sweep() and shares > 2:
                return
            new.write_bytes(_checksum(data) + data)
            publish(new, path)
        except OSError as error:
            tell, self._tell = self._tell, lambda text: None
            tell(f"images can't be cached in {self._folder}, see params.cache.dir: {error}")
            with suppress(OSError):
                new.unlink(missing_ok=True)

    def _path(self, url: str, key: str, version: str) -> Path:
        name = sha256(f"{url}\0{key}\0{version}".encode()).hexdigest()
        return self._folder / name[:2] / name

    def _sweep(self) -> bool:
        """Delete the oldest entries, so that there is room; return False while another process does that."""
        file = os.open(self._folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if not try_lock(file):
                return False
            self._written, self._has_swept = 0, True
            entries = sorted(self._entries())
            total = sum(size for _, size, _ in entries)
            for _, size, path in entries:
                if total <= self._max_bytes * _KEPT:
                    break
                with suppress(OSError):
                    os.unlink(path)
                    total -= size
            return True
        finally:
            os.close(file)

    def _entries(self) -> Iterator[tuple[int, int, str]]:
        """(last use, size, path) of each entry; old unfinished files are deleted."""
        for folder in self._folder.iterdir():
            for entry in os.scandir(folder) if len(folder.name) == 2 else ():
                with suppress(OSError):
                    status = entry.stat()
                    if not entry.name.startswith(_UNFINISHED):
                        yield status.st_mtime_ns, status.st_size, entry.path
                    elif status.st_mtime < time.time() - _UNFINISHED_S:
                        os.unlink(entry.path)


def _checksum(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(_CRC_BYTES, "little")


def open_images(location: Location, limits: Limits) -> Source:
    """Open a source of images in this process; see open_source()."""
    return SyntheticImages(location) if location.protocol == BUILTIN else open_source(location, limits)


class SyntheticImages(Source):
    """`source: builtin`: drawings of shapes; a key is, for example, circle/000.png."""

    def __init__(self, location: Location) -> None:
        self.location = location
        self._keys = {f"{shape}/{number:03d}.png" for shape in SHAPES for number in range(EACH)}

    def listing(self, folder: str = "") -> Iterator[Listed]:
        """Yield every image."""
        return (Listed(key, UNKNOWN_SIZE, "") for key in sorted(self._keys))

    def get(self, key: str, *, start: int = 0, limit_bytes: int | None = None) -> bytes:
        """Return an image as a PNG; a key always stands for the same image. Raises NotFound."""
        if key not in self._keys:
            raise NotFound(key)
        return _drawn(key)

    def chunks(self, key: str) -> Iterator[bytes]:
        """See Source."""
        yield self.get(key)


def _drawn(key: str) -> bytes:
    from PIL import Image, ImageDraw

    chance = random.Random(key)  # the same images on every machine
    image = Image.new("RGB", (SIZE, SIZE), _colour(chance, 0, _DARK))
    radius = chance.uniform(0.25, 0.45) * SIZE
    x, y = chance.uniform(radius, SIZE - radius), chance.uniform(radius, SIZE - radius)
    turn, colour = chance.uniform(0, 2 * math.pi), _colour(chance, _LIGHT, 255)
    pen, frame, width = ImageDraw.Draw(image), (x - radius, y - radius, x + radius, y + radius), round(radius / 3)

    def around(angle: float, distance: float) -> tuple[float, float]:
        return x + distance * math.cos(angle), y + distance * math.sin(angle)

    match shape := key.partition("/")[0]:
        case "circle":
            pen.ellipse(frame, fill=colour)
        case "ring":
            pen.ellipse(frame, outline=colour, width=max(3, width))
        case "cross":
            for angle in (turn, turn + math.pi / 2):
                pen.line((around(angle, radius), around(angle, -radius)), fill=colour, width=max(3, width))
        case _:
            corners = {"square": 4, "star": 5, "triangle": 3}[shape]
            inner = 0.4 if shape == "star" else math.cos(math.pi / corners)  # how far the edges bend inwards
            distances = [radius * (inner if k % 2 else 1) for k in range(2 * corners)]
            pen.polygon([around(turn + k * math.pi / corners, r) for k, r in enumerate(distances)], fill=colour)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _colour(chance: random.Random, low: int, high: int) -> tuple[int, int, int]:
    return chance.randint(low, high), chance.randint(low, high), chance.randint(low, high)
