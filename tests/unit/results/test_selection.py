from __future__ import annotations

import dataclasses
import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddptrain.errors import UsageError
from ddptrain.results.run import Run
from ddptrain.results.run_record import BestRecord, FailureRecord, RunRecord
from ddptrain.results.selection import (
    RunFields,
    Selection,
    cells,
    header,
    parse_expression,
    parse_fields,
)

VALUES: dict[str, Any] = {
    "val/loss": 2.0,
    "best(val/loss)": 1.5,
    "nan": math.nan,
    "params.layers": 1,
    "params.unique": True,
    "params.sizes": [1, 2],
    "status": "failed",
    "started": "2026-01-02T00:00:00Z",
    "duration": 7200,
    "tags": ["good", "v2"],
    "zero": 0,
    "params.lambda": 3,
    "params.if/class": 2,
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("val/loss<2.3 and params.layers==1", True),
        ("val/loss < 2.3 and params.layers == 2", False),
        ("val/loss > 3 or params.layers == 1", True),
        ("val/loss > 3 or params.layers == 1 and status == 'x'", False),  # and binds closer than or
        ("(val/loss < 3 or params.layers == 7) and status == 'failed'", True),
        ("not val/loss > 3", True),
        ("not not val/loss > 3", False),
        ("not status == 'failed' or true", True),  # not binds closer than or
        ("1 < val/loss <= 2", True),
        ("2 < val/loss <= 3", False),
        ("val/loss >= 2e0", True),
        ("val/loss == 2", True),
        ("val/loss != 2", False),
        ("val/loss > -1.5", True),
        ("best(val/loss) < 1.6 and last(val/loss) == 2", True),
        ("best('val/loss') == 1.5", True),
        ("'good' in tags", True),
        ("'bad' in tags", False),
        ("'bad' not in tags", True),
        ("status in ['failed', \"preempted\"]", True),
        ("status not in ['failed']", False),
        ("'ail' in status", True),
        ("params.layers in [1, 2,]", True),
        ("params.layers in []", False),
        ("params.sizes == [1, 2]", True),
        ("params.unique == true", True),
        ("params.unique == 1", False),  # Python's true is 1
        ("params.layers == true", False),
        ("duration > 1h and duration < 121m and duration <= 7200s and duration < 1d", True),
        ("started > '2026-01-01'", True),
        ("missing < 1", False),
        ("missing != 1", False),
        ("missing == missing", False),
        ("'a' not in missing", False),
        ("not missing < 1", True),
        ("nan < 1 or nan >= 1 or nan != nan", False),
        ("status < 3", False),
        ("status != 3", True),
        ("tags", True),
        ("zero or missing or nan", False),
        ("params.lambda == 3 and params.if/class > 1", True),  # words of Python
        ("status == failed and status != best", True),
        ("status in [failed, preempted]", True),
        ("name == status", False),
    ],
)
def test_conditions(text: str, expected: bool) -> None:
    assert (
        parse_expression(text).matches(lambda field: VALUES.get(str(field).replace("last(val/loss)", "val/loss")))
        is expected
    )


@given(st.text(alphabet="ab1.<>=!()[], '\"notrdi/&|-\\\n", max_size=60))
def test_any_text_is_an_expression_or_a_usage_error(text: str) -> None:
    with suppress(UsageError):
        assert parse_expression(text).matches(lambda field: 1.0) in (True, False)


def test_fields_are_those_named() -> None:
    assert parse_expression("val/loss < 1 and best(a) > 2 and val/loss > 0").fields == (
        "val/loss",
        "best(a)",
    )
    assert parse_fields("name, best(val/loss),params.x-y") == [
        "name",
        "best(val/loss)",
        "params.x-y",
    ]
    for wrong in ("", "a < 1", "1", "a b"):
        with pytest.raises(UsageError):
            parse_fields(wrong)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7.0),
        ("+7.5", 7.5),
        (".5", 0.5),
        ("1e-3", 0.001),
        ("2s", 2.0),
        ("2m", 120.0),
        ("2h", 7200.0),
        ("2d", 172_800.0),
    ],
)
def test_numbers_have_units_of_time(text: str, value: float) -> None:
    assert parse_expression(f"x == {text}").matches(lambda field: value)
    assert not parse_expression(f"x == {text}").matches(lambda field: value + 1e-9)


@pytest.mark.parametrize(
    "text",
    [
        *("", "val/loss <", "val/loss = 3", "a && b", "a | b", "a == 'b", "(a or b", "a b", "a < 1)", "best(3) < 1"),
        *("started > 2026-01-01", "not", "a in [1, 2", "best(a, b)", "(" * 300 + "a" + ")" * 300, "not " * 240 + "a +"),
        *(
            "__import__('os').system('x')",
            "__import__('os')",
            "lambda: 1",
            "a + b",
            "a if b else c",
        ),
        "a" * 2000,
    ],
)
def test_what_is_no_condition_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_expression(text).matches(lambda field: None)
    assert len(text) > 1000 or f'cannot read "{text[:100]}' in str(raised.value)


def put(folder: Path, run_id: str, **fields: Any) -> Run:
    root = folder / run_id
    root.mkdir()
    record = RunRecord(run_id=run_id, name="n", status="succeeded", exit_code=0, started_at="2025-01-01T00:00:00Z")
    (root / "run.json").write_text(dataclasses.replace(record, **fields).to_json())
    return Run(root)


def metrics(view: Run, *values: tuple[int, int, float], name: str = "val/accuracy") -> None:
    lines = [json.dumps({"time_s": 1, "step": step, "rank": rank, name: value}) for step, rank, value in values]
    view.metrics_jsonl.write_text("\n".join(lines) + "\n")


def value(view: Run, name: str, kind: str = "") -> Any:
    return RunFields(view)(f"{kind}({name})" if kind else name)


def test_fields_of_a_run(tmp_path: Path) -> None:
    failure = FailureRecord(0, "h", "exception", "ValueError", "bad")
    params = {"layers": 2, "opt": {"lr": 0.1}, "a.b": 3}
    view = put(
        tmp_path, "r-1", last_metrics={"val/loss": 2.5, "status": 1.0}, params=params, failure=failure, world_size=4
    )
    (view.root / "annotations.json").write_text('{"tags": ["good"], "note": "why"}')
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
    view.config_yaml.write_text("params: {layers: 3}\n")
    assert value(view, "params.layers") == 3
    view.config_yaml.write_text("{ damaged")
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
