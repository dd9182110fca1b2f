"""A run in a notebook."""

from __future__ import annotations

from pathlib import Path

from ddptrain.results.layout import RunLayout
from ddptrain.results.lookup import RunView
from ddptrain.results.run_record import BestRecord, FailureRecord, RunRecord
from ddptrain.results.show.notebook import run_table_html
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
