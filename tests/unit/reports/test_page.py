"""What the page shows of a run: curves, predictions, settings, the time line; and that its text stays text."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ddptrain.reports.artifacts import read_artifacts
from ddptrain.reports.curves import MEAN, page_data, read_lines, thinned
from ddptrain.reports.facts import read_timeline
from ddptrain.reports.page import RunCard, SweepTable, page_json, runs_page, safe_text
from ddptrain.results.run import Run
from ddptrain.results.sweep_record import SweepRecord, TrialRecord, TrialState
from tests.unit.reports.runs import failed_run, run


def logged(view: Run, *lines: dict[str, Any]) -> Run:
    """Write metrics.jsonl; the run began at 0 s."""
    text = "".join(json.dumps({"time_s": 1.0, "rank": 0, **line}) + "\n" for line in lines)
    view.metrics_jsonl.write_text(text)
    return view


# --- Curves ---


@pytest.mark.parametrize("broken", [False, True])  # another reader takes files with damaged lines
def test_mean_of_the_ranks_is_taken_at_each_step(tmp_path: Path, broken: bool) -> None:
    lines = [{"step": step, "rank": rank, "loss": 1.0 * step + rank} for step in (1, 2) for rank in (0, 1)]
    view = logged(run(tmp_path), *lines, {"step": 3, "rank": 1, "loss": None}, {"step": 3, "rank": 0, "same": 1.0})
    if broken:
        with view.metrics_jsonl.open("a") as file:
            file.write('{"time_s"\n[]\n{"rank": "x"}\n')
    mean, *ranks = [line for line in read_lines(view) if line.metric == "loss"]
    assert (mean.rank, [line.rank for line in ranks]) == (MEAN, [0, 1])
    assert (list(mean.step), list(mean.value[:2])) == ([1, 2, 3], [1.5, 2.5])
    assert math.isnan(mean.value[2])
    assert [line.rank for line in read_lines(view) if line.metric == "same"] == [MEAN]  # it has one curve


def test_attempt_replaces_the_steps_that_it_repeats(tmp_path: Path) -> None:
    first = [{"attempt": 1, "step": step, "loss": 1.0} for step in (1, 2, 3)]
    (line,) = read_lines(logged(run(tmp_path), *first, {"attempt": 2, "step": 2, "loss": 5.0}))
    assert (list(line.step), list(line.value)) == ([1, 2], [1.0, 5.0])


def test_thinned_curve_keeps_ends_peaks_and_gaps(tmp_path: Path) -> None:
    values = [math.nan if step == 70 else 9.0 if step == 33 else step / 1000 for step in range(1000)]
    (line,) = read_lines(logged(run(tmp_path), *({"step": at, "loss": value} for at, value in enumerate(values))))
    short = thinned(line, 50)
    assert len(short.value) <= 50
    assert {0, 33, 70, 999} <= set(short.step)
    assert np.nanmax(short.value) == 9.0
    assert sum(len(curve["y"]) for curve in page_data([line], 60)) < 60 * 4 * 4 / 3 + 4


# --- Predictions ---


def test_wrong_predictions_come_first_and_held_out_ones_before_training(tmp_path: Path) -> None:
    view = run(tmp_path)
    images, tables = view.artifacts_dir / "images", view.artifacts_dir / "tables"
    images.mkdir(parents=True)
    for name in ("a.png", "b.png"):
        Image.new("RGB", (4, 4)).save(images / name)
    rows = "image,label,prediction\nimages/a.png,cat,cat\nimages/b.png,cat,dog\nimages/../x.png,cat,dog\n"
    for name in ("train_predictions", "val_mistakes"):
        (tables / name).mkdir(parents=True)
        (tables / name / "step-5-rank-0.csv").write_text(rows)
    (view.artifacts_dir / "predictions").mkdir()
    (view.artifacts_dir / "predictions" / "rank-0.csv").write_text(
        "key,label,prediction,probability\n1,cat,cat,0.9\n2,cat,dog,0.8\n3,dog,dog,nan\n4,cat,dog,0.99\n"
    )
    found = read_artifacts(view, 10)
    assert [path for path, _ in found.galleries] == [
        "tables/val_mistakes/step-5-rank-0.csv",
        "tables/train_predictions/step-5-rank-0.csv",
    ]
    assert [(item.picture.name, item.is_wrong) for item in found.galleries[0][1]] == [("b.png", True), ("a.png", False)]
    assert found.pictures == []  # all are in tables
    (table,) = found.tables
    assert [row[0] for row in table.rows] == ["2", "4", "1", "3"]


# --- The rest ---


def test_time_line_shows_each_attempt_with_its_failure(tmp_path: Path) -> None:
    events = [
        {"event": "rank_started", "rank": 0, "host": "h"},
        {"event": "entered", "rank": 0, "time_s": 4.0},
        {"event": "fault", "rank": 0, "message": "boom", "time_s": 6.0},
        {"event": "run_started", "attempt": 2, "time_s": 8.0},
        {"event": "entered", "rank": 0, "time_s": 9.0},
        {"event": "timed", "rank": 0, "activity": "evaluation", "seconds": 2, "time_s": 12.0},
        {"event": "finished", "rank": 0, "time_s": 13.0},
    ]
    timeline = read_timeline(run(tmp_path, events=events))
    assert timeline is not None
    first, second = (row.text for row in timeline.rows)
    assert first.startswith("start 3.0 s; training 2.0 s; ")
    assert first.endswith("; failed: boom")
    assert second == "waiting 2.0 s; start 1.0 s; training 4.0 s"
    assert [span.kind for span in timeline.rows[1].spans] == ["waiting", "start", "training", "evaluation"]
    assert read_timeline(run(tmp_path / "other")) is None


def test_settings_that_differ_from_the_defaults(tmp_path: Path) -> None:
    view = run(tmp_path, workload="petnames")
    view.config_yaml.write_text("workload: petnames\nname: x\nparams: {epochs: 3}\nfailure: {max_restarts: 0}\n")
    settings = RunCard(view).settings
    assert (settings["params.epochs"][0], settings["workload"]) == ("3", ("petnames", None))
    assert settings["params.epochs"][1] not in ("3", None)
    assert settings["failure.max_restarts"] == ("0", "0")


def test_parameters_of_a_sweep_have_a_place_for_each_trial() -> None:
    trials = [TrialRecord(at, {"lr": 10.0**-at, "same": 1}, TrialState.COMPLETE, value=float(at)) for at in (1, 2, 3)]
    space: dict[str, dict[str, Any]] = {"lr": {"kind": "log"}, "same": {"kind": "linear"}}
    table = SweepTable(SweepRecord("s", "s", "", "", mode="max", space=space, trials=trials))
    assert [trial.number for trial in table.ranked] == [3, 2, 1]
    (axis,) = table.axes  # a parameter with one value has none
    assert [(trial.number, round(x, 6), y) for trial, x, y in axis.dots] == [(3, 0, 1.0), (2, 0.5, 0.5), (1, 1, 0.0)]
    assert axis.labels == ("0.001", "0.1")


def test_failed_run_has_the_frames_of_the_users_code_and_last_lines(tmp_path: Path) -> None:
    details = runs_page([failed_run(tmp_path)]).details
    assert [(frame.line, frame.function) for frame in details["frames"]] == [(12, "main"), (4, "step")]
    assert details["tails"][1] == ["step 1", "ValueError: wrong shape"]


def test_text_stays_text() -> None:
    assert safe_text("a\x1b[1m\u202eb") == "a\N{REPLACEMENT CHARACTER}[1m\N{REPLACEMENT CHARACTER}b"
    assert safe_text("x" * 2000) == "x" * 1000 + "..."
    assert page_json({"</script>": ["<!--", "&"]}) == '{"\\u003c/script\\u003e":["\\u003c!--","\\u0026"]}'
