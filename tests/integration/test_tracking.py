"""Trackers in real runs: what they are given, how they learn of the end, and that none of them costs a run anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conftest import Cli

SINK = '''
import json, time


class Recorder:
    """Writes down what it is given, at once; slow at its end where the options say so."""

    def __init__(self, options):
        self.options = options

    def start(self, facts):
        folder = facts.folder / "record"
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / f"attempt-{facts.attempt}-rank-{facts.rank}.jsonl").open("a", buffering=1)
        self.write(resumed=facts.resumed, world_size=facts.world_size, name=facts.name, config=dict(facts.config))
        facts.tell("has begun")
        facts.found({"url": f"http://tracker/{facts.run_id}"})

    def log(self, item):
        fields = {"kind": type(item).__name__, "step": getattr(item, "step", None)}
        if fields["kind"] == "Image":
            fields["bytes"] = item.path.stat().st_size
        self.write(**fields)

    def finish(self, state):
        time.sleep(self.options.get("slow_s", 0))
        self.write(state=state)

    def write(self, **fields):
        self.file.write(json.dumps(fields) + "\\n")


class Raiser(Recorder):
    def start(self, facts): pass
    def log(self, item): raise ConnectionResetError("the server\\nis gone")
    def finish(self, state): pass


class Hanger(Raiser):
    def log(self, item): pass
    def finish(self, state): time.sleep(3600)


class FailsAtTheEnd(Hanger):
    def finish(self, state): raise RuntimeError("could not send the rest")
'''

WORK = """
import sys, time
import numpy as np
import torch
import ddptrain


def steps(ctx, n=12, fail_at=0, pause_s=0.0):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    resumed = ctx.resume(model=model, optimizer=optimizer)
    ddp = ctx.prepare(model)
    for step in range((resumed.step if resumed else 0) + 1, n + 1):
        ddp(torch.ones(4, 2)).sum().backward()
        ctx.log({"train/loss": 1 / step, "rank": ctx.rank}, step=step)
        if step == fail_at and ctx.attempt == 1 and ctx.rank == 1:
            raise ValueError("boom")
        ctx.checkpoint(model=model, optimizer=optimizer, step=step, last=step == n)
        if step == 2:
            print("under way", flush=True)
        time.sleep(pause_s)
    ctx.log_image("examples", np.zeros((3, 4, 3), np.uint8), step=n)
    ctx.log_table("scores", ["key", "score"], [["a", 0.5]], step=n)


if __name__ == "__main__":
    ctx = ddptrain.context()
    ctx.log({"loss": 0.5}, step=1)
    sys.exit(0)
"""


def other(kind: str, timeout_s: float = 30.0, mode: str = "process", **options: Any) -> dict[str, Any]:
    return {"name": f"sink:{kind}", "finish_timeout_s": timeout_s, "mode": mode, "options": options}


@pytest.fixture
def folder(run_cli: Cli) -> Path:
    (run_cli.folder / "sink.py").write_text(SINK)
    (run_cli.folder / "work.py").write_text(WORK)
    return run_cli.folder


def write_config(folder: Path, cluster: str, tracking: Any, **settings: Any) -> Path:
    config = {
        "workload": "work:steps",
        "name": "tracked",
        "cluster": {"ranks": 2, "address": cluster},
        "tracking": tracking,
        **settings,
    }
    (folder / "c.yaml").write_text(json.dumps(config))
    return folder / "c.yaml"


def records(run: Path) -> dict[str, list[dict[str, Any]]]:
    files = sorted((run / "tracking/record").iterdir())
    return {file.stem: [json.loads(line) for line in file.read_text().splitlines()] for file in files}


def run_json(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "run.json").read_text())
    return found


@pytest.mark.slow
def test_trackers_good_and_bad_follow_a_run_that_fails_and_goes_on(
    run_cli: Cli, folder: Path, warm_cluster: str
) -> None:
    trackers = [other("Recorder"), other("Raiser"), other("Hanger", 5.0, "rank0"), other("Absent", mode="rank0")]
    config = write_config(
        folder,
        warm_cluster,
        {"tensorboard": {"mode": "process"}, "other": trackers},
        params={"fail_at": 8},
        checkpoint={"metric": None, "every_epochs": None, "every_steps": 4},
        failure={"max_restarts": 1, "grace_s": 40.0, "hang_timeout_s": 4.0},  # less than Hanger has
    )
    done = run_cli("train", config, "--run-id", "r", timeout_s=100)
    assert done.rc == 0, done.stderr
    run = folder / "runs/r"

    # Everything, over both attempts, and the truth about each end.
    seen = records(run)
    assert sorted(seen) == [f"attempt-{attempt}-rank-{rank}" for attempt in (1, 2) for rank in (0, 1)]
    for name, lines in seen.items():
        first, last = lines[0], lines[-1]
        assert first == {**first, "resumed": name.startswith("attempt-2"), "world_size": 2, "name": "tracked"}
        assert first["config"]["params"]["fail_at"] == 8
        steps = [line["step"] for line in lines if line.get("kind") == "Numbers"]
        assert steps == (list(range(1, 9)) if "attempt-1" in name else [*range(steps[0], 13)])
        if name.startswith("attempt-2"):
            assert steps[0] in (5, 9)
            assert [line.get("kind") for line in lines[-3:-1]] == ["Image", "Table"]
            assert lines[-3]["bytes"] > 50
        assert last["state"] == "finished" if "attempt-2" in name else last["state"] in ("failed", "crashed")
    assert seen["attempt-1-rank-1"][-1]["state"] == "failed"

    # The same in the run directory; and in TensorBoard each step once, though some came twice.
    artifacts = {str(path.relative_to(run / "artifacts")) for path in (run / "artifacts").rglob("*") if path.is_file()}
    assert artifacts >= {f"images/examples/step-12-rank-{rank}.png" for rank in (0, 1)}
    assert (run / "artifacts/tables/scores/step-12-rank-1.csv").read_text() == "key,score\na,0.5\n"
    for rank in (0, 1):
        board = EventAccumulator(str(run / f"tracking/tensorboard/rank-{rank}"))
        board.Reload()
        assert [event.step for event in board.Scalars("train/loss")] == list(range(1, 13))

    # One warning for each fault of each rank and attempt; nobody was taken to hang.
    warnings = [line for line in done.stderr.splitlines() if "sink:" in line and "has begun" not in line]
    assert sum("sink:Raiser has failed 3 times in a row: ConnectionResetError: the server;" in w for w in warnings) == 4
    assert sum("sink:Absent could not start: AttributeError" in line for line in warnings) == 2
    assert sum("sink:Hanger has not ended in time (finishing)" in line for line in warnings) == 2
    assert len(warnings) == 8
    record = run_json(run)
    assert record["tracking"]["sink:Recorder"]["url"] == "http://tracker/r"
    assert [attempt["outcome"] for attempt in record["attempts"]] == ["failed", "succeeded"]
