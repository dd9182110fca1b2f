"""Large checkpoints are written without the page cache; what cannot be, and small ones, are written as any file."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ddptrain.file_ops import hash_file
from ddptrain.rank.checkpoint import file_format
from ddptrain.rank.checkpoint.snapshot import Snapshot

PAGE = 4096
REAL_WRITE = os.write


def _on_pages(count: int) -> Tensor:
    """`count` numbers (float32) at the begin of a page."""
    return torch.frombuffer(mmap.mmap(-1, max(count * 4, 1)), dtype=torch.float32)[:count]


def _weights() -> dict[str, Tensor]:
    """Two tensors of whole pages; one of whole pages that begins within a page; one with a part of a page."""
    found = {"b": _on_pages(2048), "a": _on_pages(1024), "moved": _on_pages(2048)[2:1026], "odd": _on_pages(1030)}
    for number, tensor in enumerate(found.values()):
        tensor.copy_(torch.arange(len(tensor)) + 10_000.0 * number)
    return found


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """The length of each write of large pieces, and whether it went past the page cache."""
    monkeypatch.setattr(file_format, "_DIRECT_BYTES", 8 * PAGE)
    found: list[tuple[int, bool]] = []

    def write(descriptor: int, data: memoryview) -> int:
        found.append((len(data), bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)))
        return REAL_WRITE(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    return found


def _saved(folder: Path, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Write the weights; check size and hash of the file; read them."""
    file, *_ = file_format.write(folder, Snapshot(weights, {}, {}))
    assert (file.size_bytes, file.sha256) == hash_file(folder / file.name)
    return load_file(folder / file.name)


def _allows_direct(folder: Path) -> bool:
    try:
        os.close(os.open(folder / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


def test_whole_pages_of_a_large_file_go_past_the_page_cache(tmp_path: Path, written: list[tuple[int, bool]]) -> None:
    weights = {**_weights(), "more": _on_pages(8 * 1024)}
    found = _saved(tmp_path / "step-1", weights)
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
    header, *pieces = written[:6]  # by name: a, b, more, moved; then odd
    direct = _allows_direct(tmp_path)
    assert header == (PAGE, False)
    assert pieces == [(PAGE, direct), (2 * PAGE, direct), (8 * PAGE, direct), (PAGE, False), (4120, False)]


def test_a_small_file_stays_in_the_page_cache(tmp_path: Path, written: list[tuple[int, bool]]) -> None:
    _saved(tmp_path / "step-1", {"one": _on_pages(7 * 1024)})
    assert not any(direct for _, direct in written)


@pytest.mark.parametrize(
    ("address", "length", "position", "whole"),
    [(0, PAGE, PAGE, True), (8, PAGE, PAGE, False), (0, PAGE + 8, PAGE, False), (0, PAGE, PAGE + 8, False)],
)
def test_whole_pages_are_so_in_memory_length_and_position(
    address: int, length: int, position: int, whole: bool
) -> None:
    memory = memoryview(mmap.mmap(-1, 4 * PAGE))
    assert file_format._is_whole_pages(memory[address : address + length], position) is whole
    assert not file_format._is_whole_pages(memory[:0], position)


def _refuses(number: int, *, always: bool = False) -> Callable[[int, memoryview], int]:
    def write(descriptor: int, data: memoryview) -> int:
        if always or fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(number, os.strerror(number))
        return REAL_WRITE(descriptor, data)

    return write


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EFAULT])
def test_where_direct_writes_are_refused_the_file_is_written_with_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(file_format, "_DIRECT_BYTES", PAGE)
    monkeypatch.setattr(os, "write", _refuses(number))
    found = _saved(tmp_path / "step-1", _weights())
    assert all(torch.equal(found[name], tensor) for name, tensor in _weights().items())


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_format, "_DIRECT_BYTES", PAGE)
    monkeypatch.setattr(os, "write", _refuses(errno.ENOSPC, always=True))
    with pytest.raises(OSError, match="No space left"):
        file_format.write(tmp_path / "step-1", Snapshot(_weights(), {}, {}))


def test_an_interrupted_write_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_format, "_DIRECT_BYTES", PAGE)
    monkeypatch.setattr(os, "write", lambda descriptor, data: REAL_WRITE(descriptor, data[:PAGE]))
    found = _saved(tmp_path / "step-1", _weights())
    assert all(torch.equal(found[name], tensor) for name, tensor in _weights().items())


def test_file_is_durable_and_new_and_others_can_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[str, int]] = []

    def sync(descriptor: int) -> None:
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), os.fstat(descriptor).st_size))

    monkeypatch.setattr(os, "fsync", sync)
    before = os.umask(0)
    try:
        file = file_format._write_file(tmp_path / "f", [memoryview(b"abc"), memoryview(b"de")])
    finally:
        os.umask(before)
    assert synced == [(str(tmp_path / "f"), 5)] and (file.name, file.size_bytes) == ("f", 5)
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o644
    with pytest.raises(FileExistsError):
        file_format._write_file(tmp_path / "f", [memoryview(b"abc")])
