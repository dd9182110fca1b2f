"""`ddptrain ui`: who gets an answer, what a page says while a run is running, and how the server ends."""

from __future__ import annotations

import http.client
import json
import re
import signal
import time
from http import HTTPStatus
from urllib.parse import urlsplit

import pytest

from tests.contract.conftest import Project
from tests.support.command import Running

WORK = """
    import time
    from pathlib import Path


    def train(ctx, folder):
        for step in range(1, 10_000):
            ctx.log({"train/loss": 1.0 / step}, step=step)
            ctx.progress(step, 10_000, unit="steps")
            print(f"at step {step}", flush=True)
            if (Path(folder) / "go").exists():
                return
            time.sleep(0.02)
"""
RUN = "toy-20260101-000000-0001"


def start_ui(project: Project, *options: str) -> tuple[Running, str]:
    """Start the server; return it with its address."""
    ui = project.start("ui", "--no-browser", *options)
    ui.wait_for("(Ctrl-C ends this)")
    found = re.search(r"http://127\.0\.0\.1:\d+/[\w-]{20,}/", ui.stdout)
    assert found, ui.stdout
    return ui, found[0]


def get(url: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    """Ask for an address: status, headers and body of the answer."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection("127.0.0.1", parts.port, timeout=30)
    connection.request(method, f"{parts.path}?{parts.query}", headers=headers)
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, body


def write_run(project: Project) -> None:
    folder = project.folder / "runs" / RUN
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"run_id": RUN, "workload": "<b>toy</b>", "status": "succeeded"}))
    (folder / "metrics.jsonl").write_text('{"time_s": 1, "step": 1, "rank": 0, "val/loss": 0.5}\n')


def test_only_who_has_the_address_gets_an_answer(project: Project) -> None:
    write_run(project)
    (project.folder / "secret").mkdir()
    (project.folder / "secret" / "run.json").write_text('{"run_id": "secret", "status": "succeeded"}')
    ui, url = start_ui(project)
    root = url[: url.index("/", 8)]
    port = urlsplit(url).port
    for refused, headers in (
        (f"{root}/", {}),
        (f"{root}/wrong-token-of-some-length/?run={RUN}", {}),
        (url, {"Host": "evil.example"}),
        (url, {"Host": f"127.0.0.1.evil.example:{port}"}),
        (url, {"Origin": "http://evil.example"}),
        (url, {"Origin": "null"}),
    ):
        status, _, body = get(refused, **headers)
        assert (status, RUN in body) == (HTTPStatus.FORBIDDEN, False), (refused, headers)
    assert get(url, "POST")[0] == HTTPStatus.NOT_IMPLEMENTED
    assert get(url, Host=f"localhost:{port}", Origin=f"http://localhost:{port}")[0] == HTTPStatus.OK

    status, headers, page = get(url)
    assert (status, f"?run={RUN}" in page) == (HTTPStatus.OK, True)
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert (headers["cache-control"], headers["referrer-policy"]) == ("no-store", "no-referrer")
    page = get(f"{url}?run={RUN}")[2]
    assert ("&lt;b&gt;toy" in page, "<b>toy" in page) == (True, False)
    for outside in ("../secret", f"{project.folder}/secret", "latest", "no-such-run", "sweep/1", ""):
        assert get(f"{url}?run={outside}")[0] == HTTPStatus.NOT_FOUND, outside
    assert get(f"{url}?sweep=../secret")[0] == HTTPStatus.NOT_FOUND

    before = {path: path.stat().st_mtime_ns for path in (project.folder / "runs").rglob("*")}
    assert get(f"{url}?compare={RUN}&compare={RUN}")[0] == get(f"{url}?models")[0] == HTTPStatus.OK
    assert {path: path.stat().st_mtime_ns for path in (project.folder / "runs").rglob("*")} == before
    second = project("ui", "--no-browser", "--port", str(port), rc=2)
    assert f"--port {port}: Address already in use" in second.stderr
    ui.popen.send_signal(signal.SIGTERM)
    assert ui.finish().rc == 128 + signal.SIGTERM


def test_page_of_a_running_run_is_updated_until_its_end(project: Project) -> None:
    config = project.function(WORK, params={"folder": str(project.folder)})
    training = project.start("train", config, "--ranks", "2")
    training.wait_for("at step 5")
    (run,) = project.run_directories()
    ui, url = start_ui(project)

    def news(version: str = "") -> dict[str, object]:
        found: dict[str, object] = json.loads(get(f"{url}?run={run.name}&json={version}")[2])
        return found

    first = news()
    assert first["ended"] is False
    assert "running" in str(first["body"])
    assert "Last lines of the ranks" in str(first["body"])
    assert {curve["metric"] for curve in first["curves"]} >= {"train/loss"}  # type: ignore[attr-defined]
    listed = json.loads(get(f"{url}?json=")[2])
    assert f'href="?run={run.name}"' in listed["body"]
    assert "<progress" in listed["body"]

    (project.folder / "go").touch()
    assert training.finish().rc == 0
    deadline = time.monotonic() + 60
    while not (last := news(str(first["version"])))["ended"]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert "succeeded" in str(last["body"])
    assert set(news(str(last["version"]))) == {"version", "ended"}  # nothing has changed since

    ui.popen.send_signal(signal.SIGINT)
    done = ui.finish()
    assert (done.rc, done.stderr) == (0, "")
    with pytest.raises(ConnectionError):
        get(url)
