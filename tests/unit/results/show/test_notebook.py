"""A run in a notebook."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ddptrain.results.layout import RunLayout
from ddptrain.results.lookup import RunView
from ddptrain.results.run_record import BestRecord, FailureRecord, RunRecord
from ddptrain.results.show.live_table import run_table_html
from ddptrain.run_handle import Run


def test_table_has_the_end_and_escapes_texts(tmp_path: Path) -> None:
    record = RunRecord(
        run_id="r-1",
        status="failed",
        exit_code=1,
        duration_s=61.0,
        world_size=2,
        last_metrics={"<b>loss": 0.25},
        best=BestRecord("loss", "min", 0.2, 7),
        failure=FailureRecord(rank=1, type="ValueError", message="<script>alert(1)</script>\x1b[2J\nmore"),
    )
    page = run_table_html(RunView(RunLayout(tmp_path / "r-1"), record))
    assert "<tr><th>status</th><td>failed (exit code 1)</td></tr>" in page
    assert "<th>&lt;b&gt;loss</th><td>0.25</td>" in page
    assert "<td>loss 0.2 at step 7</td>" in page
    assert "<td>rank 1: ValueError: &lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "\x1b" not in page and "<script>" not in page and "more" not in page


def test_run_is_shown_by_notebooks(tmp_path: Path) -> None:
    (tmp_path / "r-2").mkdir()
    (tmp_path / "r-2" / "run.json").write_text('{"run_id": "r-2", "status": "succeeded", "exit_code": 0}')
    assert "<td>succeeded (exit code 0)</td>" in Run("r-2", str(tmp_path / "r-2"))._repr_html_()


def test_rows_of_a_run_with_newer_values(tmp_path: Path) -> None:
    record = RunRecord(run_id="r-1", status="running", exit_code=1, last_metrics={"b": 9.0, "a": 1.0})
    failure = FailureRecord(message="lost\nmore")
    view = RunView(RunLayout(tmp_path / "r-1"), replace(record, duration_s=2.0, failure=failure))
    assert run_table_html(view, {"b": 2.5}) == (
        "<table><tr><th>run</th><td>r-1</td></tr><tr><th>status</th><td>running</td></tr>"
        "<tr><th>duration</th><td>2.0 s</td></tr><tr><th>a</th><td>1</td></tr><tr><th>b</th><td>2.5</td></tr>"
        f"<tr><th>failure</th><td>lost</td></tr><tr><th>directory</th><td>{tmp_path}/r-1</td></tr></table>"
    )
    assert "<th>b</th><td>nan</td>" in run_table_html(view, {"b": None})
    ended = RunView(RunLayout(tmp_path), RunRecord(run_id="r-1", status="succeeded", exit_code=0, world_size=2))
    page = run_table_html(ended)
    assert "<td>succeeded (exit code 0)</td></tr>" in page and "<tr><th>ranks</th><td>2</td></tr>" in page
