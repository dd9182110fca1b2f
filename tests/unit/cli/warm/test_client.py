"""Which commands may run in a warm process, and whom they connect to."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ddptrain.cli.warm import client

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")


@pytest.mark.parametrize(
    ("argv", "environ", "suits"),
    [
        (["train", "a.yaml", "--cluster", "x"], {}, True),
        (["run", "a.py"], {"PYTHONPATH": "/lib:/more"}, True),
        (["train", "a.yaml"], {client.SWITCH: "off"}, False),
        (["train", "a.yaml"], {"PYTHONPATH": "/lib:"}, False),
        (["train", "a.yaml"], {"PYTHONPATH": "lib"}, False),
        (["train", "a.yaml", "--detach"], {}, False),
        (["train", "a.yaml", "--ready-fd=7"], {}, False),
        (["results", "list"], {}, False),
        ([], {}, False),
    ],
)
def test_commands_that_need_nothing_of_their_own_process_suit(
    argv: list[str], environ: dict[str, str], *, suits: bool
) -> None:
    code = f"import sys; from ddptrain.cli.warm import client; sys.exit(not client._is_suitable({argv!r}, {environ!r}))"
    done = subprocess.run([sys.executable, "-c", code], stdin=subprocess.DEVNULL, check=False)
    assert (done.returncode == 0) is suits


def test_command_with_a_file_of_the_shell_does_not_suit(tmp_path: Path) -> None:
    code = "import sys; from ddptrain.cli.warm import client; sys.exit(not client._is_suitable(['train', 'a'], {}))"
    with (tmp_path / "file").open("w") as file:
        done = subprocess.run([sys.executable, "-c", code], pass_fds=[file.fileno()], check=False)
    assert done.returncode == 1


def test_module_is_imported_without_packages() -> None:
    code = "import sys, ddptrain.cli.warm.client; print(*{name.partition('.')[0] for name in sys.modules})"
    shown = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True).stdout
    assert {*shown.split()} & {"typer", "pydantic", "dask", "distributed", "yaml", "asyncio"} == set()


@pytest.mark.parametrize(("mode", "connects"), [(0o700, True), (0o750, False), (0o701, False)])
def test_only_a_folder_of_this_user_alone_is_used(tmp_path: Path, mode: int, *, connects: bool) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / client.SOCKET))
        listener.listen()
        tmp_path.chmod(mode)
        found = client._connected(str(tmp_path))
    assert (found is not None) is connects
    if found is not None:
        found.close()


def test_folder_behind_a_link_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(NotADirectoryError), client.private_folder(str(tmp_path / "link")):
        pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_command_ends_by_the_signal_that_has_ended_the_forked_one(number: signal.Signals) -> None:
    code = f"from ddptrain.cli.warm import client; client._end_as({-number})"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -number


def test_exit_code_is_that_of_the_forked_command() -> None:
    assert [client._end_as(code) for code in (0, 2, 75)] == [0, 2, 75]


def test_without_clusters_the_command_runs_itself(tmp_path: Path) -> None:
    assert list(client._connections(str(tmp_path / "none"), [])) == []
    (tmp_path / "dead").mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "dead" / client.SOCKET))
    assert os.path.exists(tmp_path / "dead" / client.SOCKET)
    assert list(client._connections(str(tmp_path), [])) == []
