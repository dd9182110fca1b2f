"""A run on its page: its failure and its timeline."""

from __future__ import annotations

import os
from pathlib import Path

from ddptrain.reports.html.run_card import Frame, tails, user_frames
from ddptrain.reports.html.timeline import Mark, Phase, read_timeline
from ddptrain.results.run_record import FailureRecord
from tests.unit.reports.runs import failed_run, run

# --- The frames of the user's code, and the last lines of ranks ---


def test_frames_of_installed_packages_are_left_out() -> None:
    trace = (
        "Traceback (most recent call last):\n"
        '  File "/home/me/train.py", line 12, in main\n    step(i)\n    ~~~~^^^\n'
        '  File "/env/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1, in forward\n    x\n'
        f'  File "{os.__file__}", line 3, in walk\n    y\n'
        '  File "/home/me/model.py", line 4\nValueError: wrong shape\n'
    )
    assert user_frames(FailureRecord(traceback=trace)) == [
        Frame("/home/me/train.py", 12, "main", "step(i)"),
        Frame("/home/me/model.py", 4, "", ""),
    ]
    assert user_frames(None) == []


def test_root_cause_comes_first(tmp_path: Path) -> None:
    found = tails(failed_run(tmp_path))
    assert list(found.items()) == [
        (1, ["step 1", "ValueError: wrong shape"]),
        (0, ["fine"]),
        (2, ["victim"]),
    ]


def test_lines_are_bounded(tmp_path: Path) -> None:
    view = run(tmp_path, logs={0: "a" * 20_000_000 + "\n" + "last\n", 1: "".join(f"{at}\n" for at in range(1000))})
    long, many = tails(view).values()
    assert [len(line) for line in long] == [503, 4]
    assert many == [str(at) for at in range(960, 1000)]


def test_credentials_are_hidden_and_links_are_not_followed(tmp_path: Path) -> None:
    view = run(tmp_path, logs={0: "opening s3://user:hunter22@host/x\n"})
    view.layout.log(1).symlink_to("/etc/hostname")
    (tail,) = tails(view).values()
    assert "hunter22" not in tail[0]


# --- Phases and marks of ranks, placed on a line of 1000 units ---


START = "1970-01-01T00:00:00Z"


def event(time_s: float, kind: str, **fields: object) -> dict[str, object]:
    return {"time_s": time_s, "event": kind, **fields}


def test_phases_of_a_restarted_rank(tmp_path: Path) -> None:
    events = [
        event(2, "rank_started", rank=0, host="n1"),
        event(4, "entered", rank=0),
        event(5, "checkpoint_staged", rank=0, step=10),
        event(6, "fault", rank=0, message="boom"),
        event(6, "rank_ended", rank=0),
        event(7, "run_started", attempt=2),
        event(8, "entered", rank=0),
        event(10, "finished", rank=0),
        event(10, "rank_ended", rank=0),
    ]
    found = read_timeline(run(tmp_path, events=events, started_at=START), [(9.0, 0), (9.0, 1), (99.0, 0)])
    assert found is not None
    first, second = found.rows
    assert (first.attempt, first.host) == (1, "n1")
    assert first.phases == (
        Phase("waiting", 0.0, 100.0, "waiting 1.0 s"),
        Phase("start", 100.0, 300.0, "start 3.0 s"),
        Phase("training", 400.0, 200.0, "training 2.0 s"),
    )
    assert first.marks == (Mark("checkpoint", 500.0, "checkpoint at step 10"), Mark("failure", 600.0, "failed: boom"))
    assert [(one.kind, one.x) for one in second.phases] == [("waiting", 600.0), ("start", 700.0), ("training", 800.0)]
    assert [(one.kind, one.x) for one in second.marks] == [("evaluation", 900.0)]
    assert found.ticks[0] == (0.0, "0 s") and found.ticks[-1] == (1000.0, "10.0 s")


def test_measured_activities_are_phases_of_their_own(tmp_path: Path) -> None:
    events = [
        event(2, "entered", rank=0),
        event(4, "timed", rank=0, activity="evaluation", seconds=1),
        event(5, "timed", rank=0, activity="checkpoint", seconds=0.5),
        event(5, "timed", rank=0, activity="sleep", seconds=1),
        event(5, "timed", rank=0, activity="evaluation", seconds="long"),
        event(10, "finished", rank=0),
    ]
    found = read_timeline(run(tmp_path, events=events, started_at=START), [(4.0, 0)])
    assert found is not None
    assert [(one.kind, one.x, one.width) for one in found.rows[0].phases[3:]] == [
        ("evaluation", 300.0, 100.0),
        ("saving", 450.0, 50.0),
    ]
    assert found.rows[0].marks == ()


def test_rank_that_never_entered_has_no_training(tmp_path: Path) -> None:
    found = read_timeline(
        run(
            tmp_path,
            events=[event(2, "rank_started", rank=0), event(3, "fault", rank=0, message="x")],
            started_at=START,
        )
    )
    assert found is not None
    assert [phase.kind for phase in found.rows[0].phases] == ["waiting", "start"]


def test_rows_are_bounded(tmp_path: Path) -> None:
    events = [event(2, "rank_started", rank=rank) for rank in range(100)]
    found = read_timeline(run(tmp_path, events=events))
    assert found is not None and (len(found.rows), found.hidden) == (64, 36)


def test_run_without_ranks_has_no_timeline(tmp_path: Path) -> None:
    view = run(tmp_path)
    assert read_timeline(view) is None
    view.layout.events_jsonl.unlink()
    assert read_timeline(view) is None


def test_damaged_events_are_skipped(tmp_path: Path) -> None:
    view = run(tmp_path, events=[event(2, "entered", rank=0)], started_at=START)
    with view.layout.events_jsonl.open("a") as file:
        file.write('{"time_s":"now","event":"entered","rank":1}\n{"time_s":1e300,"event":"entered","rank":2}\n')
        file.write(
            '{"time_s":3,"event":"entered","rank":"x"}\n{"time_s":3,"event":["entered"]}\n{"time_s"' + "[" * 9999
        )
    found = read_timeline(view)
    assert found is not None and [row.rank for row in found.rows] == [0]
