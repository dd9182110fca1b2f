"""What a launch does first: inputs before slots, the lock before the first write; and what it leaves in the record."""

from __future__ import annotations

import json
from pathlib import Path

from tests.contract.conftest import Project, lines

WAITS = """
    import time
    from pathlib import Path


    def train(ctx, folder="."):
        if ctx.rank == 0:
            print("at work", flush=True)
        while not (Path(folder) / "go").exists():
            time.sleep(0.05)
"""
FAILS_ONCE = """
    from pathlib import Path

    import torch


    def train(ctx, folder="."):
        model = torch.nn.Linear(1, 1)
        resumed = ctx.resume(model=model)
        for step in range(resumed.step + 1 if resumed else 1, 4):
            ctx.log({"loss": 1.0 / step}, step=step)
            ctx.checkpoint(model=model, step=step, metrics={"loss": 1.0 / step})
        ctx.save_file("notes/a.txt", b"text")
        if resumed is None and ctx.rank == 1:
            raise ValueError("no luck, token=abcdef123456")
"""


def test_missing_data_is_named_before_slots_are_asked_for(project: Project, shared_cluster: str) -> None:
    config = project.write("images.yaml", "workload: images\nparams: {source: missing-folder}\n")
    refused = project("train", config, "--cluster", shared_cluster, "--ranks", "99", rc=2)
    assert "missing-folder" in refused.stderr and "slots" not in refused.stderr


def test_run_that_another_driver_holds_is_not_changed(project: Project, shared_cluster: str) -> None:
    config = project.function(WAITS, params={"folder": str(project.folder)})
    command = "train", config, "--cluster", shared_cluster, "--ranks", "1", "--run-id", "mine"
    first = project.start(*command)
    first.wait_for("at work")
    folder = project.folder / "runs" / "mine"
    before = json.loads((folder / "run.json").read_text())
    written = (folder / "events.jsonl").read_bytes(), (folder / "config.yaml").read_bytes()
    refused = project(*command, rc=6)
    assert "run mine is running" in refused.stderr
    after = json.loads((folder / "run.json").read_text())
    assert [after[name] for name in ("driver", "status", "started_at")] == [
        before[name] for name in ("driver", "status", "started_at")
    ]
    assert (folder / "events.jsonl").read_bytes().startswith(written[0])
    assert (folder / "config.yaml").read_bytes() == written[1]
    (project.folder / "go").touch()
    assert first.finish().rc == 0
    project(*command, rc=2)  # a run that has succeeded is not written over


def test_run_that_waits_for_slots_is_stopped_from_another_shell(project: Project, shared_cluster: str) -> None:
    config = project.function(WAITS, params={"folder": str(project.folder)}, cluster={"wait_s": 600})
    all_slots = "train", config, "--cluster", shared_cluster, "--ranks", "4", "--run-id"
    first = project.start(*all_slots, "first")
    first.wait_for("at work")
    second = project.start(*all_slots, "second")
    second.wait_for("waiting for 4 slots")
    project("stop", "second", rc=0)
    assert second.finish().rc == 143
    record = project.record("second")
    assert (record["status"], record["failure"]["message"]) == ("cancelled", "ended by ddptrain stop")
    project("stop", "first", "--now", rc=0)
    assert first.finish().rc == 130


def test_events_of_a_restarted_run_say_what_happened_in_order(project: Project, shared_cluster: str) -> None:
    config = project.function(FAILS_ONCE, failure={"max_restarts": 1}, checkpoint={"every_steps": 1})
    project("train", config, "--cluster", shared_cluster, "--ranks", "2", "--run-id", "r", rc=0)
    folder = project.folder / "runs" / "r"
    events = lines(folder / "events.jsonl")
    kinds = [event["event"] for event in events]
    first, second = (at for at, kind in enumerate(kinds) if kind == "run_started")
    assert events[first]["resumed_from"] is None and events[second]["resumed_from"] in (1, 2, 3)
    for kind in (
        "rank_started",
        "entered",
        "checkpoint_staged",
        "checkpoint_saved",
        "artifact_saved",
        "failure",
        "fault",
    ):
        assert kind in kinds[first:second], kind
    (failure,) = [event for event in events if event["event"] == "failure"]
    assert (failure["rank"], failure["type"], failure["exit_code"]) == (1, "ValueError", None)
    (fault, *_) = [event for event in events if event["event"] == "fault"]
    assert (fault["rank"], fault["kind"], fault["victim"]) == (1, "exception", False)
    ended = [event for event in events[:second] if event["event"] == "rank_ended"]
    assert sorted((event["rank"], event["ok"]) for event in ended) == [(0, True), (1, False)] or len(ended) == 2
    assert [event["ok"] for event in events[second:] if event["event"] == "rank_ended"] == [True, True]
    assert kinds[-1] == "run_finished" and events[-1]["exit_code"] == 0
    record = project.record("r")
    assert [attempt["outcome"] for attempt in record["attempts"]] == ["failed", "succeeded"]
    assert record["attempts"][0]["failure"]["rank"] == 1
    assert {rank["rank"] for rank in record["attempts"][0]["ranks"]} == {0, 1}
    assert "abcdef123456" not in (folder / "logs" / "ddptrain.log").read_text()
    numbers = lines(folder / "metrics.jsonl")
    assert {(each["rank"], each["step"]) for each in numbers} == {(r, s) for r in (0, 1) for s in (1, 2, 3)}
    assert Path(folder / "artifacts" / "notes" / "a.txt").read_bytes() == b"text"
