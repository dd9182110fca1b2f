from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ddptrain.errors import UsageError
from ddptrain.results.export import export_tables, export_tensorboard
from ddptrain.results.run import Run
from ddptrain.results.run_record import AttemptRecord, BestRecord, RunRecord


def put(folder: Path, run_id: str, *lines: dict[str, Any], **fields: Any) -> Run:
    layout = Run(folder / run_id)
    layout.root.mkdir()
    texts = [json.dumps({"time_s": 1.5, "rank": 0, "attempt": 1, **line}) for line in lines]
    layout.metrics_jsonl.write_text("".join(f"{text}\n" for text in texts))
    return Run(layout.root, RunRecord(run_id=run_id, name="n", status="succeeded", **fields))


@pytest.fixture
def views(tmp_path: Path) -> list[Run]:
    one = put(
        tmp_path,
        "a",
        {"step": 1, "val/loss": 3.0, "step ": 1},
        {"step": 2, "val/loss": None, "epoch": 1},
        last_metrics={"val/loss": 2.5},
        best=BestRecord("val/loss", "min", 2.0, 1),
        params={"layers": 2, "deep": {"on": True}, "sizes": [1, 2], "huge": 10**30},
    )
    other = put(tmp_path, "b", {"step": 1, "rank": 1, "lr": 0.5, "name": 7}, params={"layers": 3, "text": "=1+1"})
    (other.root / "annotations.json").write_text('{"tags": ["good", "v2"], "note": "two\\nlines"}')
    return [one, other]


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_csv(views: list[Run], tmp_path: Path) -> None:
    paths = export_tables(views, tmp_path / "new" / "out")
    assert [path.name for path in paths] == ["metrics.csv", "runs.csv"]
    first, second, third = read(paths[0])
    position = {"run": "a", "name": "n", "rank": "0", "attempt": "1", "time_s": "1.5", "step": "1.0", "epoch": ""}
    assert first == position | {"lr": "", "metrics.name": "", "step ": "1.0", "val/loss": "3.0"}
    assert (second["step"], second["epoch"], second["val/loss"]) == ("2.0", "1.0", "")
    assert (third["run"], third["rank"], third["lr"], third["metrics.name"]) == ("b", "1", "0.5", "7.0")
    one, other = read(paths[1])
    assert (one["params.deep.on"], one["params.sizes"], one["last(val/loss)"], one["best(val/loss)"]) == (
        "True",
        "[1, 2]",
        "2.5",
        "2.0",
    )
    assert (other["tags"], other["note"], other["params.layers"], other["last(val/loss)"]) == (
        "good v2",
        "two\nlines",
        "3",
        "",
    )
    assert (other["best(val/loss)"], "age" in other) == ("", False)
    assert other["params.text"] == "'=1+1"  # no formula for a spreadsheet


def test_a_file_gets_the_metrics_alone(views: list[Run], tmp_path: Path) -> None:
    assert export_tables(views, tmp_path / "m.csv") == [tmp_path / "m.csv"]
    assert len(read(tmp_path / "m.csv")) == 3


def test_values_of_a_repeated_step_are_left_out(tmp_path: Path) -> None:
    attempts = (AttemptRecord(1), AttemptRecord(2, resumed_from=1))
    lines = [
        {"step": step, "attempt": number, "loss": 10.0 * number + step} for number, step in ((1, 1), (1, 2), (2, 2))
    ]
    view = put(tmp_path, "a", *lines, attempts=attempts)
    export_tables([view], tmp_path / "m.csv")
    assert [row["loss"] for row in read(tmp_path / "m.csv")] == ["11.0", "22.0"]


def test_what_cannot_be_written_is_one_line(views: list[Run], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot write .*file/metrics.csv: .*; choose another place with -o"):
        export_tables(views, tmp_path / "file")


def test_tensorboard_reads_the_files(tmp_path: Path) -> None:
    lines = [{"step": step, "rank": rank, "val/loss": step + rank / 2} for step in (1, 2) for rank in (0, 1)]
    view = put(tmp_path, "a", *lines, {"step": 3, "big": 1e300, "\ud800": 1.0}, params={"layers": 2})
    for _ in range(2):  # a second export replaces the first one
        (path,) = export_tensorboard([view], tmp_path / "tb")
    found = EventAccumulator(str(path.parent))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("val/loss")] == [(1, 1.25), (2, 2.25)]
    assert found.Scalars("big")[0].value == float("inf")
    assert b"| layers | 2 |" in found.Tensors("params/text_summary")[0].tensor_proto.string_val[0]
