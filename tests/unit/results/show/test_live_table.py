from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ddptrain.errors import TrainingFailed
from ddptrain.results.run import Run as RecordedRun
from ddptrain.results.run_record import BestRecord, FailureRecord, ProgressRecord, RunRecord
from ddptrain.results.show.live_table import LiveTable, run_table_html
from ddptrain.run_handle import Run as Handle


class StubDisplay:
    """Stands for IPython.display: remembers what was shown, and what replaced it."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.updates: list[str] = []

    def display(self, page: str, *, display_id: bool) -> Any:
        assert display_id
        self.shown.append(page)
        return SimpleNamespace(update=self.updates.append)


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> StubDisplay:
    stub = StubDisplay()
    ipython, display = ModuleType("IPython"), ModuleType("IPython.display")
    vars(ipython)["get_ipython"] = lambda: SimpleNamespace(kernel=object())
    vars(display).update({"HTML": str, "display": stub.display})
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return stub


def test_table_is_replaced_and_shows_the_newest_state(notebook: StubDisplay, tmp_path: Path) -> None:
    views = [
        RecordedRun(
            tmp_path,
            RunRecord(run_id="r-1", status="running", last_metrics={"loss": loss}, progress=progress),
        )
        for loss, progress in ((9.0, None), (0.5, ProgressRecord(1.0, 1, 4, "epochs")))
    ]
    alert = {"event": "alert", "time_s": 1.0, "rank": 1, "message": "<b>"}
    (tmp_path / "events.jsonl").write_text(json.dumps(alert, separators=(",", ":")) + "\n")
    table = LiveTable(lambda: views[len(notebook.shown)], every_s=3600)
    table.refresh()
    table.refresh()  # too early
    assert (len(notebook.shown), notebook.updates) == (1, [])
    table.write("10%\r20%\n\x1b[36m<script>alert(1)</script>\x1b[2J\n")
    table.refresh(now=True)
    (page,) = notebook.updates
    assert '<progress value="1" max="4"></progress> epoch 1/4' in page
    assert "<tr><th>loss</th><td>0.5</td></tr>" in page and "<td>rank 1: &lt;b&gt;</td>" in page
    assert "20%\n&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "10%" not in page and "<script>" not in page and "\x1b" not in page


def test_watch_prints_lines_elsewhere_and_raises_the_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "r-3"
    (run_dir / "logs").mkdir(parents=True)
    failure = {"rank": 1, "host": "h", "type": "ValueError", "message": "no", "log": "", "traceback": ""}
    record = {"run_id": "r-3", "status": "failed", "exit_code": 1, "failure": failure}
    (run_dir / "run.json").write_text(json.dumps(record))
    (run_dir / "logs" / "rank-0.log").write_text("epoch 1\n")
    with pytest.raises(TrainingFailed, match="rank 1 on h: ValueError: no"):
        Handle("r-3", str(run_dir)).watch()
    assert capsys.readouterr().out == "epoch 1\n"
    assert "<td>rank 1 on h: ValueError: no</td>" in Handle("r-3", str(run_dir))._repr_html_()


def test_table_has_the_end_and_escapes_texts(tmp_path: Path) -> None:
    record = RunRecord(
        run_id="r-1",
        status="failed",
        exit_code=1,
        duration_s=61.0,
        world_size=2,
        last_metrics={"<b>loss": 0.25},
        best=BestRecord("loss", "min", 0.2, 7),
        failure=FailureRecord(rank=1, host="h", type="ValueError", message="<script>alert(1)</script>\x1b[2J\nmore"),
    )
    page = run_table_html(RecordedRun(tmp_path / "r-1", record))
    assert "<tr><th>status</th><td>failed (exit code 1)</td></tr>" in page
    assert "<th>&lt;b&gt;loss</th><td>0.25</td>" in page
    assert "<td>loss 0.2 at step 7</td>" in page
    assert "<td>rank 1 on h: ValueError: &lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "\x1b" not in page and "<script>" not in page and "more" not in page
