"""`ddptrain ui`: who gets an answer, what a page says while a run is running, and how the server ends."""

from __future__ import annotations

import csv
import http.client
import json
import re
import signal
import time
from collections.abc import Mapping
from http import HTTPStatus
from urllib.parse import urlsplit

import pytest

from tests.contract.conftest import Project
from tests.servers.seaweed import seaweed
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
            time.sleep(0.1)
"""
RUN = "toy-20260101-000000-0001"


def start_ui(project: Project, *options: str, env: Mapping[str, str] | None = None) -> tuple[Running, str]:
    """Start the server; return it with its address."""
    ui = project.start("ui", "--no-browser", *options, env=env)
    ui.wait_for("(Ctrl-C ends this)")
    found = re.search(r"http://127\.0\.0\.1:\d+/[\w-]{20,}/", ui.stdout)
    assert found, ui.stdout
    return ui, found[0]


def get(url: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    """Ask for an address: status, headers and body of the answer."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection("127.0.0.1", parts.port, timeout=100)
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
    trial = project.folder / "runs" / "tune" / "tune-0003"
    trial.mkdir(parents=True)
    (trial / "run.json").write_text(json.dumps({"run_id": "tune-0003", "status": "failed"}))
    about = {"format": 1, "sweep_id": "tune", "name": "tune", "source": "", "started_at": "", "status": "succeeded"}
    trials = [{"number": 3, "params": {"lr": 0.1}, "state": "failed", "run_ids": ["tune-0003"]}]
    (trial.parent / "run.json").write_text(json.dumps({"run_id": "tune", "kind": "sweep", "status": "succeeded"}))
    (trial.parent / "sweep.json").write_text(json.dumps({**about, "space": {"lr": {"kind": "log"}}, "trials": trials}))


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

    assert 'href="?run=tune/3"' in get(f"{url}?sweep=tune")[2]
    assert "Run tune-0003" in get(f"{url}?run=tune/3")[2]

    before = {path: path.stat().st_mtime_ns for path in (project.folder / "runs").rglob("*")}
    assert get(f"{url}?compare={RUN}&compare={RUN}")[0] == get(f"{url}?models")[0] == HTTPStatus.OK
    assert {path: path.stat().st_mtime_ns for path in (project.folder / "runs").rglob("*")} == before
    second = project("ui", "--no-browser", "--port", str(port), rc=2)
    assert f"--port {port}: Address already in use" in second.stderr
    ui.popen.send_signal(signal.SIGTERM)
    assert ui.finish().rc == 128 + signal.SIGTERM


def test_page_of_a_running_run_is_updated_until_its_end(project: Project) -> None:
    config = project.function(WORK, params={"folder": str(project.folder)})
    training = project.start("train", config, "--ranks", "1")
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
    deadline = time.monotonic() + 100
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


@pytest.mark.long  # the other tests read a folder with the same code
def test_runs_of_an_object_store_are_shown(project: Project) -> None:
    (project.folder / "seaweed").mkdir()
    with seaweed(project.folder / "seaweed", "bucket") as environment:
        config = project.function(WORK, params={"folder": str(project.folder)}, results={"dir": "s3://bucket/runs"})
        (project.folder / "go").touch()
        project("train", config, "--run-id", RUN, env=environment, rc=0)
        ui, url = start_ui(project, "--runs-dir", "s3://bucket/runs", env=environment)
        assert f'href="?run={RUN}"' in get(url)[2]
        page = get(f"{url}?run={RUN}")[2]
        assert "s3://bucket/runs" in page
        assert "at step 1" in page
        ui.kill_group()


def test_gallery_begins_with_the_mistakes_of_the_last_validation(project: Project) -> None:
    """They are in the page of the server and in the file of a report, each with its label and its prediction."""
    small = {"architecture": "small_cnn", "image_size": 16, "epochs": 1, "base_lr": 1e-9, "loader_workers": 0}
    project.write("images.yaml", json.dumps({"workload": "images", "cluster": {"ranks": 2}, "params": small}))
    project("train", "images.yaml", rc=0)
    (run,) = project.run_directories()
    rows = (run / "artifacts" / "tables" / "val_mistakes").glob("*.csv")
    (table,) = (list(csv.DictReader(path.read_text().splitlines())) for path in rows)
    scores = [float(row["score"]) for row in table]
    assert len(table) == 24
    assert scores == sorted(scores, reverse=True)
    assert all(row["label"] != row["prediction"] for row in table)

    project("results", "report", run.name, "--output", "report.html", rc=0)
    _, url = start_ui(project)
    for page in ((project.folder / "report.html").read_text(), get(f"{url}?run={run.name}")[2]):
        first, *others = re.findall(r'Predictions <span class="soft">([^<]*)</span>', page)
        assert first.startswith("tables/val_mistakes/")
        assert others
        gallery = page[page.index(first) : page.index(others[0])]
        assert gallery.count("<img") == gallery.count("wrong: label ") == len(table)
        assert f"label {table[0]['label']}, prediction {table[0]['prediction']}" in gallery
