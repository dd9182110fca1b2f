"""Whom a command connects to, which asks for a warm process."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ddptrain.cli.warm import client

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")


def test_module_is_imported_without_packages() -> None:
    code = "import sys, ddptrain.cli.warm.client; print(*{name.partition('.')[0] for name in sys.modules})"
    shown = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True).stdout
    assert {*shown.split()} & {"typer", "pydantic", "dask", "distributed", "yaml", "asyncio"} == set()


@pytest.mark.parametrize(("mode", "is_used"), [(0o700, True), (0o750, False), (0o701, False)])
def test_only_a_folder_of_this_user_alone_is_used(tmp_path: Path, mode: int, *, is_used: bool) -> None:
    tmp_path.chmod(mode)
    with contextlib.nullcontext() if is_used else pytest.raises(PermissionError), client.private_folder(str(tmp_path)):
        pass


def test_folder_behind_a_link_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(NotADirectoryError), client.private_folder(str(tmp_path / "link")):
        pass


def test_without_a_warm_process_the_command_runs_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert client.run(["train", "a.yaml"], {"XDG_STATE_HOME": str(tmp_path)}) is None
    dead = tmp_path / "ddptrain" / "clusters" / "dead"
    dead.mkdir(parents=True, mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        monkeypatch.chdir(dead)  # the whole path may be too long
        listener.bind(client.SOCKET)
    assert client.run(["train", "a.yaml"], {"XDG_STATE_HOME": str(tmp_path)}) is None


def test_warm_process_has_imported_what_a_run_on_a_running_cluster_imports() -> None:
    later = "attempt, rank_specs, reservation, connect, workers"
    names = [f"ddptrain.driver.{name}" for name in later.split(", ")]
    code = (
        "import sys; from ddptrain.cli.warm.server import import_driver; import_driver(); before = set(sys.modules)\n"
        f"import importlib; [importlib.import_module(name) for name in {names}]\n"
        "import platformdirs, pathspec; print(sorted(set(sys.modules) - before))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown == "[]\n"
