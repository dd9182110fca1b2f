"""Processes of a cluster, and signals to them."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ddptrain import __version__
from ddptrain.clusters import processes
from ddptrain.clusters.processes import FOLDER, PYTHON
from ddptrain.clusters.signals import deferred, interruptible
from ddptrain.errors import ClusterError, Interrupted
from tests.support.command import wait_until

# --- Processes that outlive the command: found again, ended as a whole, never mistaken for another ---


Start = Callable[..., int]
SERVE = "import sys, time; print('serving', *sys.argv[1:], flush=True); time.sleep(600)"
DEAF = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('serving', flush=True); time.sleep(600)"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder for processes; those with a name alone are in hosts/ beside it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return str(tmp_path / "ddptrain" / "hosts" / "dev-1")


@pytest.fixture
def start(folder: str) -> Iterator[Start]:
    used = set()

    def begin(code: str = SERVE, where: str = folder, *, files: dict[str, str] | None = None) -> int:
        used.add(where)
        processes.located(where).mkdir(parents=True, exist_ok=True, mode=0o700)
        pid = processes.start(where, "it", [PYTHON, "-c", code, f"{FOLDER}/key.pem"], files)
        wait_until(lambda: "serving" in processes.tail(where, "it", 100) or "raise" in code)
        return pid

    yield begin
    for each in used:
        Path(processes.located(each) / "host.json").unlink(missing_ok=True)
        processes.end(each, 0.1)


def test_process_has_a_session_of_its_own_and_ends_on_demand(start: Start, folder: str) -> None:
    pid = start()
    assert psutil.Process(pid).terminal() is None and processes.running(folder) == {pid}
    processes.end(folder)
    processes.end(folder)  # what has ended is fine
    assert processes.running(folder) == set() and not psutil.pid_exists(pid)


def test_process_that_does_not_listen_is_killed_with_its_group(start: Start, folder: str) -> None:
    start(DEAF)
    processes.end(folder, 0.2)
    assert processes.running(folder) == set()


def test_processes_of_other_folders_and_of_the_user_are_left_alone(start: Start, folder: str) -> None:
    pid, other = start(), start(where="dev-2")
    with subprocess.Popen(["sleep", "600"], cwd=folder, start_new_session=True) as bystander:
        assert (processes.running("dev-1"), processes.running("dev-2")) == ({pid}, {other})
        processes.end(folder)
        assert bystander.poll() is None and processes.running("dev-2") == {other}
        bystander.kill()


@pytest.mark.parametrize("change", [{"boot": "an-earlier-boot"}, {"name": "gpu1", "machine": "m", "boot": "b"}])
def test_processes_of_an_earlier_boot_or_another_host_are_not_ended(
    start: Start, folder: str, change: dict[str, str]
) -> None:
    """Their pids may be those of other processes."""
    pid = start()
    file = Path(folder, "host.json")
    host = json.loads(file.read_text())
    file.write_text(json.dumps({**host, **change, "kernel": "of another version"}))
    if "name" in change:
        for call in (processes.running, processes.end):
            with pytest.raises(ClusterError, match=r"run on the host gpu1, and this is .*: run the command on gpu1"):
                call(folder)
    else:
        processes.end(folder)
    file.write_text(json.dumps(host))
    assert processes.running(folder) == {pid}


def test_files_and_log_are_for_this_user_only(start: Start, folder: str) -> None:
    start(files={"key.pem": "secret"})
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (Path(folder), *Path(folder).iterdir())}
    assert modes == {"dev-1": 0o700, "key.pem": 0o600, "host.json": 0o600, "it.log": 0o600}
    assert processes.tail("dev-1", "it", 1) == f"serving {folder}/key.pem\n"


def test_host_knows_which_addresses_are_its_own() -> None:
    assert [processes.own_address(name) for name in ("127.0.0.1", "192.0.2.1", "nowhere.invalid")] == [
        "127.0.0.1",
        "",
        "",
    ]


def test_command_speaks_json_and_survives_its_caller(folder: str) -> None:
    def call(command: str, **given: Any) -> Any:
        program = [sys.executable, "-P", "-m", "ddptrain.clusters.processes", command]
        done = subprocess.run(program, input=json.dumps(given), capture_output=True, text=True, timeout=60, check=True)
        return json.loads(done.stdout)

    def run(code: str, await_s: float = 0.0, version: str = __version__) -> Any:
        argv = [PYTHON, "-c", code, FOLDER, "{address}"]
        more = {"host": "localhost", "address": "", "version": version, "await_s": await_s}
        return call("run", folder="dev-1", name="it", argv=argv, files={}, **more)

    assert "this is 99" in run(SERVE, version="99")["error"]
    assert call("control", folder="dev-1", verb="prepare") == {"result": None}
    assert "no port is free" in run("raise SystemExit('no port is free')", 60.0)["error"]
    written = (
        "import json, os, sys, time; json.dump({'address': sys.argv[2]}, open('new', 'w')); "
        "os.rename('new', 'scheduler.json'); time.sleep(600)"
    )
    answer = run(written, 60.0)["result"]
    assert (answer["scheduler"], answer["address"]) == ({"address": "127.0.0.1"}, "127.0.0.1")
    assert call("control", folder="dev-1", verb="running") == {"result": [answer["pid"]]}
    assert "no port is free" in call("control", folder="dev-1", verb="tail", name="it", lines=5)["result"]
    assert call("control", folder="dev-1", verb="end") == {"result": None}
    assert "the it could not be started" in run(written)["error"]  # the call of a command that was killed
    assert not Path(folder).exists()


def test_only_the_end_of_a_large_log_is_read(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_bytes(b"first\n" + b"x" * (256 * 1024 - 6) + b"\n" + b"last\n")
    assert processes.tail(str(tmp_path), "job", 9) == "x" * (256 * 1024 - 6) + "\nlast\n"
    path.write_bytes(b"first\n\xfflast\n")
    assert processes.tail(str(tmp_path), "job", 9) == "first\n\N{REPLACEMENT CHARACTER}last\n"


# --- Signals while clusters start and end ---


def test_signal_in_a_deferred_block_arrives_at_its_end_or_when_it_asks() -> None:
    seen: list[str] = []

    def blocked(*, asks: bool) -> None:
        with interruptible(), deferred() as deliver:
            os.kill(os.getpid(), signal.SIGTERM)
            seen.append("saved")
            if asks:
                deliver()
                seen.append("not reached")

    for asks in (False, True):
        with pytest.raises(Interrupted):
            blocked(asks=asks)
    assert seen == ["saved", "saved"]


def test_second_signal_breaks_into_a_block_that_allows_it() -> None:
    def blocked() -> None:
        with interruptible(), deferred(breakable=True):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            pytest.fail("the second was delayed")

    with pytest.raises(Interrupted):
        blocked()
