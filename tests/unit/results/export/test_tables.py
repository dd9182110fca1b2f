from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ddptrain.errors import UsageError
from ddptrain.results.export import tables
from ddptrain.results.export.tables import export_tables, metric_names, metric_rows, run_row
from ddptrain.results.layout import RunLayout
from ddptrain.results.lookup import RunView
from ddptrain.results.run_record import AttemptRecord, BestRecord, RunRecord


def put(folder: Path, run_id: str, *lines: dict[str, Any], **fields: Any) -> RunView:
    layout = RunLayout(folder / run_id)
    layout.root.mkdir()
    texts = [json.dumps({"time_s": 1.5, "rank": 0, "attempt": 1, **line}) for line in lines]
    layout.metrics_jsonl.write_text("".join(f"{text}\n" for text in texts))
    return RunView(layout, RunRecord(run_id=run_id, name="n", status="succeeded", **fields))


@pytest.fixture
def views(tmp_path: Path) -> list[RunView]:
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
    (other.layout.root / "annotations.json").write_text('{"tags": ["good", "v2"], "note": "two\\nlines"}')
    return [one, other]


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_csv(views: list[RunView], tmp_path: Path) -> None:
    paths = export_tables(views, "csv", tmp_path / "new" / "out")
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
    assert other["params.text"] == "'=1+1"  # no formula for a spreadsheet


def test_parquet_has_types(views: list[RunView], tmp_path: Path) -> None:
    metrics, runs = (pq.read_table(path) for path in export_tables(views, "parquet", tmp_path / "out"))
    assert metrics.column("val/loss").to_pylist() == [3.0, None, None]
    assert [metrics.schema.field(name).type for name in ("run", "rank", "step")] == [
        pa.string(),
        pa.int64(),
        pa.float64(),
    ]
    names = ("params.layers", "params.deep.on", "params.sizes", "params.huge", "last(val/loss)", "params.text")
    kinds = [pa.int64(), pa.bool_(), pa.string(), pa.string(), pa.float64(), pa.string()]
    assert [runs.schema.field(name).type for name in names] == kinds
    assert runs.column("params.huge").to_pylist() == [f"1{'0' * 30}", None]
    assert runs.column("params.text").to_pylist() == [None, "=1+1"]


def test_a_file_gets_the_metrics_alone(views: list[RunView], tmp_path: Path) -> None:
    assert export_tables(views, "csv", tmp_path / "m.csv") == [tmp_path / "m.csv"]
    assert len(read(tmp_path / "m.csv")) == 3
    with pytest.raises(UsageError, match=r"give a name that ends in \.parquet, or a folder"):
        export_tables(views, "parquet", tmp_path / "m.csv")


def test_values_of_a_repeated_step_are_left_out(tmp_path: Path) -> None:
    attempts = (AttemptRecord(1), AttemptRecord(2, resumed_from=1))
    lines = [
        {"step": step, "attempt": number, "loss": 10.0 * number + step} for number, step in ((1, 1), (1, 2), (2, 2))
    ]
    view = put(tmp_path, "a", *lines, attempts=attempts)
    export_tables([view], "csv", tmp_path / "m.csv")
    assert [row["loss"] for row in read(tmp_path / "m.csv")] == ["11.0", "22.0"]


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_run_without_metrics_and_one_of_anyone(form: str, tmp_path: Path) -> None:
    empty = RunView(RunLayout(tmp_path / "none"), RunRecord(run_id="none"))
    odd = put(tmp_path, "odd", {"step": 1e300, "\ud800=x": 1e308, "=cmd()": 1}, params={"\udfff": "\ud800"})
    assert len(export_tables([empty, odd], form, tmp_path / "out")) == 2


def test_what_cannot_be_written_is_one_line(
    views: list[RunView], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot write .*file/metrics.csv: .*; choose another place with -o"):
        export_tables(views, "csv", tmp_path / "file")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UsageError, match=r"pip install 'pyarrow>=16'"):
        export_tables(views, "parquet", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_row_for_a_run(views: list[RunView]) -> None:
    row = run_row(views[1])
    assert (row["run"], row["status"], row["tags"], row["params.layers"]) == ("b", "succeeded", "good v2", 3)
    assert "age" not in row


def test_columns_and_rows_of_the_metrics(views: list[RunView]) -> None:
    names = metric_names(views)
    assert names == {"lr": "lr", "name": "metrics.name", "step ": "step ", "val/loss": "val/loss"}
    first, second = metric_rows(views[0], names)
    position = {"run": "a", "name": "n", "rank": 0, "attempt": 1, "time_s": 1.5, "epoch": None}
    assert first == {**position, "step": 1.0, "val/loss": 3.0, "step ": 1.0}
    assert second == {**position, "epoch": 1.0, "step": 2.0, "val/loss": None}
    assert metric_rows(views[1], {"name": "metrics.name"})[0]["metrics.name"] == 7.0
    assert "lr" not in metric_rows(views[1], {"name": "metrics.name"})[0]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([True, None, False], pa.bool_()),
        ([True, 1], pa.string()),
        ([None, None], pa.string()),
        ([1, 2, None], pa.int64()),
        ([1, 2.5], pa.float64()),
        ([2.0], pa.float64()),
        ([(1 << 63) - 1], pa.int64()),
        ([1 << 63], pa.string()),
        ([-(1 << 63)], pa.string()),
        ([1e300, 1], pa.float64()),
        (["a", 1], pa.string()),
    ],
)
def test_a_column_has_the_type_of_its_values(values: list[Any], kind: Any) -> None:
    assert tables._arrow_type(values) == kind


@pytest.mark.parametrize(
    ("value", "kind", "converted"),
    [
        (None, pa.string(), None),
        (None, pa.float64(), None),
        (1, pa.float64(), 1.0),
        (1, pa.int64(), 1),
        (1.5, pa.string(), "1.5"),
        ([1, "a"], pa.string(), '[1, "a"]'),
        ("\ud800", pa.string(), "\\ud800"),
        (True, pa.bool_(), True),
    ],
)
def test_a_value_is_converted_to_the_type_of_its_column(value: Any, kind: Any, converted: Any) -> None:
    found = tables._converted(value, kind)
    assert found == converted and type(found) is type(converted)


@pytest.mark.parametrize("text", ["=1", "+1", "-1", "@a", "\ta", "\ra"])
def test_a_cell_that_a_spreadsheet_would_execute_is_quoted(text: str) -> None:
    assert tables._csv_cell(text) == f"'{text}"
    assert [tables._csv_cell(value) for value in ("1=", -1, 2.0, None, [1])] == ["1=", -1, 2.0, None, "[1]"]


def test_the_ending_of_a_file_is_read_in_any_case(views: list[RunView], tmp_path: Path) -> None:
    assert export_tables(views[:1], "csv", tmp_path / "M.CSV") == [tmp_path / "M.CSV"]
    with pytest.raises(
        UsageError, match=r"^cannot write csv into .*m\.parquet: give a name that ends in \.csv, or a folder$"
    ):
        export_tables(views, "csv", tmp_path / "m.parquet")


def test_best_values_are_in_the_row_of_a_run(views: list[RunView]) -> None:
    row = run_row(views[0])
    assert (row["last(val/loss)"], row["best(val/loss)"], row["params.deep.on"], row["tags"]) == (2.5, 2.0, True, "")
    assert not any(name.startswith("best") for name in run_row(views[1]))
