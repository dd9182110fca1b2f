"""`ddptrain notify test` with real servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.notify_servers import CheckServer, WebServer, serving
from tests.support.command import Cli

SECRET = "s3cr3t-t0ken-0123456789"


@pytest.fixture
def web() -> Iterator[WebServer]:
    with serving(server := WebServer()):
        yield server


@pytest.fixture
def check() -> Iterator[CheckServer]:
    with serving(server := CheckServer()):
        yield server


def test_secret_is_in_no_output_log_or_file(web: WebServer, check: CheckServer, tmp_path: Path, run_cli: Cli) -> None:
    Path(tmp_path / "c.yaml").write_text(
        "workload: petnames\n"
        f'notify: {{urls: ["env:HOOK", "json://127.0.0.1:1/{SECRET}", "slack://{SECRET}", "tgram://123456789:{SECRET}/1"],'
        f' heartbeat: "http://user:{SECRET}@127.0.0.1:1/{SECRET}"}}\n'
    )
    web.statuses = [401]
    environment = {
        "HOOK": f"json://user:{SECRET}@{web.address}/{SECRET}",
        "DDPTRAIN_LOG": "debug",
        "HOME": str(tmp_path / "home"),
        "TMPDIR": str(tmp_path),
        "PYTHONWARNINGS": "error",
    }
    done = run_cli("notify", "test", "c.yaml", env=environment)
    assert done.rc == 4
    lines = done.stdout.splitlines()
    assert len(lines) == 5
    assert lines[0].startswith("env:HOOK (json): Failed to send JSON POST notification: ")
    assert "error=401" in lines[0]
    assert lines[1].startswith("notify.urls[1] (json): ") and "Connection refused" in lines[1]
    assert lines[2].startswith("notify.urls[2]: Apprise does not accept the URL: ")
    assert lines[4] == "notify.heartbeat (http://127.0.0.1:1): log: Connection refused"
    assert "message not delivered" in done.stderr
    assert web.requests[0].path == f"/{SECRET}"
    (tmp_path / "c.yaml").unlink()
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path


def test_command_delivers_to_all_targets(web: WebServer, check: CheckServer, tmp_path: Path, run_cli: Cli) -> None:
    (tmp_path / "c.yaml").write_text('workload: petnames\nnotify: {urls: "env:HOOK", heartbeat: "env:CHECK"}\n')
    done = run_cli("notify", "test", "c.yaml", env={"HOOK": f"json://{web.address}/", "CHECK": check.url})
    assert (done.rc, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "env:HOOK (json): delivered",
        f"env:CHECK (http://{check.address}): delivered",
    ]
    assert json.loads(web.requests[0].body)["title"] == "Test message of ddptrain"
    assert [kind for kind, _, _ in check.pings] == ["log"]
    assert check.state == "new"
