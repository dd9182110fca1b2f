"""Each fact of a run: the line in events.jsonl, the change of run.json, and what the display is told."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from ddptrain.driver import recorder as recorder_module
from ddptrain.driver.failure.fault import Fault, FaultKind
from ddptrain.driver.recorder import Recorder, metric_problem
from ddptrain.protocol import events
from ddptrain.protocol.worker_notices import SystemSample
from ddptrain.results.run_record import (
    AttemptRecord,
    EnvironmentValue,
    ProgressRecord,
    RankRecord,
    RunRecord,
)

AT = 5_000_000_000


class Writer:
    """A run directory in memory."""

    def __init__(self) -> None:
        self.record = RunRecord(attempts=(AttemptRecord(attempt=1), AttemptRecord(attempt=2)))
        self.lines: list[dict[str, Any]] = []
        self.metrics: list[Any] = []
        self.samples: list[Any] = []
        self.flushed = 0
        self.last_versions: dict[str, str] = {}

    def event(self, line: dict[str, Any]) -> None:
        self.lines.append(line)

    def update(self, **changes: Any) -> None:
        self.record = dataclasses.replace(self.record, **changes)

    def add_metrics(self, metrics: list[events.Metrics], rank: int) -> None:
        self.metrics.append((rank, metrics))

    def system(self, sample: SystemSample) -> None:
        self.samples.append(sample)

    def flush(self) -> None:
        self.flushed += 1

    def set_progress(self, progress: ProgressRecord | None) -> None:
        self.update(progress=progress)


class Bench:
    """A recorder, and what came of it."""

    now: float = 0.0

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(recorder_module, "time", SimpleNamespace(time=lambda: 12.34567, monotonic=lambda: self.now))
        monkeypatch.setattr(recorder_module, "utc_now", lambda: "now")
        self.writer, self.shown = Writer(), list[tuple[Any, ...]]()
        self.recorder = Recorder(self.writer, self, "acc")  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        """A method of the display."""

        def told(*arguments: Any, **options: Any) -> None:
            if options.get("level") == "info":
                options = {}
            self.shown.append((name, *arguments, *([options] if options else [])))

        return told

    def lines(self) -> list[dict[str, Any]]:
        """The recorded lines without their time, which is that of the driver."""
        assert {line["time_s"] for line in self.writer.lines} <= {12.346}
        return [{name: value for name, value in line.items() if name != "time_s"} for line in self.writer.lines]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


FAILURE = events.Failure(AT, "ValueError", "no", "trace", "train")
THREAD = events.ThreadFailure(AT, "loader", "OSError", "full\nmore", "trace")


@pytest.mark.parametrize(
    ("event", "line", "shown"),
    [
        (
            events.Note(AT, "told", "warning"),
            {"event": "note", "rank": 3, "level": "warning", "message": "told"},
            [("notice", "rank 3: told", {"level": "warning"})],
        ),
        (
            events.Note(AT, "told", "debug"),
            {"event": "note", "rank": 3, "level": "debug", "message": "told"},
            [("notice", "rank 3: told")],
        ),
        (events.Entered(AT), {"event": "entered", "rank": 3, "rank_time_ns": AT}, []),
        (events.Finished(AT), {"event": "finished", "rank": 3, "rank_time_ns": AT}, []),
        (
            FAILURE,
            {
                "event": "failure",
                "rank": 3,
                "type": "ValueError",
                "message": "no",
                "traceback": "trace",
                "phase": "train",
                "exit_code": None,
                "lost_peer": False,
                "timed_out": False,
                "unwritable": False,
                "handled": False,
                "rank_time_ns": AT,
            },
            [],
        ),
        (
            THREAD,
            {
                "event": "thread_failure",
                "rank": 3,
                "thread": "loader",
                "type": "OSError",
                "message": "full\nmore",
                "traceback": "trace",
                "rank_time_ns": AT,
            },
            [
                (
                    "notice",
                    "rank 3: thread loader has ended with OSError: full; the rank continues",
                    {"level": "warning"},
                )
            ],
        ),
    ],
)
def test_event_of_a_rank_is_recorded_and_shown(
    bench: Bench, event: events.Event, line: dict[str, Any], shown: list[Any]
) -> None:
    bench.recorder.rank_event(3, event)
    notices = [
        {"event": "notice", "level": options[0]["level"] if options else "info", "message": text}
        for _, text, *options in shown
    ]
    assert bench.lines() == [line, *notices]
    (told, *others) = bench.shown
    assert told[0] == "event" and told[1] == {**line, "time_s": 12.346} and others == shown


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (
            events.TrackerFailed(AT, "w", "no", strict=True),
            {
                "event": "tracker_failed",
                "rank": 3,
                "tracker": "w",
                "message": "no",
                "strict": True,
                "rank_time_ns": AT,
            },
        ),
        (events.Preempted(AT, step=4), None),
    ],
)
def test_some_events_are_not_shown(bench: Bench, event: events.Event, line: dict[str, Any] | None) -> None:
    bench.recorder.rank_event(3, event)
    assert bench.lines() == ([line] if line else []) and bench.shown == []


def test_time_of_an_activity_is_that_of_the_rank(bench: Bench) -> None:
    bench.recorder.rank_event(3, events.Timed(AT, "evaluation", 1.5))
    line = {"event": "timed", "time_s": 5.0, "rank": 3, "activity": "evaluation", "seconds": 1.5}
    assert bench.writer.lines == [line] and bench.shown == []


def test_checkpoint_is_staged_and_its_metric_is_checked_once(bench: Bench) -> None:
    saved = events.CheckpointSaved(AT, 7, "s", (), 1.0, {"loss": 1.0})
    bench.recorder.rank_event(3, saved)
    bench.recorder.rank_event(3, saved)
    staged = {"event": "checkpoint_staged", "rank": 3, "step": 7, "epoch": 1.0}
    assert [line["event"] for line in bench.lines()] == ["checkpoint_staged", "notice", "checkpoint_staged"]
    assert bench.lines()[0] == staged and ("checkpoint", 3, saved) in bench.shown


@pytest.mark.parametrize("rank", [0, 3])
def test_start_of_a_rank_is_shown_and_that_of_rank_0_has_the_environment(bench: Bench, rank: int) -> None:
    bench.writer.update(versions={"ddptrain": "1"})
    environment = {"A": {"value": "1", "source": "worker"}, "B": {}}
    bench.recorder.rank_event(rank, events.Started(AT, 42, "h1", "cuda", environment, {"torch": "2"}))
    assert bench.lines() == [{"event": "rank_started", "rank": rank, "host": "h1", "pid": 42, "device": "cuda"}]
    assert bench.shown == [("rank_started", rank, "h1", 42)]
    expected = {"A": EnvironmentValue("1", "worker"), "B": EnvironmentValue("", "")} if rank == 0 else {}
    assert bench.writer.record.rank_environment == expected
    assert bench.writer.record.versions == {"ddptrain": "1", **({"torch": "2"} if rank == 0 else {})}


def test_numbers_of_a_rank_are_written_and_shown_in_their_order(bench: Bench) -> None:
    first, second = events.Metrics(AT, {"a": 1.0}, 1), events.Metrics(AT, {"b": 2.0}, 2)
    done = events.Progress(AT, 3)
    bench.recorder.rank_numbers(3, [first, done, second])
    assert bench.writer.metrics == [(3, [first, second])]
    assert bench.shown == [("metrics", 3, first), ("metrics", 3, second), ("progress", 3, done)]
    bench.recorder.rank_numbers(1, [done])
    assert len(bench.writer.metrics) == 1 and bench.shown[-1] == ("progress", 1, done)
    assert bench.recorder._logged == {"a", "b"}


def test_progress_of_the_slowest_rank_is_recorded_every_two_seconds(bench: Bench) -> None:
    def report(rank: int, done: float, time_s: float) -> None:
        bench.now = time_s
        bench.recorder.rank_numbers(rank, [events.Progress(int(time_s * 1e9), done, 100.0, "images")])

    report(0, 10, 5.0)
    assert bench.writer.record.progress == ProgressRecord(12.34567, 10, 100, "images", None, {"0": 10})
    report(1, 4, 5.1)
    report(0, 20, 6.9)
    assert bench.writer.record.progress.ranks == {"0": 10}
    report(1, 8, 7.1)
    progress = bench.writer.record.progress
    assert (progress.done, progress.ranks) == (8, {"0": 20, "1": 8})
    assert progress.eta_s == pytest.approx(46)
    bench.recorder.attempt_over(None)
    assert bench.writer.record.progress is None


@pytest.mark.parametrize(
    ("rank", "value", "result"),
    [
        (0, '{"a": 1}', {"a": 1}),
        (1, '{"a": 1}', None),
        (0, "{", None),
        (0, "[" * 100_000, None),
        (0, f'"{"x" * ((1 << 16) - 2)}"', "x" * ((1 << 16) - 2)),
        (0, f'"{"x" * ((1 << 16) - 1)}"', None),
    ],
)
def test_result_of_rank_0_is_kept_if_it_is_json_of_a_moderate_size(
    bench: Bench, rank: int, value: str, result: Any
) -> None:
    bench.recorder.rank_event(rank, events.Returned(AT, value))
    assert bench.writer.record.result == result
    assert bench.lines() == ([{"event": "returned", "rank": 0, "result": result}] if result else [])


def test_what_trackers_have_created_is_kept_by_tracker_and_rank(bench: Bench) -> None:
    found = {"base_url": "http://evil", "url": "u" * 2001, **{f"k{number:02}": "v" for number in range(30)}}
    bench.recorder.rank_event(0, events.Tracked(AT, "wandb", found))
    bench.recorder.rank_event(0, events.Tracked(AT, "wandb", {"id": "1"}))
    bench.recorder.rank_event(3, events.Tracked(AT, "wandb", {"id": "2"}))
    kept = bench.writer.record.tracking
    assert kept["wandb/rank_3"] == {"id": "2"} and kept["wandb"]["id"] == "1"
    assert list(kept["wandb"]) == ["url", *(f"k{number:02}" for number in range(19)), "id"]
    assert len(kept["wandb"]["url"]) == 2000
    assert bench.lines()[2] == {"event": "tracked", "rank": 3, "tracker": "wandb", "found": {"id": "2"}}


@pytest.mark.parametrize(("ok", "stopped"), [(True, False), (False, True)])
def test_end_of_a_rank_is_recorded_and_shown(bench: Bench, ok: bool, stopped: bool) -> None:
    record = RankRecord(rank=3, host="h1", exit=0)
    bench.recorder.rank_ended(record, ok=ok, stopped=stopped)
    assert bench.lines() == [{"event": "rank_ended", "ok": ok, "stopped": stopped, **dataclasses.asdict(record)}]
    assert bench.shown == [("rank_ended", 3, ok, stopped)]


def test_root_cause_is_shown_once_in_an_attempt(bench: Bench) -> None:
    hang = Fault(1, FaultKind.HANG, AT, "no step")
    victim = Fault(2, FaultKind.EXCEPTION, AT, "lost", type="E", victim=True)
    same = dataclasses.replace(hang, rank=3)
    for fault in (hang, victim, same):
        bench.recorder.fault(fault)
    assert not [entry for entry in bench.shown if entry[0] == "notice"]
    bench.recorder.show_cause(hang)
    bench.recorder.attempt_over(same)
    assert bench.shown[-1] == ("notice", "rank 1 hung: no step", {"level": "error"})
    assert len([entry for entry in bench.shown if entry[0] == "notice"]) == 1
    faults = [line for line in bench.lines() if line["event"] == "fault"]
    assert [line["victim"] for line in faults] == [False, True, False]
    assert faults[1] == {"event": "fault", "rank": 2, "kind": "exception", "message": "E: lost", "victim": True}
    bench.recorder.attempt_over(victim)
    assert bench.shown[-1] == ("notice", "rank 2 failed: E: lost", {"level": "error"})


def test_ranks_are_recorded_in_the_last_attempt_when_all_train(bench: Bench) -> None:
    ranks = (RankRecord(rank=0), RankRecord(rank=1))
    bench.recorder.training(ranks)
    assert [each.ranks for each in bench.writer.record.attempts] == [(), ranks]
    assert bench.shown == [("status", "training")]


def test_notices_are_recorded_and_shown_as_such(bench: Bench) -> None:
    bench.recorder.status("waits")
    bench.recorder.notice("well")
    bench.recorder.warn("bad")
    bench.recorder.stored(3, "artifacts/a/b", None)
    bench.recorder.stored(3, "checkpoints/step-4", 4)
    bench.recorder.flush()
    assert bench.shown[:3] == [("status", "waits"), ("notice", "well"), ("notice", "bad", {"level": "warning"})]
    assert bench.lines() == [
        {"event": "status", "message": "waits"},
        {"event": "notice", "level": "info", "message": "well"},
        {"event": "notice", "level": "warning", "message": "bad"},
        {"event": "artifact_saved", "rank": 3, "path": "artifacts/a/b"},
        {"event": "checkpoint_saved", "rank": 3, "step": 4, "path": "checkpoints/step-4"},
    ]
    sample = SystemSample(1, 3, AT, "h1", {}, {})
    bench.recorder.system(sample)
    assert bench.writer.samples == [sample] and bench.shown[-1] == ("system", sample)
    assert bench.writer.flushed == 1


def test_names_in_the_warning_are_counted_and_the_nearest_is_offered() -> None:
    saved = events.CheckpointSaved(AT, 7, "s", (), 1.0, {f"m{number:02}": 1.0 for number in range(21)})
    text = metric_problem("m0", saved, [])
    listed = ", ".join(f"m{number:02}" for number in range(20))
    assert f"Given to ctx.checkpoint: {listed} and 1 more; logged with ctx.log: none. Did you mean m" in text
    assert 'metrics={"m0": ...}), or set checkpoint.metric to another one, or to null' in text
    twenty = events.CheckpointSaved(AT, 7, "s", (), None, {f"m{number:02}": 1.0 for number in range(20)})
    assert "more" not in metric_problem("zzz", twenty, []) and "Did you mean" not in metric_problem("zzz", twenty, [])
