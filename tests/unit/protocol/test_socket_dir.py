"""The folder of a shared rank server: private, locked, and usable with a long path."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from ddptrain.errors import ClusterError
from ddptrain.protocol.socket_dir import locked


@pytest.mark.parametrize("name", ["short", "x" * 150])
def test_second_process_connects_to_the_socket_of_the_first(tmp_path: Path, name: str) -> None:
    with locked(tmp_path / name) as folder:
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        assert folder.connect() is None
        listener = folder.listen()
        connection = folder.connect()
    assert connection is not None
    connection.send(b"hello")
    server, _ = listener.accept()
    assert server.recv(100) == b"hello"
    for each in (connection, server, listener):
        each.close()


def test_socket_of_a_dead_server_is_replaced(tmp_path: Path) -> None:
    with locked(tmp_path / "s") as folder:
        folder.listen().close()
        assert folder.connect() is None
        with folder.listen():
            pass


def test_removed_folder_is_made_again(tmp_path: Path) -> None:
    with locked(tmp_path / "s") as folder:
        folder.remove()
        assert not folder.path.exists()
    with locked(tmp_path / "s") as folder:
        assert folder.path.is_dir()


def test_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    os.chmod(tmp_path / "open", 0o755)
    with pytest.raises(ClusterError, match="mode 0755, but it must belong to user"), locked(tmp_path / "open"):
        pass


@pytest.mark.parametrize("kind", ["link", "file"])
def test_link_or_file_in_its_place_is_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / "target").mkdir(mode=0o700)
    place = tmp_path / "s"
    place.symlink_to("target") if kind == "link" else place.touch()
    with pytest.raises(ClusterError, match="is not a usable folder"), locked(place):
        pass
