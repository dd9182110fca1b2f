"""Which ranks failed by themselves."""

from __future__ import annotations

from pathlib import Path

from ddptrain.reports.facts import RankResult, rank_results
from ddptrain.results.run_record import FailureRecord
from tests.unit.reports.runs import failed_run, run


def test_victims_and_stopped_ranks_did_not_fail(tmp_path: Path) -> None:
    assert rank_results(failed_run(tmp_path)) == [
        RankResult(0, "node-1", "stopped", "stopped because the run ended"),
        RankResult(1, "node-1", "failed", "ValueError: wrong shape"),
        RankResult(2, "node-1", "stopped", "lost its connection: connection closed"),
    ]


def test_only_the_last_attempt_counts(tmp_path: Path) -> None:
    fault = {"event": "fault", "rank": 0, "message": "boom", "victim": False}
    again = {"event": "run_started", "attempt": 2}
    assert [each.outcome for each in rank_results(run(tmp_path, events=[fault, again]))] == ["passed", "passed"]


def test_victim_that_is_the_root_cause_failed(tmp_path: Path) -> None:
    fault = {"event": "fault", "rank": 0, "message": "connection closed", "victim": True}
    view = run(tmp_path, "failed", (1, 0), [fault], failure=FailureRecord(0, message="connection closed"))
    assert [each.outcome for each in rank_results(view)] == ["failed", "passed"]


def test_exit_codes_count_where_events_are_missing_or_damaged(tmp_path: Path) -> None:
    view = run(tmp_path, "failed", (3, 0, None), failure=FailureRecord(message="a worker is lost"))
    for text in ("", '{"time_s" fault', '{"time_s":1,"event":"fault"}\n{"time_s":1,"event":["fault"]}\n[]\n'):
        view.layout.events_jsonl.write_text(text)
        assert [each.outcome for each in rank_results(view)] == ["failed", "passed", "stopped"]
    view.layout.events_jsonl.unlink()
    assert rank_results(view)[0] == RankResult(0, "node-1", "failed", "exit code 3")


def test_run_without_ranks_has_none(tmp_path: Path) -> None:
    assert rank_results(run(tmp_path, "failed", attempts=())) == []
