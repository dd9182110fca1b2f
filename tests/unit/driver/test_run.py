"""Decisions of `train` that need no ranks; runs with ranks are in tests/end_to_end and tests/integration."""

from __future__ import annotations

import json
import os
import queue
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ddptrain.clusters import compatibility
from ddptrain.config.run_config import RunConfig
from ddptrain.driver import attempts, connect, resume, run
from ddptrain.driver.attempt.inbox import ResultsLost
from ddptrain.driver.cluster_check import before_run
from ddptrain.driver.display import run_summary
from ddptrain.driver.evaluation_plan import EvaluationPlan
from ddptrain.driver.failure import run_end as run_ends
from ddptrain.driver.failure.run_end import RunEnd
from ddptrain.driver.run import LaunchOptions
from ddptrain.driver.transfer import code_package
from ddptrain.driver.worker_group import worker_group as worker_group_module
from ddptrain.driver.worker_group.reservation import SlotRequest
from ddptrain.errors import ClusterError, Interrupted, UsageError
from ddptrain.results.checkpoints import verification
from ddptrain.results.errors import ResultsError
from ddptrain.results.layout import RunLayout
from ddptrain.results.lookup import RunView
from ddptrain.results.run_record import FailureRecord, RunRecord, RunStatus
from ddptrain.results.run_store import LocalRuns
from ddptrain.results.run_writer import RunWriter
from tests.unit.notes import Notes, noted

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
    with run._locked_run(cast(Any, config), cast(Any, options), cast(Any, choice), cast(Any, runs)) as (folder, upload):
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
        cluster=SimpleNamespace(description="the cluster"),
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
        cluster=SimpleNamespace(description="the cluster"),
        log_sizes="sizes",
        display=SimpleNamespace(
            notice=lambda text, level="info": told.append((level, text)),
            expect=lambda ranks, sizes: told.append((ranks, sizes)),
            status=told.append,
        ),
    )
    run._Run._show_start(cast(Any, unfinished))
    first_lines = [("info", "run night in runs/night"), ("info", "a reason"), (3, "sizes")]
    warnings = [] if is_shared else [("warning", "3 are many")]
    assert told == [*first_lines, *warnings, "starting 3 ranks on a local cluster"]
    told.clear()
    unfinished.machine = unfinished.choice = None
    unfinished.options.evaluation = SimpleNamespace(description="the best checkpoint")
    run._Run._show_start(cast(Any, unfinished))
    assert told == [("info", "evaluating the best checkpoint"), "connecting to the cluster"]


# --- train: what is done before and around a run ---


class Around:
    """Everything around a run: each call is noted in its order, and the steps return what their names say."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, embedded: bool = True) -> None:
        self.notes: list[tuple[Any, ...]] = []
        self.config = SimpleNamespace(
            cluster=SimpleNamespace(is_embedded=embedded), results=SimpleNamespace(dir="runs")
        )
        self.resolved = SimpleNamespace(config=self.config)
        self.fetched = SimpleNamespace(config=SimpleNamespace(name="with weights"))
        self.layout = SimpleNamespace(decision_log="decisions", inputs_dir="inputs")
        self.writer = Notes(self.notes, "writer", layout=self.layout, run_id="r", secrets="secrets")
        self.keeping = Notes(self.notes, "keeping")
        self.choice: Any = None
        self.runs: Any = "runs dir"
        self.made: dict[str, Any] = {}
        for name in ("check_trackers", "check_tls", "check_workload", "tell_begun"):
            self._step(monkeypatch, name, None)
        self._step(monkeypatch, "local_resources", "machine")
        self._step(monkeypatch, "_prepared_by", "prepared")
        self._step(monkeypatch, "fetch_weights", (self.fetched, "weights"))
        monkeypatch.setattr(run, "RunInputs", lambda *given: ("inputs", *given))
        monkeypatch.setattr(run, "open_runs_dir", lambda folder: self._note("open_runs_dir", self.runs, folder))
        monkeypatch.setattr(run, "_choose_resume", lambda *given: self._note("_choose_resume", self.choice, *given))
        blocks = {"_locked_run": ("folder", self.keeping), "_opened": self.writer, "signals_to": "signals"}
        for name, value in {**blocks, "stop_requests": None, "driver_log": None}.items():
            monkeypatch.setattr(run, name, self._block(name, value))
        monkeypatch.setattr(run, "_Run", self._new_run)

    def _note(self, name: str, value: Any, *given: Any) -> Any:
        self.notes.append((name, *given))
        return value

    def _step(self, monkeypatch: pytest.MonkeyPatch, name: str, value: Any) -> None:
        monkeypatch.setattr(run, name, lambda *given: self._note(name, value, *given))

    def _block(self, name: str, value: Any) -> Any:
        @contextmanager
        def entered(*given: Any, **options: Any) -> Iterator[Any]:
            self.notes.append((name, *given, *([options] if options else [])))
            yield value

        return entered

    def _new_run(self, *given: Any) -> Any:
        names = ("resolved", "options", "writer", "inbox", "signals", "machine", "choice", "keeping", "inputs")
        self.made = dict(zip(names, given, strict=True))
        return SimpleNamespace(run=lambda: 7)

    def train(self, **options: Any) -> int:
        return run.train(cast(Any, self.resolved), LaunchOptions(**options))

    def calls(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.notes if call[0] == name]


def test_run_is_checked_locked_and_recorded_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    around = Around(monkeypatch)
    assert around.train(run_id="night", ready_fd=5) == 7
    made = around.made
    config, layout, inbox = around.config, around.layout, made["inbox"]
    assert around.notes == [
        ("_prepared_by", config),
        ("check_trackers", config),
        ("check_tls", around.resolved),
        ("local_resources", config.cluster, os.environ),
        ("open_runs_dir", "runs"),
        ("_choose_resume", around.resolved, made["options"], "runs dir"),
        ("check_workload", around.resolved),
        ("fetch_weights", around.resolved, None),
        ("_locked_run", around.fetched.config, made["options"], None, "runs dir"),
        ("_opened", around.fetched, "folder", None, None),
        ("signals_to", inbox),
        ("stop_requests", around.writer, "signals"),
        ("driver_log", "decisions", "r", "secrets", {"only_own": False}),
        ("writer.save_git_diff",),
        ("keeping.begin",),
        ("tell_begun", 5, layout, ""),
    ]
    assert made["resolved"] is around.fetched and made["writer"] is around.writer and made["choice"] is None
    assert (made["signals"], made["machine"], made["keeping"]) == ("signals", "machine", around.keeping)
    assert made["inputs"] == ("inputs", "prepared", "inputs", "weights")


def test_other_clusters_get_no_resources_of_this_machine_and_nobody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    around = Around(monkeypatch, embedded=False)
    around.train()
    assert around.made["machine"] is None and around.calls("local_resources") == around.calls("tell_begun") == []


def test_run_of_several_uses_the_signals_and_resources_that_they_share(monkeypatch: pytest.MonkeyPatch) -> None:
    around = Around(monkeypatch)
    shared = SimpleNamespace(signals=lambda inbox: ("its signals", inbox))
    around.train(shared=shared)
    signals = ("its signals", around.made["inbox"])
    assert around.made["signals"] == signals and around.made["machine"] is None
    assert around.calls("signals_to") == [] and around.calls("stop_requests") == [(around.writer, signals)]
    assert around.calls("driver_log")[0][-1] == {"only_own": True}


@pytest.mark.parametrize("is_local", [True, False])
def test_resumed_run_is_told_with_its_reason_and_its_last_driver_only_if_it_is_no_copy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_local: bool
) -> None:
    around = Around(monkeypatch)
    around.choice = SimpleNamespace(folder="earlier", reason="it failed", driver="driver", done=None)
    around.runs = LocalRuns(tmp_path) if is_local else "a store"
    around.train(resume="auto", ready_fd=5)
    assert around.calls("fetch_weights") == [(around.resolved, "earlier")]
    assert around.calls("_opened") == [(around.fetched, "folder", around.choice, "driver" if is_local else None)]
    assert around.calls("tell_begun") == [(5, around.layout, "it failed")] and around.made["choice"] is around.choice


def test_evaluation_prepares_its_own_data_and_needs_no_starting_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    around = Around(monkeypatch)
    around.train(evaluation=EvaluationPlan("m:score", {}, prepare="m:held_out"))
    assert around.made["inputs"] == ("inputs", "m:held_out", "inputs", None)
    assert around.calls("_prepared_by") == around.calls("fetch_weights") == []
    assert around.made["resolved"] is around.resolved


def test_run_that_has_succeeded_is_not_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    around = Around(monkeypatch)
    around.choice = SimpleNamespace(folder=None, reason="done", done="view")
    monkeypatch.setattr(run, "_already_done", lambda *given: ("done", given[:2]))
    done: object = around.train(resume="auto")
    assert done == ("done", ("view", "done")) and around.notes[-1][0] == "_choose_resume"


def test_run_id_that_is_no_name_of_a_folder_is_refused_before_it_is_part_of_a_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    around = Around(monkeypatch)
    with pytest.raises(UsageError):
        around.train(run_id="../night", resume="auto")
    assert around.calls("_choose_resume") == []


def test_run_to_resume_is_chosen_among_the_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(resume, "choose", lambda *given, **options: noted(chosen, (*given, options), "choice"))
    runs: Any = SimpleNamespace(candidates=lambda *given: given)
    resolved: Any = SimpleNamespace(config=SimpleNamespace(name="digits"))
    assert run._choose_resume(resolved, LaunchOptions(run_id="night"), runs) is None
    options = LaunchOptions(run_id="night", resume="auto", allow_changes=True)
    choice: object = run._choose_resume(resolved, options, runs)
    expected = {"allow_changes": True, "run_id": "night"}
    assert choice == "choice" and chosen == [(("digits", "auto", "night"), "auto", resolved, expected)]


@pytest.mark.parametrize(
    ("choice", "opened"),
    [
        (None, ("create", Path("/runs"), "night", "digits", "yaml", "m:f")),
        (SimpleNamespace(folder=None), ("create", Path("/runs"), "night", "digits", "yaml", "m:f")),
        (SimpleNamespace(folder=Path("/x")), ("reopen", Path("/runs/night"), "yaml", "driver")),
    ],
)
def test_run_directory_is_opened_again_only_for_a_run_that_is_resumed(
    monkeypatch: pytest.MonkeyPatch, choice: Any, opened: tuple[Any, ...]
) -> None:
    writers = {name: lambda *given, name=name: SimpleNamespace(opened=(name, *given)) for name in ("create", "reopen")}
    monkeypatch.setattr(run, "RunWriter", SimpleNamespace(**writers))
    config = SimpleNamespace(name="digits", workload_name="m:f")
    resolved: Any = SimpleNamespace(config=config, yaml_text="yaml", secrets="secrets")
    writer: Any = run._opened(resolved, Path("/runs/night"), choice, cast(Any, "driver"))
    assert (writer.opened, writer.secrets) == (opened, "secrets")


@pytest.mark.parametrize(
    ("name", "backend", "found", "here"),
    [
        (None, "local", "", True),
        (None, "slurm", "", False),
        ("dev", "local", "slurm", False),
        ("dev", "x", "local", True),
    ],
)
def test_inputs_are_prepared_here_only_for_workers_of_this_host(
    monkeypatch: pytest.MonkeyPatch, name: str | None, backend: str, found: str, here: bool
) -> None:
    record = SimpleNamespace(record=SimpleNamespace(backend=found))
    monkeypatch.setattr(run, "cluster_records", SimpleNamespace(find=lambda name: {"dev": record}[name]))
    monkeypatch.setattr(run, "prepare_target", lambda workload, params, *, here: f"{workload} {params} {here}")
    cluster = SimpleNamespace(name=name, backend=backend)
    config: Any = SimpleNamespace(cluster=cluster, workload="images", params="params")
    assert run._prepared_by(config) == f"images params {here}"
    config.workload = SimpleNamespace(module="mine")
    assert run._prepared_by(config) == ""


def test_workers_need_the_module_of_the_workload() -> None:
    assert run._module_needed(RunConfig(workload="mine:train")) == "mine:train"
    script = {"workload": {"module": "pkg.train"}}
    assert run._module_needed(RunConfig.model_validate(script)) == "pkg.train:"
    assert run._module_needed(RunConfig.model_validate({"workload": {"script": "t.py"}})) == "runpy:"


# --- a run: its parts, its steps and its end ---


def unfinished_run(**parts: Any) -> Any:
    """A run with these parts alone."""
    made = run._Run.__new__(run._Run)
    for name, part in parts.items():
        setattr(made, name, part)
    return made


@pytest.fixture
def logs(tmp_path: Path) -> Any:
    """A layout with the log of rank 1, which has 3 bytes."""
    (tmp_path / "log").write_text("abc")
    return SimpleNamespace(logs=lambda: {1: tmp_path / "log"}, logs_dir="logs", scratch_dir="scratch", where="runs/r")


def new_run(options: LaunchOptions, notes: list[tuple[Any, ...]], layout: Any) -> Any:
    resolved: Any = SimpleNamespace(config="config")
    writer: Any = Notes(notes, "writer", layout=layout, run_id="r")
    keeping: Any = Notes(notes, "keeping")
    rest: Any = ("machine", "choice", keeping, "inputs")
    return run._Run(resolved, options, writer, queue.SimpleQueue(), cast(Any, "signals"), *rest)


def test_shared_run_opens_neither_display_nor_cluster_and_hears_of_lost_results(logs: Any) -> None:
    notes: list[tuple[Any, ...]] = []
    display = Notes(notes, "display")
    shared: Any = SimpleNamespace(display=display, cluster="cluster")
    made = new_run(LaunchOptions(shared=shared), notes, logs)
    assert (made.display, made.cluster, made.inputs, made.log_sizes) == (display, "cluster", "inputs", {1: 3})
    assert made.warned is False and notes == [("keeping.listen", *notes[0][1:]), ("writer.keep_heartbeat", made._abort)]
    warn, lose = notes[0][1:]
    assert warn.__self__.display is display and warn.__name__ == "warn"
    error = ResultsError("lost")
    lose(error)
    assert made.inbox.get_nowait() == ResultsLost(error)


@pytest.mark.parametrize(
    ("options", "stdout", "all_ranks", "stage"),
    [
        ({}, None, False, ""),
        ({"all_ranks": True}, None, True, ""),
        ({"to_stderr": True, "evaluation": EvaluationPlan("m:f", {})}, sys.stderr, False, "evaluate"),
    ],
)
def test_run_of_its_own_opens_its_display_and_its_cluster(
    monkeypatch: pytest.MonkeyPatch, logs: Any, options: dict[str, Any], stdout: Any, all_ranks: bool, stage: str
) -> None:
    monkeypatch.setattr(sys, "stderr", sys.stderr if stdout is None else stdout)
    opened: list[tuple[Any, ...]] = []
    display = SimpleNamespace(notice="notice")
    monkeypatch.setattr(run, "open_display", lambda *given, **more: noted(opened, (*given, more), display))
    monkeypatch.setattr(run, "cluster_for", lambda *given: given)
    made = new_run(LaunchOptions(output="plain", **options), [], logs)
    assert opened == [("plain", "logs", "r", {"stdout": stdout, "all_ranks": all_ranks, "stage": stage})]
    assert made.display is display and made.cluster == ("config", "machine", "scratch", "notice")


@pytest.mark.parametrize(
    ("error", "code"), [(None, 0), (ClusterError("no cluster"), 4), (Interrupted(15), 143), (KeyError("bug"), None)]
)
def test_every_end_is_written_and_a_bug_is_raised_afterwards(error: BaseException | None, code: int | None) -> None:
    ends: list[RunEnd] = []

    def train() -> RunEnd:
        if error is not None:
            raise error
        return WELL

    made = unfinished_run(writer=SimpleNamespace(record=RunRecord()), _train=train)
    made._end = lambda end: noted(ends, end, end)
    if code is None:
        with pytest.raises(KeyError):
            made.run()
        assert ends[0].exit_code == 3
    else:
        assert made.run() == code and type(made.run()) is int
        assert ends[0].exit_code == code


@pytest.mark.parametrize("embedded", [True, False])
@pytest.mark.parametrize("is_shared", [True, False])
def test_cluster_begins_first_and_data_are_checked_before_one_is_started_for_them(
    monkeypatch: pytest.MonkeyPatch, embedded: bool, is_shared: bool
) -> None:
    notes: list[tuple[Any, ...]] = []
    target = SimpleNamespace(foreign=False)
    session = SimpleNamespace(client="client", target=target, news="news")

    @contextmanager
    def note(name: str, value: Any) -> Iterator[Any]:
        notes.append((name,))
        yield value
        notes.append((f"{name} ends",))

    group = Notes(notes, "group")
    made_with: dict[str, Any] = {}

    def maker(name: str, value: Any) -> Any:
        def make(*given: Any, **options: Any) -> Any:
            made_with[name] = (*given, options)
            return value() if callable(value) else value

        return make

    series = SimpleNamespace(run=lambda: noted(notes, ("series",), WELL))
    monkeypatch.setattr(attempts, "AttemptSeries", maker("series", series))
    monkeypatch.setattr(attempts, "RunContext", maker("context", "context"))
    monkeypatch.setattr(before_run, "CheckedSlots", maker("checked", "checked"))
    monkeypatch.setattr(connect, "open_session", maker("session", lambda: note("session", session)))
    monkeypatch.setattr(worker_group_module, "WorkerGroup", maker("group", lambda: note("group", group)))
    monkeypatch.setattr(os, "environ", {"A": "1", "B": "2"})
    config = SimpleNamespace(env={"B": "3"}, params="params", failure=SimpleNamespace(lost_after_s=9.0))
    options = LaunchOptions(
        shared=cast(Any, SimpleNamespace(session=session)) if is_shared else None, full_traceback=True
    )
    display = SimpleNamespace(status="status", notice="notice")
    made = unfinished_run(
        cluster=Notes(notes, "cluster"),
        inputs=Notes(notes, "inputs"),
        signals=SimpleNamespace(interrupting=lambda: note("waits", None), check="check"),
        options=options,
        config=config,
        resolved="resolved",
        machine="machine" if embedded else None,
        writer=SimpleNamespace(run_id="r"),
        display=display,
        inbox="inbox",
        _show_start=lambda: notes.append(("show_start",)),
        _checkpoint=lambda: "checkpoint",
        _wait_hooks=lambda *given: ("hooks", *given),
        _reserved=lambda *given: given,
    )
    assert made._train() == WELL
    assert notes == [
        ("cluster.begin",),
        ("inputs.begin", "params", {"A": "1", "B": "3"}),
        ("show_start",),
        ("waits",),
        *([] if embedded else [("inputs.wait", "notice")]),
        *([] if is_shared else [("session",)]),
        ("group",),
        ("group.subscribe",),
        ("inputs.wait", "notice"),
        ("waits ends",),
        ("series",),
        ("group ends",),
        *([] if is_shared else [("session ends",)]),
        ("inputs.close",),
        ("cluster.close",),
    ]
    assert made_with["group"] == ("client", "r", "inbox", 9.0, {"foreign": False, "news": "news"})
    assert made_with.get("session") == (None if is_shared else (made.cluster, config, "status", {}))
    _, _, recorder, *_ = made_with["checked"]
    assert made_with["checked"] == (config, group, recorder, "check", {})
    assert (recorder.writer, recorder.display) == (made.writer, display)
    *context, inputs, full_traceback, evaluation, _ = made_with["context"]
    assert context[:6] == ["resolved", made.writer, display, made.signals, made.cluster, group]
    assert context[6]() == (group, ("hooks", "client", target), "checked")
    assert (inputs, full_traceback, evaluation) == (made.inputs, True, None)
    assert made_with["series"] == ("context", "checkpoint", {})


def test_inputs_of_an_evaluation_are_those_of_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[tuple[Any, ...]] = []

    def show_start() -> None:
        raise ClusterError("enough")

    plan = EvaluationPlan("m:f", {}, request={"data": "held out"})
    made = unfinished_run(
        cluster=Notes(notes, "cluster"),
        inputs=Notes(notes, "inputs"),
        options=LaunchOptions(evaluation=plan),
        config=SimpleNamespace(env={}, params="params"),
        _show_start=show_start,
    )
    with pytest.raises(ClusterError):
        made._train()
    assert notes[1][1] == {"data": "held out"} and [call[0] for call in notes[2:]] == ["inputs.close", "cluster.close"]


@pytest.mark.parametrize(
    ("found", "script", "told"),
    [
        (SimpleNamespace(description="checkpoint step-3"), None, "resuming from checkpoint step-3"),
        (None, None, "resuming from the start: it has no checkpoint"),
        (None, "t.py", "resuming: the script starts again"),
    ],
)
def test_user_is_told_what_a_resumed_run_starts_from(
    monkeypatch: pytest.MonkeyPatch, found: Any, script: str | None, told: str
) -> None:
    notices: list[tuple[str, str]] = []

    def newest(layout: str, warn: Any) -> Any:
        warn(f"bad file in {layout}")
        return found

    monkeypatch.setattr(verification, "newest_verified", newest)
    made = unfinished_run(
        choice=SimpleNamespace(folder=Path("/r")),
        writer=SimpleNamespace(layout="layout"),
        display=SimpleNamespace(notice=lambda text, level="info": notices.append((level, text))),
        config=SimpleNamespace(script=script),
    )
    assert made._checkpoint() is found
    assert notices == [("warning", "bad file in layout"), ("info", told)]
    for choice in (None, SimpleNamespace(folder=None)):
        made.choice = choice
        assert made._checkpoint() is None
    assert len(notices) == 2


@pytest.mark.parametrize("foreign", [True, False])
@pytest.mark.parametrize("project", [None, "project"])
def test_foreign_workers_are_checked_for_what_does_not_go_along(
    monkeypatch: pytest.MonkeyPatch, foreign: bool, project: str | None
) -> None:
    checked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(compatibility, "check_cluster", lambda *given: checked.append(given))
    monkeypatch.setattr(code_package, "project_of", lambda resolved: project)
    order: list[str] = []
    made = unfinished_run(
        cluster=SimpleNamespace(last_words="last words", worker_fault=lambda: order.append("fault")),
        signals=SimpleNamespace(check=lambda: order.append("check")),
        display=SimpleNamespace(status="status"),
        resolved=SimpleNamespace(import_folders=("/p",)),
        config=RunConfig(workload="mine:train"),
    )
    hooks = made._wait_hooks("client", SimpleNamespace(foreign=foreign, name="dev", fixed=True))
    assert (hooks.last_words, hooks.tell, hooks.cluster, hooks.fixed) == ("last words", "status", "dev", True)
    assert hooks.worker_fault() is None and order == ["check", "fault"]
    assert (hooks.check is not None) == foreign
    if hooks.check is not None:
        hooks.check(["w"])
        module = "mine:train" if project is None else "ddptrain:"
        assert checked == [("client", ["w"], compatibility.Needs(module, ("/p",)))]


@pytest.mark.parametrize(
    ("asked", "late", "plan", "notices", "lines"),
    [
        (False, False, None, [("error", "run r failed: broken")], "summary"),
        (True, False, None, [("error", "run r failed: broken by stop")], "summary"),
        (False, True, None, [("error", "run r failed: late")], "summary"),
        (False, False, "plan", [], "evaluation"),  # the caller of an evaluation gets its error
    ],
)
def test_end_is_written_before_it_is_shown(
    monkeypatch: pytest.MonkeyPatch,
    logs: Any,
    asked: bool,
    late: bool,
    plan: str | None,
    notices: list[tuple[str, str]],
    lines: str,
) -> None:
    notes: list[tuple[Any, ...]] = []
    named = RunEnd(RunStatus.FAILED, 1, "broken by stop")
    after = RunEnd(RunStatus.FAILED, 4, "late")
    monkeypatch.setattr(run_ends, "name_stop_command", lambda end: named)
    monkeypatch.setattr(run_summary, "summary_lines", lambda *given: ("summary", *given))
    monkeypatch.setattr(run_summary, "evaluation_lines", lambda *given: ("evaluation", *given))
    flushed = iter([named if asked else BROKEN, after if late else (named if asked else BROKEN)])
    ended: list[RunView] = []
    writer = SimpleNamespace(run_id="r", layout=logs, record=RunRecord(run_id="r"))
    made = unfinished_run(
        signals=SimpleNamespace(asked=asked),
        options=LaunchOptions(evaluation=cast(Any, plan), ended=ended.append),
        writer=writer,
        display=SimpleNamespace(
            notice=lambda text, level: notes.append((level, text)), close=lambda *given: notes.append(given)
        ),
        _flushed=lambda end: noted(notes, ("flushed", end), next(flushed)),
        _finish=lambda end: noted(notes, ("finish", end), {"duration_s": 2.5, "end": end.cause}),
    )
    first = named if asked else BROKEN
    last = after if late else first
    assert made._end(BROKEN) is last
    finishes = [("flushed", first), ("finish", first), ("flushed", first), *([("finish", last)] if late else [])]
    closed = ({1: 3}, (lines, writer, last, 2.5), {"duration_s": 2.5, "end": last.cause})
    assert notes == [*finishes, *notices, closed]
    (view,) = ended
    assert (view.layout, view.record) == (logs, writer.record)
