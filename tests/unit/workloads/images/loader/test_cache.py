import contextlib
import fcntl
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from ddptrain.workloads.images.reader import Cache

URL = "s3://bucket/dogs"
IMAGE = bytes(range(256)) * 4


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]


def n_bytes(folder: Path) -> int:
    total = 0
    for path in files(folder):
        with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
            total += path.stat().st_size
    return total


def write_at_once(caches: Sequence[Cache]) -> None:
    """Fifty images each."""

    def write(which: int) -> None:
        for number in range(50):
            caches[which].put(URL, f"{which}/{number}.jpg", "v1", IMAGE)

    threads = [threading.Thread(target=write, args=(which,)) for which in range(len(caches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_image_is_found_again_also_by_another_process_s_cache(tmp_path: Path) -> None:
    Cache(tmp_path, 1 << 20).put(URL, "a/1.jpg", "v1", IMAGE)
    assert Cache(tmp_path, 1 << 20).get(URL, "a/1.jpg", "v1") == IMAGE


def test_another_version_key_or_url_is_another_image(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 1 << 20)
    cache.put(URL, "a/1.jpg", "v1", IMAGE)
    assert cache.get(URL, "a/1.jpg", "v2") is None
    assert cache.get(URL, "a/2.jpg", "v1") is None
    assert cache.get("s3://other/dogs", "a/1.jpg", "v1") is None


def test_damaged_entry_is_dropped(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 1 << 20)
    for damage in (lambda content: content[:-1], lambda content: content[:-1] + b"!", lambda _: b""):
        cache.put(URL, "a/1.jpg", "v1", IMAGE)
        (path,) = files(tmp_path)
        path.write_bytes(damage(path.read_bytes()))
        assert cache.get(URL, "a/1.jpg", "v1") is None
        assert files(tmp_path) == []


def test_size_is_kept_and_what_was_used_last_stays(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 100_000)
    for number in range(150):
        cache.put(URL, f"a/{number}.jpg", "v1", IMAGE)
        assert number % 10 or n_bytes(tmp_path) <= 100_000
        if number >= 10:
            assert cache.get(URL, "a/10.jpg", "v1") == IMAGE, "it was used all the time"
    assert cache.get(URL, "a/149.jpg", "v1") == IMAGE
    assert cache.get(URL, "a/11.jpg", "v1") is None
    assert n_bytes(tmp_path) > 70_000


def test_size_is_kept_by_several_that_write_at_once(tmp_path: Path) -> None:
    told: list[str] = []
    caches = [Cache(tmp_path, 100_000, told.append) for _ in range(9)]
    write_at_once(caches)
    assert n_bytes(tmp_path) <= 100_000
    assert told == []


def test_cache_of_others_that_is_too_large_is_made_smaller(tmp_path: Path) -> None:
    large = Cache(tmp_path, 1 << 20)
    for number in range(120):
        large.put(URL, f"a/{number}.jpg", "v1", IMAGE)
    Cache(tmp_path, 100_000).put(URL, "b/0.jpg", "v1", IMAGE)
    assert n_bytes(tmp_path) <= 100_000


def test_nobody_waits_for_another_who_drops_entries(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 100_000)
    cache.put(URL, "a/0.jpg", "v1", IMAGE)
    with (tmp_path / ".lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for number in range(150):
            cache.put(URL, f"a/{number}.jpg", "v1", IMAGE)
        assert n_bytes(tmp_path) <= 10_000, "the share of a process that can't look"
    cache.put(URL, "b/0.jpg", "v1", IMAGE)
    assert cache.get(URL, "b/0.jpg", "v1") == IMAGE, "it can look again"


def test_what_a_killed_process_left_half_written_goes_after_an_hour(tmp_path: Path) -> None:
    Cache(tmp_path, 100_000).put(URL, "a/0.jpg", "v1", IMAGE)
    old, new = files(tmp_path)[0].with_name(".new-1-1"), files(tmp_path)[0].with_name(".new-2-1")
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    Cache(tmp_path, 100_000).put(URL, "a/1.jpg", "v1", IMAGE)
    assert not old.exists() and new.exists()


def test_image_that_would_fill_the_cache_is_left_out(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 2000)
    cache.put(URL, "a/0.jpg", "v1", IMAGE)
    assert cache.get(URL, "a/0.jpg", "v1") is None


def test_folder_that_can_t_be_written_is_told_once_and_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    told: list[str] = []
    cache = Cache(tmp_path / "cache", 1 << 20, told.append)
    for _ in range(2):
        cache.put(URL, "a/0.jpg", "v1", IMAGE)
        assert cache.get(URL, "a/0.jpg", "v1") is None
    (text,) = told
    assert text.startswith(f"images can't be cached in {tmp_path / 'cache'}, see params.cache.dir: ")
