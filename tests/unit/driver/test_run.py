"""Decisions of `train` that need no ranks; runs with ranks are in tests/end_to_end and tests/integration."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ddptrain.config.run_config import RunConfig
from ddptrain.driver import run
from ddptrain.driver.failure.run_end import RunEnd
from ddptrain.driver.run import LaunchOptions
from ddptrain.driver.worker_group.reservation import SlotRequest
from ddptrain.errors import Interrupted
from ddptrain.results.errors import ResultsError
from ddptrain.results.layout import RunLayout
from ddptrain.results.lookup import RunView
from ddptrain.results.run_record import FailureRecord, RunRecord, RunStatus
from ddptrain.results.run_writer import RunWriter

REASON = "run night has succeeded: there is nothing left to do"


@pytest.mark.parametrize("ready_fd", [None, 7])
def test_run_that_has_succeeded_is_reported_to_whoever_waits(
    ready_fd: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(run, "tell_done", lambda fd, layout, reason: told.append((fd, layout.root, reason)))
    view = RunView(RunLayout(tmp_path), RunRecord(run_id="night", status="succeeded"))
    options = SimpleNamespace(ready_fd=ready_fd, output="plain", shared=None, ended=told.append)
    assert run._already_done(view, REASON, cast(LaunchOptions, options)) == 0
    assert told == ([] if ready_fd is None else [(7, tmp_path, REASON)]) + [view]
    assert capsys.readouterr() == ("", f"ddptrain: {REASON}\n")


@pytest.mark.parametrize("resumes", [False, True])
def test_run_directory_is_that_of_the_resumed_run_and_is_locked_as_such(tmp_path: Path, resumes: bool) -> None:
    kept: list[tuple[str, bool]] = []

    @contextmanager
    def keeping(run_id: str, *, resumed: bool, max_failures: int) -> Iterator[str]:
        kept.append((run_id, resumed))
        yield "upload"

    runs = SimpleNamespace(keeping=keeping, folder=tmp_path)
    config = SimpleNamespace(name="digits", checkpoint=SimpleNamespace(max_failures=3))
    options = SimpleNamespace(run_id=None if resumes else "night")
    choice = SimpleNamespace(folder=Path("/elsewhere/earlier")) if resumes else None
    with run._kept(cast(Any, config), cast(Any, options), cast(Any, choice), cast(Any, runs)) as (folder, upload):
        assert folder == tmp_path / ("earlier" if resumes else "night") and str(upload) == "upload"
    assert kept == [("earlier", True) if resumes else ("night", False)]


def test_only_a_first_reservation_waits_for_more_slots_than_the_run_needs() -> None:
    cluster = {"ranks": {"min": 2, "max": 4}}
    config = RunConfig.model_validate(
        {"workload": "petnames", "cluster": cluster, "failure": {"rejoin_wait_s": 30.0, "max_restarts": 1}}
    )
    requests: list[tuple[int | None, int | None, float]] = []

    def reserve(request: SlotRequest, _: object) -> list[str]:
        requests.append((request.ranks, request.least, request.gather_s))
        return ["a place", "another"]

    told: list[object] = []
    unfinished = SimpleNamespace(
        config=config,
        machine=None,
        signals=SimpleNamespace(interrupting=nullcontext),
        display=SimpleNamespace(expect=lambda ranks, sizes: told.append((ranks, sizes)), status=told.append),
        log_sizes="sizes",
        cluster=SimpleNamespace(words="the cluster"),
    )
    checked = SimpleNamespace(reserve=lambda reserve_slots: [reserve_slots(True), reserve_slots(False)][-1])
    places: object = run._Run._reserved(
        cast(Any, unfinished), cast(Any, SimpleNamespace(reserve=reserve)), cast(Any, None), cast(Any, checked)
    )
    assert places == ["a place", "another"]
    assert requests == [(4, 2, 30.0), (4, 2, 0.0)]
    assert told == [(2, "sizes"), "starting 2 ranks on the cluster"]


def test_end_of_a_run_is_written_into_run_json_and_the_events(tmp_path: Path) -> None:
    failure = FailureRecord(message="it broke", rank=1)
    with RunWriter.create(tmp_path, "night", "petnames", "name: petnames\n", "petnames") as writer:
        unfinished = SimpleNamespace(writer=writer)
        last = run._Run._finish(cast(Any, unfinished), RunEnd(RunStatus.FAILED, 5, "cause", failure))
        assert (writer.record.status, writer.record.exit_code, writer.record.failure) == ("failed", 5, failure)
        assert (last["event"], last["status"], last["exit_code"]) == ("run_finished", "failed", 5)
        assert last["duration_s"] == pytest.approx(writer.record.duration_s, abs=0.001)
        assert last["failure"]["message"] == "it broke"
        *_, written = map(json.loads, writer.layout.events_jsonl.read_text().splitlines())
    assert {name: written[name] for name in last} == last


WELL = RunEnd(RunStatus.SUCCEEDED, 0)
PREEMPTED = RunEnd(RunStatus.PREEMPTED, 75)
BROKEN = RunEnd(RunStatus.FAILED, 1, "broken")


@pytest.mark.parametrize(
    ("taken", "run_end", "problems", "warned", "loss", "expected", "deadlines", "notices"),
    [
        ([], WELL, [""], False, None, WELL, [900.0], []),
        ([15], WELL, [""], False, None, WELL, [7.0], []),
        ([], PREEMPTED, ["it is late"], False, None, PREEMPTED, [7.0], ["it is late"]),
        ([], BROKEN, ["it is late"], True, None, BROKEN, [900.0], []),
        ([], BROKEN, ["it is late"], False, None, BROKEN, [900.0], ["it is late"]),
        ([], BROKEN, [""], False, ResultsError("lost"), BROKEN, [900.0], []),
        ([], WELL, [""], False, ResultsError("lost"), "lost", [900.0], []),
        ([], WELL, ["it is late"], False, None, "it is late", [900.0], []),
        ([], BROKEN, [Interrupted(2), "it is late"], False, None, BROKEN, [900.0, 0.0], ["it is late"]),
    ],
)
def test_a_run_ends_well_only_if_its_uploads_do(
    taken: list[int],
    run_end: RunEnd,
    problems: list[str | Interrupted],
    warned: bool,
    loss: ResultsError | None,
    expected: RunEnd | str,
    deadlines: list[float],
    notices: list[str],
) -> None:
    waited: list[float] = []
    told: list[str] = []
    answers = iter(problems)

    def flush(deadline_s: float) -> str:
        waited.append(deadline_s)
        answer = next(answers)
        if isinstance(answer, Interrupted):
            raise answer
        return answer

    unfinished = SimpleNamespace(
        signals=SimpleNamespace(taken=taken, interrupting=nullcontext),
        config=SimpleNamespace(failure=SimpleNamespace(grace_s=7.0)),
        keeping=SimpleNamespace(flush=flush),
        writer=SimpleNamespace(loss=loss),
        display=SimpleNamespace(notice=lambda text, level: told.append(text)),
        warned=warned,
    )
    found = run._Run._flushed(cast(Any, unfinished), run_end)
    if isinstance(expected, str):
        assert (found.status, found.exit_code, found.cause) == (RunStatus.FAILED, ResultsError.exit_code, expected)
    else:
        assert found == expected
    assert (waited, told) == (deadlines, notices)
    assert unfinished.warned is (warned or problems[-1] != "")


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_run_on_this_machine_is_announced_with_its_ranks_and_what_may_be_too_small(
    is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "resource_warnings", lambda machine, cores: [f"{machine.ranks} are many"])
    told: list[object] = []
    unfinished = SimpleNamespace(
        options=SimpleNamespace(evaluation=None, shared="a cluster" if is_shared else None),
        writer=SimpleNamespace(run_id="night", layout=SimpleNamespace(where="runs/night")),
        choice=SimpleNamespace(reason="a reason"),
        machine=SimpleNamespace(ranks=3),
        cluster=SimpleNamespace(words="the cluster"),
        log_sizes="sizes",
        display=SimpleNamespace(
            notice=lambda text, level="info": told.append((level, text)),
            expect=lambda ranks, sizes: told.append((ranks, sizes)),
            status=told.append,
        ),
    )
    run._Run._greet(cast(Any, unfinished))
    greeting = [("info", "run night in runs/night"), ("info", "a reason"), (3, "sizes")]
    warnings = [] if is_shared else [("warning", "3 are many")]
    assert told == [*greeting, *warnings, "starting 3 ranks on a local cluster"]
    told.clear()
    unfinished.machine = unfinished.choice = None
    unfinished.options.evaluation = SimpleNamespace(words="the best checkpoint")
    run._Run._greet(cast(Any, unfinished))
    assert told == [("info", "evaluating the best checkpoint"), "connecting to the cluster"]
