"""What trackers have created: links of runs that were sent later, parts in other folders, and names for commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddptrain.results.layout import Origin, RunLayout
from ddptrain.results.run_record import RunRecord
from ddptrain.results.tracker_records import run_argument, tracker_outputs, wandb_parts


def part(folder: Path, run_id: str) -> Path:
    made = folder / f"offline-run-20250101_000000-{run_id}"
    made.mkdir(parents=True)
    (made / f"run-{run_id}.wandb").touch()
    return made


def test_run_is_named_as_a_command_in_this_directory_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "a run").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert run_argument(RunLayout(tmp_path / "runs" / "a run")) == "a run", "its id, where commands look by default"
    assert run_argument(RunLayout(tmp_path / "a run")) == f"'{tmp_path}/a run'"
    Origin("s3://bucket/runs/a-run").mark(tmp_path / "runs" / "a run")
    assert run_argument(RunLayout(tmp_path / "runs" / "a run")) == "s3://bucket/runs/a-run"


def test_urls_of_runs_that_were_sent_later_are_added_and_ranks_are_in_order(tmp_path: Path) -> None:
    (tmp_path / "tracking" / "wandb").mkdir(parents=True)
    links = {"w1": "http://x/w1", "w1-rank_2": "http://x/2", "w2": "http://later"}
    (tmp_path / "tracking" / "wandb" / "links.json").write_text(json.dumps(links))
    record = RunRecord(
        run_id="r",
        tracking={
            "wandb/rank_10": {"id": "w3"},
            "wandb/rank_2": {"id": "w2", "url": "http://first"},
            "wandb": {"id": "w1"},
        },
    )
    made = tracker_outputs(RunLayout(tmp_path), record)
    assert list(made) == ["wandb", "wandb/rank_2", "wandb/rank_10", "wandb/w1-rank_2"]
    assert made["wandb"] == {"id": "w1", "url": "http://x/w1"}
    assert made["wandb/rank_2"]["url"] == "http://first", "what a rank has reported stays"
    assert made["wandb/w1-rank_2"] == {"id": "w1-rank_2", "url": "http://x/2"}


def test_parts_in_a_folder_of_the_users_are_found_by_their_id(tmp_path: Path) -> None:
    layout, elsewhere = RunLayout(tmp_path / "run"), tmp_path / "elsewhere"
    inside = part(layout.tracking_dir / "wandb", "w1")
    outside, _ = part(elsewhere, "w2"), part(elsewhere, "of-another-run")
    tracking = {
        "wandb": {"id": "w1", "folder": str(elsewhere / "x")},
        "wandb/rank_1": {"id": "w2", "folder": str(outside)},
    }
    found = wandb_parts(layout, RunRecord(run_id="r", tracking=tracking))
    assert [each.folder for each in found] == [inside, outside]
