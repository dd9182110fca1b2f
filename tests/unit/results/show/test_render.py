"""Runs as text and tables."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from ddptrain.results.run import Run
from ddptrain.results.run_record import (
    FailureRecord,
    RunRecord,
)
from ddptrain.results.selection import RunFields
from ddptrain.results.show.render import HEADER, print_table, rows, run_table, sections

# --- render ---


@pytest.mark.parametrize("width", [60, 80, 200])
def test_nothing_is_cut_off_a_row_by_a_narrow_terminal(tmp_path: Path, width: int) -> None:
    run_id = "images-local-20261121-171552-deb2"
    record = RunRecord(run_id=run_id, status="failed", failure=FailureRecord(1, "h", "exception", "E", "no such name"))
    file = io.StringIO()
    print_table(run_table([RunFields(Run(tmp_path, record))]), Console(file=file, width=width))
    assert run_id in file.getvalue() and "rank 1: E: no such name" in " ".join(file.getvalue().split())


def test_tags_notes_and_chosen_fields_have_columns(tmp_path: Path) -> None:
    runs = []
    for run_id in ("a", "b"):
        (tmp_path / run_id).mkdir()
        record = RunRecord(run_id=run_id, status="succeeded", last_metrics={"val/loss": 1.5}, params={"layers": 2})
        runs.append(RunFields(Run(tmp_path / run_id, record)))
    (tmp_path / "a" / "annotations.json").write_text('{"tags": ["good", "v2"], "note": "one\\ntwo"}')
    titles, first, second = run_table(runs, ["params.layers"])
    assert titles[5:] == ("params.layers", "TAGS", "RESULT", "NOTE")
    assert first[5:] == ("2", "good v2", "val/loss 1.5", "one") and second[5:] == ("2", "", "val/loss 1.5", "")
    assert run_table(runs[1:])[0] == HEADER


def test_a_folder_of_many_artifacts_is_one_line(tmp_path: Path) -> None:
    layout = Run(tmp_path)
    for path in ["names.json", *(f"few/{n}.png" for n in range(2)), *(f"many/{n}.png" for n in range(9))]:
        (layout.artifacts_dir / path).parent.mkdir(parents=True, exist_ok=True)
        (layout.artifacts_dir / path).write_bytes(b"12345678")
    told = dict(sections(Run(layout.root, RunRecord(run_id="r"))))["artifacts"]
    few = [(f"few/{n}.png", "8 B") for n in range(2)]
    assert list(told) == [*few, ("many/", "9 files, 72 B"), ("names.json", "8 B")]


def test_the_row_of_an_unreadable_run_tells_the_cause_and_not_its_path(tmp_path: Path) -> None:
    folder = tmp_path / ("long-" * 20)
    folder.mkdir()
    (folder / "run.json").write_text("{")
    (row,) = rows([Run(folder)])
    assert row[-1].startswith("cannot read run.json: not JSON: ")


def tracked_run(folder: Path) -> Run:
    """A run of eleven ranks, the first two of which were recorded offline, and of which more was sent afterwards."""
    told = {"id": "w1", "mode": "offline", "folder": "/there/wandb/part"}
    found = {"wandb": told, "wandb/rank_1": told | {"id": "w1-1"}, "tensorboard": {"folder": "/here"}}
    online = {f"wandb/rank_{rank}": {"id": f"w1-{rank}", "url": f"https://w/w1-{rank}"} for rank in (10, 2)}
    layout = Run(folder)
    links = layout.tracking_dir / "wandb/links.json"
    links.parent.mkdir(parents=True)
    links.write_text(json.dumps({name: f"https://w/{name}" for name in ("w1", "w1-1", "w1-rank_3")}))
    return Run(layout.root, RunRecord(run_id="r", status="succeeded", tracking={**found, **online}))


def test_links_of_all_runs_are_shown_also_of_those_that_were_sent_afterwards(tmp_path: Path) -> None:
    shown = dict(sections(tracked_run(tmp_path)))["tracking"]
    assert shown == [
        ("tensorboard", "/here"),
        ("wandb", "https://w/w1"),
        ("wandb/rank_1", "https://w/w1-1"),
        ("wandb/rank_2", "https://w/w1-2"),
        ("wandb/rank_10", "https://w/w1-10"),
        ("wandb/w1-rank_3", "https://w/w1-rank_3"),
    ]


@pytest.mark.parametrize(
    ("folder", "shown"),
    [
        ("{root}/tracking/wandb/part", "offline tracking/wandb/part"),
        ("/where/it/was/r/tracking/wandb/part", "offline tracking/wandb/part"),
        ("/there/wandb/part", "offline /there/wandb/part"),
    ],
)
def test_what_is_on_the_disk_is_told_from_the_run_directory_on(tmp_path: Path, folder: str, shown: str) -> None:
    layout = Run(tmp_path / "r")
    tracking = {"wandb": {"mode": "offline", "folder": folder.format(root=layout.root)}}
    view = Run(layout.root, RunRecord(run_id="r", status="succeeded", tracking=tracking))
    assert dict(sections(view))["tracking"] == [("wandb", shown)]


def test_messages_of_ranks_are_in_the_sections_that_their_events_name(tmp_path: Path) -> None:
    lines = [
        {"event": "alert", "time_s": 1.0, "rank": 1, "message": "the loss\nhas doubled", "rank_time_ns": 5},
        {"event": "note", "time_s": 2.0, "rank": 0, "message": "slow disk", "level": "warning", "new_field": 1},
        {"event": "note", "time_s": 2.0, "rank": 0, "message": 7},
        {"event": "entered", "time_s": 3.0, "rank": 0},
    ]
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    (tmp_path / "events.jsonl").write_text(text)
    shown = dict(sections(Run(tmp_path, RunRecord(run_id="r"))))
    assert shown["alerts"] == [("rank 1", "the loss")]
    assert shown["messages of ranks"] == [("rank 0", "slow disk")]
