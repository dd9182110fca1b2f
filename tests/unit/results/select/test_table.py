from __future__ import annotations

import dataclasses
import json
import math
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from ddptrain.errors import UsageError
from ddptrain.results.layout import RunLayout
from ddptrain.results.lookup import RunView, load_run
from ddptrain.results.run_record import AttemptRecord, BestRecord, FailureRecord, GitRecord, RunRecord
from ddptrain.results.select.expression import Field
from ddptrain.results.select.fields import FIELDS, RunFields, best_value
from ddptrain.results.select.table import Selection, cells, header, value_text


def put(folder: Path, run_id: str, **fields: Any) -> RunView:
    root = folder / run_id
    root.mkdir()
    record = RunRecord(run_id=run_id, name="n", status="succeeded", exit_code=0, started_at="2025-01-01T00:00:00Z")
    (root / "run.json").write_text(dataclasses.replace(record, **fields).to_json())
    return load_run(root)


def metrics(view: RunView, *values: tuple[int, int, float], name: str = "val/accuracy") -> None:
    lines = [json.dumps({"time_s": 1, "step": step, "rank": rank, name: value}) for step, rank, value in values]
    view.layout.metrics_jsonl.write_text("\n".join(lines) + "\n")


def value(view: RunView, name: str, kind: str = "") -> Any:
    return RunFields(view)(Field(name, kind))


def test_fields_of_a_run(tmp_path: Path) -> None:
    failure = FailureRecord(0, "h", "exception", "ValueError", "bad")
    params = {"layers": 2, "opt": {"lr": 0.1}, "a.b": 3}
    view = put(
        tmp_path, "r-1", last_metrics={"val/loss": 2.5, "status": 1.0}, params=params, failure=failure, world_size=4
    )
    (view.layout.root / "annotations.json").write_text('{"tags": ["good"], "note": "why"}')
    found = {
        name: value(view, name) for name in ("run", "name", "status", "exit_code", "ranks", "tags", "note", "failure")
    }
    assert found == {
        "run": "r-1",
        "name": "n",
        "status": "succeeded",
        "exit_code": 0,
        "ranks": 4,
        "tags": ["good"],
        "note": "why",
        "failure": "ValueError: bad",
    }
    assert [value(view, f"params.{name}") for name in ("layers", "opt.lr", "a.b", "opt.x", "layers.x")] == [
        2,
        0.1,
        3,
        None,
        None,
    ]
    assert (value(view, "val/loss"), value(view, "status", "last"), value(view, "nothing")) == (2.5, 1.0, None)


def test_parameters_of_older_runs_come_from_their_configuration(tmp_path: Path) -> None:
    view = put(tmp_path, "old")
    assert view.record.params is None and value(view, "params.layers") is None
    view.layout.config_yaml.write_text("params: {layers: 3}\n")
    assert value(view, "params.layers") == 3
    view.layout.config_yaml.write_text("{ damaged")
    assert value(view, "params.layers") is None


def test_the_best_value_is_of_the_best_checkpoint_or_of_the_mean_over_ranks(tmp_path: Path) -> None:
    view = put(tmp_path, "r", best=BestRecord("val/loss", "min", 1.25, 3))
    metrics(view, (1, 0, 0.4), (1, 1, 0.6), (2, 0, 0.9), (2, 1, 0.0))
    assert value(view, "val/loss", "best") == 1.25
    assert value(view, "val/accuracy", "best") == 0.5  # of 0.5 and 0.45
    assert value(view, "unknown", "best") is None
    metrics(view, (1, 0, 0.4), (2, 0, 0.3), name="train/loss")
    assert value(view, "train/loss", "best") == 0.3


def test_runs_are_selected_and_sorted(tmp_path: Path) -> None:
    views = [
        put(tmp_path, run_id, last_metrics={} if loss is None else {"val/loss": loss}, params={"layers": layers})
        for run_id, loss, layers in (("a", 3.0, 1), ("b", None, 1), ("c", 1.0, 2), ("d", 2.0, 1))
    ]

    def names(where: str | None, sort: str | None) -> str:
        return "".join(run.view.run_id for run in Selection.parse(where, sort, None).apply(views))

    assert names("val/loss<2.3 and params.layers==1", None) == "d"
    assert names(None, "val/loss") == "cdab"
    assert names(None, "-val/loss") == "adcb"  # without a value: last in both directions
    assert names(None, "-params.layers, val/loss") == "cdab"
    assert names("params.layers == 1", "-run") == "dba"


def test_columns_and_their_titles(tmp_path: Path) -> None:
    view = put(tmp_path, "r", duration_s=75.0, last_metrics={"val/loss": 1.234567}, params={"lr": 1e-4, "on": True})
    fields = Selection.parse(None, None, "run,duration,started,val/loss,params.lr,params.on,tags,note").columns or []
    assert header(fields) == ["RUN", "DURATION", "STARTED", "val/loss", "params.lr", "params.on", "TAGS", "NOTE"]
    row = ["r", "1m 15s", "2025-01-01 00:00:00", "1.2346", "0.0001", "true", "-", "-"]
    assert cells(RunFields(view), fields) == row


def test_a_field_that_no_run_has_is_reported(tmp_path: Path) -> None:
    view = put(tmp_path, "r", last_metrics={"val/loss": 1.0})
    (message,) = Selection.parse("vall/loss < 3", None, None).unknown_fields([view])
    assert message == 'no run has vall/loss: did you mean val/loss?; text is written in quotes, as "vall/loss"'
    assert Selection.parse("val/loss < 3 and exit_code > 7", None, None).unknown_fields([view]) == []
    assert Selection.parse("x", None, None).unknown_fields([]) == []


@pytest.mark.parametrize(("option", "index"), [("--where", 0), ("--sort", 1), ("--columns", 2)])
def test_the_option_with_the_mistake_is_named(option: str, index: int) -> None:
    options = [None, None, None, None]
    options[index] = "1 <"  # type: ignore[call-overload]
    with pytest.raises(UsageError, match=f"^{option}: cannot read"):
        Selection.parse(*options[:3])


@pytest.mark.parametrize(
    ("given", "text"),
    [(None, "-"), ([], "-"), (0, "0"), (False, "false"), (["a", "b"], "a b"), ([1, 2], "[1, 2]"), ("a\nb", "a b")],
)
def test_values_as_text(given: Any, text: str) -> None:
    assert value_text(given) == text


def test_text_of_others_is_harmless(tmp_path: Path) -> None:
    view = RunView(RunLayout(tmp_path), RunRecord(run_id="r", name="\x1b[31mred\n"))
    assert cells(RunFields(view), [Field("name")]) == ["\\u001b[31mred "]


def test_age_of_a_run_is_the_time_since_its_start(tmp_path: Path) -> None:
    start = (datetime.now(UTC) - timedelta(hours=2)).isoformat()
    assert value(put(tmp_path, "known", started_at=start), "age") == pytest.approx(7200.0, abs=60.0)
    assert value(put(tmp_path, "unknown", started_at=""), "age") is None


def test_every_field_of_a_run(tmp_path: Path) -> None:
    record = RunRecord(run_id="r", name="n", workload="w", status="running", waiting=True, duration_s=5.0, world_size=2)
    times = {"started_at": "2025-01-01T00:00:00Z", "ended_at": "2025-01-02T00:00:00Z"}
    more = {"git": GitRecord("abc"), "attempts": (AttemptRecord(1), AttemptRecord(2)), "exit_code": 3, **times}
    view = RunView(RunLayout(tmp_path), dataclasses.replace(record, failure=FailureRecord(message="no"), **more))  # type: ignore[arg-type]
    assert {name: RunFields(view)(Field(name)) for name in FIELDS if name != "age"} == {
        "run": "r",
        "name": "n",
        "workload": "w",
        "status": "waiting",
        "started": "2025-01-01T00:00:00Z",
        "ended": "2025-01-02T00:00:00Z",
        "duration": 5.0,
        "ranks": 2,
        "attempts": 2,
        "exit_code": 3,
        "failure": "no",
        "commit": "abc",
        "tags": [],
        "note": None,
    }
    empty = RunFields(RunView(RunLayout(tmp_path), RunRecord(run_id="r")))
    assert [empty(Field(name)) for name in ("started", "ranks", "failure", "commit")] == [None] * 4


def test_values_are_looked_up_once(tmp_path: Path) -> None:
    fields = RunFields(put(tmp_path, "r", params={"a": 1}))
    assert fields(Field("params.a")) == 1
    fields.view.record.params["a"] = 2  # type: ignore[index]
    assert fields(Field("params.a")) == 1 and RunFields(fields.view)(Field("params.a")) == 2


@pytest.mark.parametrize(
    ("best", "metric", "found"),
    [
        (BestRecord("m", "max", 3.0, 1), "m", 3.0),
        (BestRecord("m", "max", math.nan, 1), "m", None),
        (BestRecord("m", "max", 3.0, 1), "val/loss", 1.5),
        (None, "val/acc", 4.0),
        (None, "m", None),
    ],
)
def test_best_value_by_checkpoint_or_by_the_name_of_the_metric(
    tmp_path: Path, best: BestRecord | None, metric: str, found: float | None
) -> None:
    view = put(tmp_path, "r", best=best)
    lines: list[dict[str, Any]] = [{"rank": rank, "val/loss": 1.0 + rank, "val/acc": 4.0, "m": 1} for rank in (0, 1)]
    lines.append({"rank": 0, "val/loss": 9.0, "val/acc": None, "m": 1})
    view.layout.metrics_jsonl.write_text("".join(f"{json.dumps({'time_s': 1, **line})}\n" for line in lines))
    assert best_value(view, metric) == found
    assert best_value(view, "m", goal="min") == (1.0 if best is None or best.metric != "m" else best_value(view, "m"))


def test_best_value_of_a_run_whose_metrics_cannot_be_read_is_not_known(tmp_path: Path) -> None:
    view = put(tmp_path, "r")
    view.layout.metrics_jsonl.mkdir()
    assert best_value(view, "val/loss") is None


def test_values_of_several_types_are_sorted_numbers_first(tmp_path: Path) -> None:
    values = {"a": "text", "b": 2, "c": math.nan, "d": True, "e": [3], "f": "Text"}
    views = [put(tmp_path, run_id, params={"x": found}) for run_id, found in values.items()]
    assert "".join(run.view.run_id for run in Selection.parse(None, "params.x", None).apply(views)) == "dbfeac"
    assert "".join(run.view.run_id for run in Selection.parse(None, "-params.x", None).apply(views)) == "aefbdc"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("", "-"),
        (True, "true"),
        (1.234567, "1.2346"),
        ("x" * 60, "x" * 60),
        ("x" * 61, "x" * 57 + "..."),
        (["a" * 30, "b" * 30], "a" * 30 + " " + "b" * 26 + "..."),
        ({"a": 1}, '{"a": 1}'),
        (("a", "b"), "a b"),
    ],
)
def test_cells_have_at_most_60_characters(given: Any, text: str) -> None:
    assert value_text(given) == text


def test_selection_tells_what_it_needs() -> None:
    selection = Selection.parse("best(a) < 1 and run == 'x'", "-val/loss", "name,last(name),val/loss")
    assert selection.fields == [
        Field("a", "best"),
        Field("run"),
        Field("val/loss"),
        Field("name"),
        Field("name", "last"),
    ]
    assert selection.extra_columns == [Field("a", "best"), Field("val/loss"), Field("name", "last")]
    assert selection.needs_metrics and not Selection.parse("a < 1", None, "run").needs_metrics
    assert header(selection.columns or []) == ["NAME", "last(name)", "val/loss"]


def test_time_that_is_not_known_has_a_dash(tmp_path: Path) -> None:
    fields = Selection.parse(None, None, "started,ended,age,duration").columns or []
    assert cells(RunFields(put(tmp_path, "r", started_at="")), fields) == ["-", "-", "-", "-"]


def test_unknown_field_is_compared_with_at_most_30_known_ones(tmp_path: Path) -> None:
    def message(metrics: int) -> str:
        folder = tmp_path / str(metrics)
        folder.mkdir()
        view = put(folder, "r", last_metrics={f"m{number}": 1.0 for number in range(metrics)})
        (found,) = Selection.parse("last(statis) > 1", None, None).unknown_fields([view])
        return found

    assert len(FIELDS) == 15
    assert message(15) == "no run has last(statis): did you mean status?"
    assert message(16) == "no run has last(statis)"
