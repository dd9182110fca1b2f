"""Run directories with known content."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddptrain.results.run import Run
from ddptrain.results.run_record import AttemptRecord, FailureRecord, RankRecord, RunRecord

TRACE = """Traceback (most recent call last):
  File "{folder}/train.py", line 12, in main
    step(i)
  File "{folder}/train.py", line 4, in step
    raise ValueError("wrong shape")
ValueError: wrong shape
"""


def run(
    folder: Path,
    status: str = "succeeded",
    exits: Sequence[int | None] = (0, 0),
    events: Sequence[Mapping[str, Any]] = (),
    logs: Mapping[int, str] = {},
    curves: Mapping[str, Sequence[float]] = {},  # by step from 0 on, of rank 0
    **record: Any,
) -> Run:
    """Write a run directory `toy-1` in the folder."""
    layout = Run(folder / "toy-1")
    layout.logs_dir.mkdir(parents=True)
    for rank, text in logs.items():
        layout.log(rank).write_text(text)
    started = {"time_s": 1.0, "event": "run_started", "attempt": 1}
    lines = [started, *({"time_s": 2.0, **event} for event in events)]
    layout.events_jsonl.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    metrics = [
        {"time_s": 1.0, "step": step, "rank": 0, "attempt": 1, name: value}
        for name, values in curves.items()
        for step, value in enumerate(values)
    ]
    layout.metrics_jsonl.write_text("".join(json.dumps(line) + "\n" for line in metrics))
    ranks = tuple(RankRecord(rank, host="node-1", exit=code) for rank, code in enumerate(exits))
    given: dict[str, Any] = {
        "name": "toy",
        "exit_code": 0 if status == "succeeded" else 1,
        "duration_s": 4.153,
        "world_size": len(exits),
        "attempts": (AttemptRecord(ranks=ranks),),
    }
    return Run(layout.root, RunRecord(run_id="toy-1", status=status, **{**given, **record}))


def failed_run(folder: Path, **given: Any) -> Run:
    """Write a run whose rank 1 failed at train.py:4; rank 0 was stopped, rank 2 is a victim."""
    (folder / "train.py").write_text("\n" * 20)
    fault = {"event": "fault", "rank": 1, "kind": "exception", "message": "ValueError: wrong shape", "victim": False}
    victim = {"event": "fault", "rank": 2, "kind": "exception", "message": "connection closed", "victim": True}
    failure = FailureRecord(1, "node-1", "exception", "ValueError", "wrong shape", TRACE.format(folder=folder))
    how: dict[str, Any] = {
        "exits": (-15, 1, 1),
        "events": (fault, victim, {"event": "rank_ended", "rank": 0, "ok": False, "stopped": True}),
        "logs": {0: "fine\n", 1: "step 1\nValueError: wrong shape\n", 2: "victim\n"},
        "failure": failure,
        "started_at": "2026-11-22T17:30:00.617Z",
    }
    return run(folder, "failed", **{**how, **given})
