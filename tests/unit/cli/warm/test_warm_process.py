"""Commands that a warm process runs: they look like a process of their own from outside."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from ddptrain.cli.warm.client import SOCKET, SWITCH
from tests.support.command import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")

# Like the command, but it says whether a warm process has run it.
COMMAND = """
import os, sys
from ddptrain.cli.warm import client
code = client.run(sys.argv[1:], os.environ)
print("warm" if code is not None else "cold", flush=True)
sys.exit(code)
"""
TRAINING = "name: warm\nworkload: petnames\nparams: {epochs: 1}\ncluster: {ranks: 1}\n"


@dataclass(frozen=True)
class Warm:
    """A warm process, its log, and the environment of its commands."""

    process: subprocess.Popen[bytes]
    log: Path
    env: dict[str, str]

    def start(self, folder: Path, *words: str, inherited: str = "", **env: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", COMMAND, *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "pass_fds": [*map(int, inherited.split())]}
        return subprocess.Popen(command, cwd=folder, env=self.env | env, stdin=subprocess.DEVNULL, text=True, **pipes)  # type: ignore[call-overload,no-any-return]


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    state = tmp_path_factory.mktemp("state")
    folder = state / "ddptrain" / "clusters" / "here"
    folder.mkdir(parents=True, mode=0o700)
    env = {**os.environ, "XDG_STATE_HOME": str(state)} | {SWITCH: "on"}
    log = state / "log"
    with log.open("w") as out:
        command = [sys.executable, "-P", "-m", "ddptrain.cli.warm.server", str(folder)]
        process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=out, stderr=out)
    wait_until(lambda: (folder / SOCKET).exists() or process.poll() is not None)
    assert process.poll() is None, log.read_text()
    yield Warm(process, log, env)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(10) == 0
    assert not (folder / SOCKET).exists()


@pytest.fixture
def silent_port() -> Iterator[int]:
    """The port of a server that accepts connections and never says anything."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def driver_of(folder: Path) -> int:
    """The pid of the driver of the run in a folder, once the run has begun and handles signals."""
    wait_until(lambda: [log for log in folder.glob("runs/*/logs/ddptrain.log") if log.stat().st_size])
    (record,) = folder.glob("runs/*/run.json")
    return int(json.loads(record.read_text())["driver"]["pid"])


def test_output_working_directory_environment_and_exit_code_are_those_of_the_command(
    warm: Warm, tmp_path: Path
) -> None:
    (tmp_path / "wrong.yaml").write_text("name: warm\nworkload: ${WORKLOAD_OF_THIS_TEST}\nnonsense: 1\n")
    process = warm.start(tmp_path, "train", "wrong.yaml", WORKLOAD_OF_THIS_TEST="petnames")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "warm\n")
    direct = subprocess.run(
        [sys.executable, "-m", "ddptrain", "train", "wrong.yaml"],
        cwd=tmp_path,
        env=warm.env | {SWITCH: "off", "WORKLOAD_OF_THIS_TEST": "petnames"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (direct.returncode, direct.stderr) == (2, err)
    assert "wrong.yaml" in direct.stderr and "nonsense" in direct.stderr


@pytest.mark.parametrize(
    ("words", "environ"),
    [
        ("train none.yaml", {"TZ": "Asia/Tokyo"}),
        ("train none.yaml", {SWITCH: "off"}),
        ("train none.yaml", {"PYTHONPATH": "/lib:"}),
        ("train none.yaml --detach", {}),
        ("results list", {}),
    ],
)
def test_command_that_needs_a_process_of_its_own_runs_itself(
    warm: Warm, tmp_path: Path, words: str, environ: dict[str, str]
) -> None:
    assert warm.start(tmp_path, *words.split(), **environ).communicate(timeout=60) == ("cold\n", "")
    if "TZ" in environ:
        wait_until(lambda: "a command is not warm: other environment" in warm.log.read_text())


def test_command_with_a_file_of_the_shell_runs_itself(warm: Warm, tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        process = warm.start(tmp_path, "train", "none.yaml", inherited=str(file.fileno()))
        assert process.communicate(timeout=60) == ("cold\n", "")


def test_signal_ends_the_forked_command_as_it_ends_a_command(warm: Warm, tmp_path: Path, silent_port: int) -> None:
    (tmp_path / "a.yaml").write_text(TRAINING)
    process = warm.start(tmp_path, "train", "a.yaml", "--cluster", f"tcp://127.0.0.1:{silent_port}")
    driver = driver_of(tmp_path)
    assert driver != process.pid
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert out.splitlines()[-1] == "warm"
    wait_until(lambda: not psutil.pid_exists(driver))


def test_killed_command_takes_the_forked_one_along(warm: Warm, tmp_path: Path, silent_port: int) -> None:
    (tmp_path / "a.yaml").write_text(TRAINING)
    process = warm.start(tmp_path, "train", "a.yaml", "--cluster", f"tcp://127.0.0.1:{silent_port}")
    driver = driver_of(tmp_path)
    process.kill()
    process.communicate(timeout=30)
    wait_until(lambda: not psutil.pid_exists(driver))


def test_suspended_command_suspends_the_forked_one(warm: Warm, tmp_path: Path, silent_port: int) -> None:
    (tmp_path / "a.yaml").write_text(TRAINING)
    process = warm.start(tmp_path, "train", "a.yaml", "--cluster", f"tcp://127.0.0.1:{silent_port}")
    driver = psutil.Process(driver_of(tmp_path))
    process.send_signal(signal.SIGTSTP)
    wait_until(lambda: driver.status() == psutil.STATUS_STOPPED)
    wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
    process.send_signal(signal.SIGCONT)
    wait_until(lambda: driver.status() != psutil.STATUS_STOPPED)
    driver.kill()
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL


def test_suspended_warm_process_costs_a_second_and_runs_nothing_later(warm: Warm, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(TRAINING)
    warm.process.send_signal(signal.SIGSTOP)
    try:
        process = warm.start(tmp_path, "train", "a.yaml", "--dry-run")
        assert process.communicate(timeout=60) == ("cold\n", "")
    finally:
        warm.process.send_signal(signal.SIGCONT)
    assert process.returncode == 0
    again = warm.start(tmp_path, "train", "a.yaml", "--dry-run")
    out, err = again.communicate(timeout=60)
    assert (again.returncode, err) == (0, "")
    assert out.startswith("# ok: would start") and "\nname: warm\n" in out and out.endswith("warm\n")
