"""Atomic writes, appends, locks, temporary folders and hashes."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile
from pathlib import Path

import pytest

from ddptrain import file_ops

# Calls that belong to file_ops alone, as they are written in source code.


@pytest.mark.parametrize("durable", [True, False])
def test_atomic_write_replaces_the_content_and_sets_the_mode(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"a longer old content")
    file_ops.write_atomic(path, b"new", mode=0o600, durable=durable)
    assert path.read_bytes() == b"new" and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["x"]


def test_atomic_file_is_not_there_if_the_block_raises(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")

    def interrupted() -> None:
        with file_ops.atomic_file(path) as file:
            file.write(b"half")
            assert len(os.listdir(tmp_path)) == 2 and path.read_bytes() == b"old"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["x"]


def test_links_and_fifos_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "x")
    os.mkfifo(tmp_path / "fifo")
    for name, number in (("link", errno.ELOOP), ("fifo", errno.EINVAL), ("none", errno.ENOENT)):
        with pytest.raises(OSError, match=name) as caught:
            file_ops.open_regular(tmp_path / name)
        assert caught.value.errno == number


def test_exclusive_lock_keeps_out_all_and_shared_ones_do_not_keep_out_each_other(tmp_path: Path) -> None:
    one, two = (os.open(tmp_path / "lock", file_ops.CREATE) for _ in range(2))
    assert file_ops.try_lock(one) and not file_ops.try_lock(two) and not file_ops.try_lock(two, shared=True)
    fcntl.flock(one, fcntl.LOCK_UN)
    assert file_ops.try_lock(one, shared=True) and file_ops.try_lock(two, shared=True)
    assert not file_ops.try_lock(one)
    os.close(two)
    file_ops.wait_for_lock(one)
    os.close(one)


def test_hashes_are_those_of_sha256(tmp_path: Path) -> None:
    # The test vector of FIPS 180-2.
    known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    (tmp_path / "x").write_bytes(b"abc")
    assert file_ops.hash_file(tmp_path / "x") == (3, known)
    pieces = file_ops.sha256()
    pieces.update(b"a")
    pieces.update(b"bc")
    assert pieces.hexdigest() == known == file_ops.sha256(b"abc").hexdigest()


def test_device_or_fifo_is_never_replaced(tmp_path: Path) -> None:
    fifo, link = tmp_path / "fifo", tmp_path / "link"
    os.mkfifo(fifo)
    link.symlink_to("/dev/null")
    for path in (fifo, link):
        with pytest.raises(OSError, match="not a regular file"):
            file_ops.write_atomic(path, b"x")
    assert stat.S_ISFIFO(fifo.stat().st_mode) and link.is_symlink()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["fifo", "link"]


def test_temp_folder_is_private_and_deleted_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with file_ops.temp_folder("sync-") as folder:
        (folder / "sub").mkdir()
        assert folder.parent == tmp_path and folder.name.startswith("sync-")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert os.listdir(tmp_path) == []


def test_next_temp_folder_deletes_those_of_killed_processes(tmp_path: Path) -> None:
    """And no other one: not those in use, of another kind, without a lock file, or behind a link."""
    in_use, lock = file_ops.make_temp_folder("worker-", tmp_path)
    killed, released = file_ops.make_temp_folder("worker-", tmp_path)
    other, released_too = file_ops.make_temp_folder("sync-", tmp_path)
    elsewhere, released_elsewhere = file_ops.make_temp_folder("target-", tmp_path)
    (tmp_path / "worker-link").symlink_to(elsewhere)
    (tmp_path / "worker-without").mkdir()
    (killed / "checkpoint").mkdir()
    for descriptor in (released, released_too, released_elsewhere):
        os.close(descriptor)
    made, lock_too = file_ops.make_temp_folder("worker-", tmp_path)
    names = {"worker-link", "worker-without", other.name, elsewhere.name, in_use.name, made.name}
    assert set(os.listdir(tmp_path)) == names and (elsewhere / ".lock").exists()
    for descriptor in (lock, lock_too):
        os.close(descriptor)


def test_folder_is_private_if_nobody_else_may_enter_it_and_it_is_ours(tmp_path: Path) -> None:
    (tmp_path / "file").touch(mode=0o600)
    (tmp_path / "mine").mkdir(mode=0o700)
    assert file_ops.why_not_private(tmp_path / "mine", (tmp_path / "mine").stat()) == ""
    assert "must belong to user" in file_ops.why_not_private(tmp_path / "file", (tmp_path / "file").stat())
    (tmp_path / "mine").chmod(0o710)
    assert "with mode 0710, but" in file_ops.why_not_private(tmp_path / "mine", (tmp_path / "mine").stat())
    others = os.stat_result((stat.S_IFDIR | 0o700, 0, 0, 2, os.geteuid() + 1, 0, 0, 0, 0, 0))
    assert f"of user {os.geteuid() + 1} " in file_ops.why_not_private(tmp_path, others)


def test_private_folder_has_private_parents_whatever_the_umask(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(mode=0o755)
    before = os.umask(0)
    try:
        file_ops.make_private(tmp_path / "mine" / "state" / "ddptrain")
        file_ops.make_private(tmp_path / "mine" / "state" / "ddptrain")
    finally:
        os.umask(before)
    folders = (tmp_path / "mine", tmp_path / "mine" / "state", tmp_path / "mine" / "state" / "ddptrain")
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in folders] == [0o755, 0o700, 0o700]
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        file_ops.make_private(tmp_path / "file" / "below")
