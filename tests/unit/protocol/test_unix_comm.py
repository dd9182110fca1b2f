"""Dask over unix sockets: only the user who started a cluster can talk to it, and only to a scheduler of their own."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed.comm.core import FatalCommClosedError, connect

from ddptrain.protocol import unix_comm

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")


@pytest.fixture
def folder() -> Iterator[Path]:
    made = unix_comm.make_socket_dir()
    yield made
    unix_comm.remove_socket_dir(f"unix://{made}/scheduler")
    assert not made.exists()


def listener(path: str, heard: list[Any]) -> unix_comm.UnixListener:
    async def handle(comm: Any) -> None:
        heard.append(await comm.read())
        await comm.write("heard")

    return unix_comm.UnixListener(path, handle)


async def asked(path: str) -> Any:
    comm = await connect(f"unix://{path}", timeout=5)
    await comm.write({"a": 1})
    answer = await comm.read()
    await comm.close()
    return answer


def test_message_and_answer_pass(folder: Path) -> None:
    heard: list[Any] = []

    async def both() -> Any:
        async with listener(unix_comm.scheduler_path(folder), heard):
            return await asked(unix_comm.scheduler_path(folder))

    assert (asyncio.run(both()), heard) == ("heard", [{"a": 1}])
    assert list(folder.iterdir()) == [], "the listener removes its socket"


def test_folder_of_a_cluster_is_private_and_its_paths_fit_the_kernel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    made = unix_comm.make_socket_dir()
    try:
        assert made.stat().st_mode & 0o777 == 0o700
        assert len(unix_comm.worker_path(f"unix://{made}/scheduler")) < 100
    finally:
        unix_comm.remove_socket_dir(f"unix://{made}/scheduler")


def test_worker_gets_a_new_path_beside_its_scheduler() -> None:
    first, second = (Path(unix_comm.worker_path("unix:///tmp/ddptrain-sockets-x/scheduler")) for _ in range(2))
    assert first.parent == second.parent == Path("/tmp/ddptrain-sockets-x") and first != second


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o711])
def test_listener_refuses_a_folder_that_is_open_to_others(folder: Path, mode: int) -> None:
    folder.chmod(mode)

    async def start() -> None:
        await listener(str(folder / "s"), []).start()

    with pytest.raises(
        PermissionError, match=f"with mode 0{mode:o}, but it must belong to user {os.geteuid()} with mode 0700"
    ):
        asyncio.run(start())


def test_listener_refuses_a_folder_that_is_a_link(folder: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(folder)

    async def start() -> None:
        await listener(str(link / "s"), []).start()

    with pytest.raises(PermissionError):
        asyncio.run(start())


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "unix:///home/somebody/scheduler"])
def test_only_folders_for_sockets_are_removed(address: str, tmp_path: Path) -> None:
    (tmp_path / "scheduler").touch()
    for each in (address, f"unix://{tmp_path}/scheduler"):
        unix_comm.remove_socket_dir(each)
    assert (tmp_path / "scheduler").exists()


def test_folder_goes_with_a_scheduler_that_was_killed_and_stays_with_one_that_listens(folder: Path) -> None:
    address = f"unix://{unix_comm.scheduler_path(folder)}"

    async def while_it_listens() -> Any:
        async with listener(unix_comm.scheduler_path(folder), []):
            unix_comm.remove_dead_socket_dir(address)
            return await asked(unix_comm.scheduler_path(folder))

    assert asyncio.run(while_it_listens()) == "heard"
    unix_comm.remove_dead_socket_dir(address)
    assert not folder.exists()


def test_next_cluster_deletes_the_folder_of_a_scheduler_that_was_killed(folder: Path) -> None:
    """And nothing else: neither that of a scheduler that listens, nor one that has not begun to."""
    killed, killed_early, begins = [unix_comm.make_socket_dir() for _ in range(3)]
    os.utime(killed_early, (time.time() - 61,) * 2)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(unix_comm.scheduler_path(killed))

    async def while_another_listens() -> Any:
        async with listener(unix_comm.scheduler_path(folder), []):
            made = await asyncio.to_thread(unix_comm.make_socket_dir)
            unix_comm.remove_socket_dir(f"unix://{made}/scheduler")
            return await asked(unix_comm.scheduler_path(folder))

    assert asyncio.run(while_another_listens()) == "heard"
    assert not killed.exists() and not killed_early.exists() and begins.exists()
    unix_comm.remove_socket_dir(f"unix://{begins}/scheduler")


@needs_root
def test_listener_hangs_up_on_another_user_before_a_word(folder: Path) -> None:
    """Somebody has opened the folder by mistake: the user id of the peer still decides."""
    heard: list[Any] = []
    path = unix_comm.scheduler_path(folder)

    async def attacked() -> tuple[bytes, Any]:
        async with listener(path, heard):
            open_to_everyone(path)
            told = await asyncio.to_thread(first_bytes_for_nobody, path)
            return told, await asked(path)

    told, answer = asyncio.run(attacked())
    assert told == b"b''\n", "not even Dask's own greeting"
    assert (answer, heard) == ("heard", [{"a": 1}])


@needs_root
def test_other_user_cannot_open_a_socket(folder: Path) -> None:
    path = unix_comm.scheduler_path(folder)

    async def attacked() -> bytes:
        async with listener(path, []):
            return await asyncio.to_thread(first_bytes_for_nobody, path)

    assert b"PermissionError" in asyncio.run(attacked())


@needs_root
def test_nothing_of_a_forged_scheduler_is_read(tmp_path: Path) -> None:
    """Another user listens where a scheduler has been: what it would send stays unread."""
    marker = tmp_path / "executed"
    forged = Path("/tmp") / f"forged-{os.getpid()}"
    program = (
        f"import os, socket; os.setgid({NOBODY}); os.setuid({NOBODY}); os.mkdir({str(forged)!r}, 0o755)\n"
        f"s = socket.socket(socket.AF_UNIX); s.bind({str(forged / 's')!r}); os.chmod({str(forged / 's')!r}, 0o777)\n"
        f"s.listen(); print('ready', flush=True); c, _ = s.accept()\n"
        f"try: c.sendall({pickled(marker)!r}); print(c.recv(1))\nexcept OSError: print('hung up')\n"
        f"os.unlink({str(forged / 's')!r}); os.rmdir({str(forged)!r})"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        with pytest.raises(FatalCommClosedError, match=f"belongs to user {NOBODY}"):
            asyncio.run(asked(str(forged / "s")))
        assert process.stdout.read() in (b"b''\n", b"hung up\n"), "it was told nothing"
    assert not marker.exists()
    with pytest.raises(OSError, match="No such file"):
        unix_comm.connect_plain(f"unix://{forged}/s", 1.0)


def pickled(marker: Path) -> bytes:
    """What writes a file where it is unpickled."""

    class Attack:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
            return os.mkdir, (str(marker),)

    return pickle.dumps(Attack())


def open_to_everyone(path: str) -> None:
    Path(path).parent.chmod(0o755)
    Path(path).chmod(0o777)


def first_bytes_for_nobody(path: str) -> bytes:
    """What another user who connects is told, or the error."""
    program = (
        f"import os, socket; os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
        f"s = socket.socket(socket.AF_UNIX); s.settimeout(10); s.connect({path!r}); print(s.recv(1000))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    return done.stdout or done.stderr
