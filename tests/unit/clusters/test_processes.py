"""Processes of a cluster, and signals to them."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ddptrain.clusters import processes
from ddptrain.clusters.processes import FOLDER, PYTHON, DaemonId, DaemonOrder
from ddptrain.clusters.signals import deferred, interruptible
from ddptrain.errors import ClusterError, Interrupted
from ddptrain.host_identity import HostId, this_host

# --- Processes that outlive the command: found again, ended as a whole, never mistaken for another ---


Start = Callable[..., DaemonId]
SERVE = "import sys, time; print('serving', *sys.argv[1:], flush=True); time.sleep(600)"
DEAF = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('serving', flush=True); time.sleep(600)"
)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started = []

    def begin(code: str = SERVE, *args: str, **order: Any) -> DaemonId:
        given = {"name": "it", "folder": str(tmp_path / "d"), "argv": [PYTHON, "-c", code, *args], **order}
        started.append(processes.start(DaemonOrder(**given)))
        return started[-1]

    yield begin
    processes.stop(started, timeout_s=0.1)


def wait_for_words(daemon: DaemonId, text: str) -> None:
    deadline = time.monotonic() + 60
    while text not in processes.tail(daemon.folder, daemon.name, 100):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_process_has_a_session_of_its_own_and_ends_on_demand(start: Start) -> None:
    daemon = start()
    wait_for_words(daemon, "serving")
    assert psutil.Process(daemon.pid).terminal() is None and processes.alive(daemon)
    processes.stop([daemon])
    assert not processes.alive(daemon)
    processes.stop([daemon])  # what has ended is fine


def test_process_that_does_not_listen_is_killed_with_its_group(start: Start) -> None:
    daemon = start(DEAF)
    wait_for_words(daemon, "serving")
    processes.stop([daemon], timeout_s=0.2)
    assert not processes.alive(daemon)


def test_other_process_with_the_same_pid_is_left_alone(start: Start) -> None:
    daemon = start()
    other = dataclasses.replace(daemon, created=daemon.created - 100)
    assert not processes.alive(other)
    processes.stop([other])
    assert processes.alive(daemon)


def test_process_of_an_earlier_boot_has_ended(start: Start) -> None:
    """Its pid and even its start time may be those of another process now."""
    daemon = start()
    earlier = dataclasses.replace(daemon, host=dataclasses.replace(daemon.host, boot="an-earlier-boot"))
    assert not processes.alive(earlier)
    processes.stop([earlier])
    assert processes.alive(daemon)


def test_process_of_another_host_is_neither_checked_nor_ended_and_its_folder_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    daemon = processes.start(DaemonOrder("it", "dev-1", [PYTHON, "-c", SERVE]))
    try:
        there = dataclasses.replace(daemon, host=HostId("gpu1", "m", "b", "pid:[1]"))
        where = r"the it \(pid \d+\) runs on the host gpu1, and this is .*: run the command on gpu1"
        for call in (lambda: processes.alive(there), lambda: processes.stop([daemon, there])):
            with pytest.raises(ClusterError, match=where):
                call()
        with pytest.raises(ClusterError, match=where):
            processes.end("dev-1", [there])
        assert processes.alive(daemon) and Path(daemon.folder).is_dir()
    finally:
        processes.end("dev-1", [daemon])


def test_host_of_a_process_survives_json(start: Start) -> None:
    daemon = start()
    assert daemon.host == this_host()
    assert DaemonId.of(json.loads(json.dumps(dataclasses.asdict(daemon)))) == daemon


def test_files_and_log_are_for_this_user_only(start: Start) -> None:
    daemon = start(SERVE, f"{FOLDER}/key.pem", files={"key.pem": "secret"})
    wait_for_words(daemon, "key.pem")
    folder = Path(daemon.folder)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())}
    assert modes == {folder.name: 0o700, "key.pem": 0o600, "it.log": 0o600}
    assert processes.tail(daemon.folder, "it", 1) == f"serving {folder}/key.pem\n"


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the folders of processes lie that are started with a label."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "ddptrain" / "hosts"


def test_process_whose_start_was_never_answered_is_ended_by_its_folder(start: Start, hosts: Path) -> None:
    daemon, other = start(SERVE, FOLDER, folder="dev-1"), start(SERVE, FOLDER, folder="dev-2")
    assert daemon.folder == str(hosts / "dev-1")
    with subprocess.Popen(["sleep", "600"], cwd=daemon.folder, start_new_session=True) as bystander:
        processes.end("dev-1", [])
        processes.end("dev-1", [daemon])  # what has ended is fine
        assert not processes.alive(daemon) and processes.alive(other)
        assert bystander.poll() is None
        bystander.kill()


def test_clock_that_is_set_does_not_hide_a_process(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = start()
    now = psutil.boot_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: now + 3600, raising=False)
    monkeypatch.setattr("psutil._pslinux.BOOT_TIME", now + 3600, raising=False)
    assert processes.alive(daemon)


def test_folder_that_cannot_be_made_is_told(start: Start, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ClusterError, match="the it could not be started"):
        start(folder=str(tmp_path / "file" / "below"))


def test_json_that_a_process_never_leaves_is_told_with_its_words(start: Start) -> None:
    daemon = start("raise SystemExit('no port is free')")
    wait_for_words(daemon, "no port")
    with pytest.raises(ClusterError, match="no port is free"):
        processes.read(daemon.folder, "told.json", 0.1)


def test_host_knows_which_addresses_are_its_own() -> None:
    about = processes.describe(["127.0.0.1", "192.0.2.1", "nowhere.invalid"])
    assert about["addresses"] == {"127.0.0.1": "127.0.0.1", "192.0.2.1": "", "nowhere.invalid": ""}


def test_command_speaks_json_and_survives_its_caller(tmp_path: Path, hosts: Path) -> None:
    def call(command: str, **given: Any) -> Any:
        program = [sys.executable, "-P", "-m", "ddptrain.clusters.processes", command]
        done = subprocess.run(program, input=json.dumps(given), capture_output=True, text=True, timeout=60, check=True)
        return json.loads(done.stdout)

    order = {"name": "it", "folder": "dev-1", "argv": [PYTHON, "-c", SERVE]}
    daemon = call("start", **order)["result"]
    assert call("alive", daemons=[daemon]) == {"result": [True]}
    assert call("end", folder="dev-1", daemons=[daemon], timeout_s=10) == {"result": None}
    assert list(hosts.iterdir()) == []
    assert call("tail", folder=daemon["folder"], name="it", lines=5) == {"result": ""}
    (tmp_path / "file").touch()
    assert "could not be started" in call("start", **{**order, "folder": str(tmp_path / "file")})["error"]


def test_end_of_each_log_is_told_if_a_file_does_not_appear(tmp_path: Path) -> None:
    for name, text in {"a": "x" * 600 + "\n", "b": "said\n"}.items():
        (tmp_path / f"{name}.log").write_text(text)
    with pytest.raises(ClusterError) as failed:
        processes.read(str(tmp_path), "scheduler.json", 0.0)
    start, *logs = str(failed.value).replace("; ", ": ").split(": ")
    assert start == "scheduler.json did not appear within 0 s" and sorted(logs) == ["said", "x" * 500]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ClusterError, match=r"^f did not appear within 0 s$"):
        processes.read(str(tmp_path / "empty"), "f", 0.0)


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


def test_error_of_a_library_after_a_signal_is_an_interruption_and_others_stay_what_they_are() -> None:
    def broken(error: Exception, *, by_signal: bool) -> None:
        with interruptible():
            try:
                if by_signal:
                    os.kill(os.getpid(), signal.SIGTERM)
            except Interrupted as cause:
                raise error from cause
            raise error

    with pytest.raises(Interrupted):
        broken(RuntimeError("can't start new thread"), by_signal=True)
    for error in (RuntimeError("of its own"), ClusterError("x")):
        with pytest.raises(type(error), match=str(error)):
            broken(error, by_signal=False)
