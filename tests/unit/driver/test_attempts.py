"""What follows each attempt of a run, with stand-ins for the attempts themselves, and what the user is told."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from ddptrain.config.run_config import FailureConfig
from ddptrain.driver import attempts
from ddptrain.driver.attempts import AttemptSeries, starting_point
from ddptrain.driver.failure.fault import Fault, FaultKind
from ddptrain.driver.failure.restart_policy import Restart
from ddptrain.driver.ranks import AttemptEnd
from ddptrain.errors import Interrupted
from ddptrain.results.run_record import AttemptRecord, RunRecord, RunStatus
from tests.unit.driver.attempt.ranks import running
from tests.unit.notes import Notes

SAVED: Any = SimpleNamespace(description="step 3", step=3)


@pytest.mark.parametrize(
    ("checkpoint", "is_script", "words"),
    [
        (SAVED, False, "with the checkpoint of step 3"),
        (SAVED, True, "with the checkpoint of step 3"),
        (None, False, "from the start: there is no checkpoint yet"),
        (None, True, "the script starts again"),
    ],
)
def test_script_may_have_its_own_snapshot(checkpoint: Any, is_script: bool, words: str) -> None:
    assert starting_point(checkpoint, is_script=is_script) == words


def fault(rank: int = 1, line: str = "ValueError: no", kind: FaultKind = FaultKind.EXCEPTION) -> Fault:
    return Fault(rank, kind, 5, line)


def failed(cause: Fault, *, step: int | None = None, leaving: bool = False) -> AttemptEnd:
    return AttemptEnd((running(0), running(1, step=step)), cause, None, leaving=leaving)


FINISHED = AttemptEnd((running(0, finished=True), running(1, finished=True)), None, None)


class Bench:
    """A series whose attempts end as given; notes what is called around them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *ends: AttemptEnd, **failure: Any) -> None:
        self.notes: list[tuple[Any, ...]] = []
        self.newest: Any = None

        def note(name: str, **returns: Any) -> Any:
            return Notes(self.notes, name, **returns)

        self.layout = SimpleNamespace(log=lambda rank: f"log-{rank}", shown_path=str, where="runs/r", root="root")
        self.record = RunRecord(attempts=(AttemptRecord(attempt=1),))
        self.writer = note("writer", record=self.record, layout=self.layout, run_id="r")
        self.group = note("group", connected=True, rejected=0, first_rejected="bad rank")
        context: Any = SimpleNamespace(
            writer=self.writer,
            worker_group=self.group,
            cluster=note("cluster"),
            signals=note("signals", interrupting=nullcontext),
            reserve=lambda: "places",
            resolved=SimpleNamespace(config=SimpleNamespace(script=None)),
        )
        new_series: Any = AttemptSeries.__new__(AttemptSeries)
        self.series = new_series
        self.series.context = context
        self.series.config = SimpleNamespace(failure=FailureConfig(**{"backoff_s": 4.0, **failure}))
        self.series.recorder = note("recorder")
        self.series.checkpoint = None
        left = list(ends)
        self.places: list[Any] = []

        def attempt(places: Any) -> AttemptEnd:
            self.places.append(places)
            return left.pop(0)

        self.series._attempt = attempt
        monkeypatch.setattr(attempts, "newest_verified", self._newest_verified)

    def _newest_verified(self, layout: Any, warn: Any) -> Any:
        assert layout is self.layout and callable(warn)
        return self.newest

    def calls(self, *names: str) -> list[tuple[Any, ...]]:
        """The calls of these methods."""
        return [call for call in self.notes if call[0] in names]


def test_run_that_finishes_has_one_attempt_and_its_record_is_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "utc_now", lambda: "now")
    bench = Bench(monkeypatch, FINISHED)
    end = bench.series.run()
    assert (end.status, bench.places) == (RunStatus.SUCCEEDED, ["places"])
    ranks = tuple(rank.record() for rank in FINISHED.ranks)
    record = AttemptRecord(attempt=1, ended_at="now", outcome="succeeded", ranks=ranks)
    assert bench.notes == [("writer.update", {"attempts": (record,)})]


def test_record_of_the_last_attempt_is_completed_and_the_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, FINISHED)
    first = AttemptRecord(attempt=1, outcome="failed")
    bench.writer._returns["record"] = RunRecord(attempts=(first, AttemptRecord(attempt=2)))
    bench.series.run()
    ((_, changes),) = bench.calls("writer.update")
    assert changes["attempts"][0] is first
    assert (changes["attempts"][1].attempt, changes["attempts"][1].outcome) == (2, "succeeded")


def test_failure_is_followed_by_another_attempt_from_the_newest_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    cause = fault()
    bench = Bench(monkeypatch, failed(cause, leaving=True), FINISHED, max_restarts=1)
    bench.newest = SAVED
    assert bench.series.run().status == RunStatus.SUCCEEDED
    assert bench.series.checkpoint is SAVED and len(bench.places) == 2
    told = "starting the ranks again in 4 s, with the checkpoint of step 3 (restart 1 of 1)"
    assert bench.notes[1:-1] == [
        ("recorder.attempt_over", cause),
        ("group.end_attempt",),
        ("writer.update", {"waiting": True}),
        ("signals.interrupting",),
        ("recorder.warn", told),
        ("signals.pause", 4.0),
        ("cluster.replace_workers", {"leaving": True}),
    ]


def test_no_cluster_is_mended_after_a_signal_in_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, failed(fault()), max_restarts=1)

    def pause(seconds: float) -> None:
        raise Interrupted(2)

    bench.series.context.signals._returns["pause"] = pause
    with pytest.raises(Interrupted):
        bench.series.run()
    assert bench.calls("cluster.replace_workers") == []


@pytest.mark.parametrize(
    ("cause", "connected", "warnings"),
    [
        (fault(kind=FaultKind.REFUSED), True, ["not started again: a restart would fail in the same way"]),
        (fault(), False, ["not started again: the Dask scheduler has ended"]),
    ],
)
def test_reason_why_no_other_attempt_follows_is_told(
    monkeypatch: pytest.MonkeyPatch, cause: Fault, connected: bool, warnings: list[str]
) -> None:
    bench = Bench(monkeypatch, failed(cause), max_restarts=1)
    bench.group._returns["connected"] = connected
    assert bench.series.run().status == RunStatus.FAILED
    assert [text for _, text in bench.calls("recorder.warn")] == warnings


def test_messages_that_were_not_valid_are_told_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, FINISHED)
    bench.group._returns["rejected"] = 3
    bench.series.run()
    told = "3 messages of workers were not valid and were ignored; the first: bad rank"
    assert bench.calls("recorder.warn") == [("recorder.warn", told)]


@pytest.mark.parametrize(
    ("steps", "resumed", "attempts_run"),
    [((5, 5), None, 2), ((5, 6), None, 3), ((None, None), None, 2), ((3, None), SAVED, 2), ((4, None), SAVED, 3)],
)
def test_same_failure_at_the_same_step_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, steps: tuple[int | None, ...], resumed: Any, attempts_run: int
) -> None:
    """A rank that logged no step has reached that of the checkpoint from which it started."""
    ends = [failed(fault(), step=step) for step in steps]
    bench = Bench(monkeypatch, *ends, FINISHED, max_restarts=5)
    bench.newest = resumed
    bench.series.run()
    assert len(bench.places) == attempts_run


def test_step_of_the_rank_that_failed_counts_and_not_that_of_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.series.checkpoint = SAVED
    end = AttemptEnd((running(0, step=0), running(1)), None, None)
    assert (bench.series._last_step(end, 0), bench.series._last_step(end, 1)) == (0, 3)
    bench.series.checkpoint = None
    assert bench.series._last_step(end, 1) is None


def test_reservation_is_asked_for_before_each_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, failed(fault()), FINISHED, max_restarts=1)
    places = ["first", "second"]
    bench.series.context.reserve = lambda: places.pop(0)
    bench.series.run()
    assert bench.places == ["first", "second"]


def test_pause_and_count_are_those_of_the_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.series._prepare_another(Restart(0.5, "loss 1 of 2"), leaving=False)
    assert bench.calls("signals.pause", "cluster.replace_workers") == [
        ("signals.pause", 0.5),
        ("cluster.replace_workers", {"leaving": False}),
    ]
    told = "starting the ranks again in 0.5 s, from the start: there is no checkpoint yet (loss 1 of 2)"
    assert bench.calls("recorder.warn") == [("recorder.warn", told)]
