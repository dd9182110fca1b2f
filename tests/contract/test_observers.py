"""Who is told of a run as it goes: observers of installed packages, and users, by alerts and at its end."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.conftest import Project, events
from tests.servers.notify_servers import WebServer, serving

FAILS = """
    def train(ctx, fails):
        if ctx.rank == 1:
            ctx.alert("the loss has doubled\\nsecond line")
        ctx.mean(1.0)
        if fails and ctx.rank == 1:
            raise ValueError("bad batch")
"""


@pytest.fixture
def web() -> Iterator[WebServer]:
    with serving(server := WebServer()):
        yield server


def installed(project: Project, code: str) -> dict[str, str]:
    """Install a package with an observer; returns the environment in which it is found."""
    project.write("site/jsonl_observer.py", code)
    project.write(
        "site/jsonl_observer-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: jsonl-observer\nVersion: 1\n"
    )
    project.write(
        "site/jsonl_observer-1.dist-info/entry_points.txt", "[ddptrain.observers]\njsonl = jsonl_observer:Jsonl\n"
    )
    return {"PYTHONPATH": str(project.folder / "site")}


def test_observer_of_an_installed_package_takes_events_and_the_end(project: Project, shared_cluster: str) -> None:
    code = """
        import json

        class Jsonl:
            def __init__(self):
                self.file = open("seen.jsonl", "w")

            def on_event(self, event):
                print(json.dumps(event), file=self.file, flush=True)

            def on_end(self, run):
                end = {"status": run.record.status, "cause": run.record.failure.cause, "root": str(run.root)}
                print(json.dumps(end), file=self.file, flush=True)
    """
    config = project.function(FAILS, params={"fails": True})
    done = project("train", config, "--cluster", shared_cluster, "--ranks", "2", rc=1, env=installed(project, code))
    *seen, end = [json.loads(line) for line in (project.folder / "seen.jsonl").read_text().splitlines()]
    (folder,) = project.run_directories()
    assert (end["status"], Path(end["root"])) == ("failed", folder)
    assert f"failed: {end['cause']}; log: " in done.stderr
    kinds = [event["event"] for event in seen]
    assert {"run_started", "rank_started", "entered", "alert", "failure", "rank_ended"} <= set(kinds)
    recorded = [json.loads(line)["event"] for line in (folder / "events.jsonl").read_text().splitlines()]
    assert kinds == [kind for kind in recorded if kind in kinds and kind != "run_finished"]


def test_observer_that_fails_has_one_warning_and_the_run_goes_on(project: Project, shared_cluster: str) -> None:
    code = """
        class Jsonl:
            def on_event(self, event):
                raise OSError("no disk")
    """
    config = project.function(FAILS, params={"fails": False})
    done = project("train", config, "--cluster", shared_cluster, "--ranks", "2", rc=0, env=installed(project, code))
    assert done.stderr.count("the observer jsonl (ddptrain.observers) has failed: OSError: no disk") == 1


def test_alert_is_shown_recorded_and_sent_and_so_is_the_root_cause(
    project: Project, shared_cluster: str, web: WebServer
) -> None:
    config = project.function(FAILS, params={"fails": True}, notify={"urls": ["env:HOOK"]})
    env = {"HOOK": f"json://{web.address}/"}
    done = project("train", config, "--cluster", shared_cluster, "--ranks", "2", "--output", "json", rc=1, env=env)
    (alert,) = (event for event in events(done.stdout) if event["event"] == "alert")
    assert (alert["rank"], alert["message"]) == (1, "the loss has doubled")
    sent = [json.loads(request.body) for request in web.requests]
    assert [message["title"].split(":")[:2] for message in sent] == [["work", " 1 alert"], ["work", " run failed"]]
    assert "rank 1" in sent[0]["message"] and "the loss has doubled" in sent[0]["message"]
    assert project.record()["failure"]["cause"] in sent[1]["message"]
    done = project("train", config, "--cluster", shared_cluster, "--ranks", "2", "--set", "params.fails=false", rc=0)
    assert "ddptrain: rank 1: the loss has doubled" in done.stderr
    assert "notify.urls: the environment variable HOOK is not set" in done.stderr


SCRIPT = """
    import os, signal, sys, time
    from pathlib import Path
    import torch.distributed as dist

    rank = os.environ["RANK"]
    dist.init_process_group("gloo")
    if len(sys.argv) < 2:
        signal.signal(signal.SIGUSR1, lambda number, frame: Path(f"got-{rank}").write_text(str(number)))
    dist.barrier()
    Path(f"ready-{rank}").touch()
    while not Path(f"got-{rank}").exists():
        time.sleep(0.02)
    dist.barrier()
"""


def test_handler_of_sigusr1_runs_in_all_ranks(project: Project, shared_cluster: str) -> None:
    project.write("wait.py", SCRIPT)
    running = project.start("run", "--cluster", shared_cluster, "--nproc-per-node", "2", "wait.py")
    running.wait_for("training")
    running.popen.send_signal(signal.SIGUSR1)
    done = running.finish()
    assert done.rc == 0, done.stderr
    assert (project.folder / "got-0").read_text() == (project.folder / "got-1").read_text() == str(int(signal.SIGUSR1))
    assert "the driver was sent SIGUSR1: the ranks get it, too" in done.stderr


def test_sigusr1_without_a_handler_ends_nothing(project: Project, shared_cluster: str) -> None:
    project.write("wait.py", SCRIPT)
    running = project.start("run", "--cluster", shared_cluster, "--nproc-per-node", "2", "wait.py", "none")
    running.wait_for("training")
    running.popen.send_signal(signal.SIGUSR1)
    running.wait_for("SIGUSR1 has no effect: the code has set no handler for it")
    for rank in (0, 1):
        (project.folder / f"got-{rank}").touch()
    assert running.finish().rc == 0
