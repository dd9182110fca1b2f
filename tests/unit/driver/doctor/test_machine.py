"""What `ddptrain doctor` reads of this machine."""

from __future__ import annotations

import dataclasses
import json
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import nullcontext
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddptrain.driver.doctor import machine
from ddptrain.driver.doctor.judge import Check, Result, TorchFacts, judge_clock
from ddptrain.errors import ClusterError
from ddptrain.storage.remote_folder import RemoteFolder
from tests.unit.driver.cluster_check.hosts import facts


class Late(BaseHTTPRequestHandler):
    """A server that refuses each request, and whose clock stands still in 2001."""

    def do_HEAD(self) -> None:
        self.send_response_only(403)
        self.send_header("Date", "Mon, 01 Jan 2001 00:00:00 GMT")
        self.end_headers()


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Late) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()
        thread.join()


def test_server_that_refuses_is_reachable_and_has_a_clock(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([978307200.0 + 20.0, 978307200.0 + 22.0])  # the answer takes 2 s: it was sent in the middle of them
    monkeypatch.setattr(machine, "time", SimpleNamespace(time=lambda: next(times)))
    assert machine.ask_server(server) == machine.Answer(server, "", 20.5)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(113, "No route to host"), "No route to host"),
        (urllib.error.URLError(ConnectionRefusedError(111, "Connection refused")), "Connection refused"),
        (urllib.error.URLError("unknown\nthing"), "unknown"),
        (HTTPException("odd"), "odd"),
        (None, ""),
    ],
)
def test_server_is_asked_for_its_headers_only_and_not_for_long(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, told: str
) -> None:
    def urlopen(request: urllib.request.Request, timeout: float) -> Any:
        assert (request.full_url, request.get_method(), timeout) == ("https://h:1/x", "HEAD", 3.0)
        if error is not None:
            raise error
        return nullcontext(SimpleNamespace(headers={}))

    monkeypatch.setattr(machine.urllib.request, "urlopen", urlopen)  # type: ignore[attr-defined]
    assert machine.ask_server("https://h:1/x") == machine.Answer("https://h:1/x", told)


def test_server_that_is_away_is_named_without_its_password() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    answer = machine.ask_server(f"http://me:passw0rd@127.0.0.1:{port}/x")
    assert answer.error == "Connection refused" and "passw0rd" not in answer.url
    assert machine.ask_server("ftp://x").error.startswith("it is not a URL")


@pytest.mark.parametrize(
    ("environ", "asked"),
    [
        ({}, []),
        ({"WANDB_API_KEY": "k" * 40}, ["https://api.wandb.ai"]),
        ({"WANDB_API_KEY": "k" * 40, "WANDB_BASE_URL": "https://w", "WANDB_MODE": "offline"}, []),
        ({"AWS_ENDPOINT_URL": "http://a", "AWS_ENDPOINT_URL_S3": "http://s"}, ["http://s"]),
    ],
)
def test_only_servers_that_are_configured_are_asked(
    environ: dict[str, str], asked: list[str], tmp_path: object
) -> None:
    assert machine._servers({"HOME": str(tmp_path), **environ}) == asked


def test_process_that_fails_is_a_problem() -> None:
    assert machine._decoded(TorchFacts, "", "No module named torch") == (None, "No module named torch")
    assert machine._decoded(TorchFacts, "", "")[0] is None
    found, _ = machine._decoded(TorchFacts, 'a warning\n{"torch": "2.9"}', "")
    assert found == TorchFacts("2.9")


def test_loopback_works() -> None:
    assert machine.check_ports() == Check("ports", Result.OK, "a connection to 127.0.0.1 works")


@pytest.mark.parametrize(
    ("error", "told"), [(OSError(111, "Connection refused"), "Connection refused"), (OSError("odd"), "odd")]
)
def test_loopback_that_is_closed_is_told(monkeypatch: pytest.MonkeyPatch, error: OSError, told: str) -> None:
    calls: list[Any] = []

    def create_server(address: tuple[str, int]) -> Any:
        calls.append(address)
        return nullcontext(SimpleNamespace(getsockname=lambda: ("127.0.0.1", 4711)))

    def create_connection(address: tuple[str, int], *, timeout: float) -> None:
        calls.append((address, timeout))
        raise error

    fake = SimpleNamespace(create_server=create_server, create_connection=create_connection)
    monkeypatch.setattr(machine, "socket", fake)
    hint = "is the loopback interface up (ip addr), and is no firewall in the way?"
    assert machine.check_ports() == Check("ports", Result.BAD, f"no connection to 127.0.0.1: {told}", hint)
    assert calls == [("127.0.0.1", 0), (("127.0.0.1", 4711), 3.0)]


def test_process_is_asked_with_its_arguments_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = iter([("a\n", "x\nlast words\n", 0), ("", "x\nlast words\n", 3), ("", "", 3)])

    def run(command: list[str], *, env: dict[str, str], timeout: float, **options: bool) -> SimpleNamespace:
        assert options == {"capture_output": True, "text": True, "check": False}
        assert command == [sys.executable, "-P", "-m", "a.module", "one"] and env == {"A": "1"} and timeout == 30.0
        stdout, stderr, status = next(outcomes)
        return SimpleNamespace(stdout=stdout, stderr=stderr, returncode=status)

    monkeypatch.setattr(subprocess, "run", run)
    answers = [machine._process("a.module", ["one"], {"A": "1"}) for _ in range(3)]
    assert answers == [("a\n", ""), ("", "last words"), ("", "exit code 3")]

    def never(command: list[str], **_: object) -> None:
        raise subprocess.TimeoutExpired(command, 30.0)

    monkeypatch.setattr(subprocess, "run", never)
    assert machine._process("a.module", [], {}) == ("", "it does not answer within 30 s")


def test_folder_that_does_not_exist_is_checked_in_the_nearest_one_above(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert machine._existing(tmp_path) == machine._existing(tmp_path / "a" / "b") == tmp_path
    assert machine._existing(tmp_path / "file") == tmp_path


@pytest.mark.parametrize(
    ("date", "now", "ahead_s"),
    [
        ("Mon, 01 Jan 2001 00:00:00 GMT", 978307200.0 + 7.5, 7.0),
        ("Mon, 01 Jan 2001 00:00:00 GMT", 978307200.0 - 2.0, -2.5),
        ("today", 0.0, None),
    ],
)
def test_clock_is_ahead_of_the_middle_of_the_second_that_a_date_names(
    date: str, now: float, ahead_s: float | None
) -> None:
    assert machine._ahead(date, now) == ahead_s


def test_store_is_checked_only_for_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = iter([None, ClusterError("no bucket")])

    def check() -> None:
        if (problem := next(problems)) is not None:
            raise problem

    monkeypatch.setattr(RemoteFolder, "open", lambda url: SimpleNamespace(check=check))
    assert machine._store("runs") == []
    assert machine._store("s3://bucket/runs") == [Check("store", Result.OK, "s3://bucket/runs can be listed")]
    assert machine._store("s3://bucket/runs") == [Check("store", Result.BAD, "no bucket")]


def test_machine_is_checked_with_its_host_torch_servers_and_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, list[str]]] = []
    found = facts(cores=2, scratch=str(tmp_path))
    outputs = {
        "ddptrain.worker.host_facts": (json.dumps(dataclasses.asdict(found)), ""),
        "ddptrain.rank.torch_probe": (json.dumps({"torch": "2.9", "torchvision": "0.24"}), ""),
    }

    def process(module: str, arguments: list[str], environ: object) -> tuple[str, str]:
        assert environ == {"A": "1"}
        asked.append((module, arguments))
        return outputs[module]

    answers = {"https://a": machine.Answer("https://a", "refused"), "https://b": machine.Answer("https://b", "", 20.0)}
    monkeypatch.setattr(machine, "_process", process)
    monkeypatch.setattr(machine, "_servers", lambda _: list(answers))
    monkeypatch.setattr(machine, "ask_server", answers.__getitem__)
    monkeypatch.setattr(machine, "check_ports", lambda: Check("ports", Result.OK, "open"))
    checks = machine.check_machine(str(tmp_path / "runs"), {"A": "1"})
    assert sorted(asked) == [("ddptrain.rank.torch_probe", []), ("ddptrain.worker.host_facts", [str(tmp_path), ""])]
    told = [check.subject for check in checks]
    assert told[0] == "Python" and told[-4:] == ["ports", "server", "server", "clock"]
    assert {"torch", "GPUs", "disk"} <= set(told) and "store" not in told
    assert {check.subject: check for check in checks if check.result is not Result.OK} == {
        "server": Check(
            "server",
            Result.BAD,
            "https://a can't be reached: refused",
            "check the network, the proxy (HTTPS_PROXY) and the URL",
        ),
        "clock": judge_clock(20.0, "https://b"),
    }
    outputs["ddptrain.worker.host_facts"] = outputs["ddptrain.rank.torch_probe"] = ("", "no module")
    monkeypatch.setattr(machine, "_servers", lambda _: [])
    failed = {check.subject: check for check in machine.check_machine(str(tmp_path), {"A": "1"})}
    assert failed["host"] == Check("host", Result.BAD, "its facts can't be read: no module")
    assert failed["torch"].text == "torch does not work: no module"
    assert failed["clock"].result is Result.SKIPPED and "server" not in failed
