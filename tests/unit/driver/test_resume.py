"""Which run --resume goes on with, and what it says about it."""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ddptrain.config.resolved import ResolvedConfig, resolve
from ddptrain.config.run_config import RunConfig
from ddptrain.driver.resume import Choice, choose
from ddptrain.errors import RunLocked, RunNotFound, UsageError
from ddptrain.results import ownership
from ddptrain.results.errors import ResultsError
from ddptrain.results.run import Run
from ddptrain.results.run_record import DriverRecord, FailureRecord, RunStatus
from ddptrain.results.run_writer import RunWriter
from ddptrain.results.runs import LocalRuns


def config(name: str = "night", **params: Any) -> ResolvedConfig:
    return resolve(RunConfig(workload="train:main", name=name, params={"epochs": 5, **params}), Path("c.yaml"))


def ended(runs: Path, run_id: str, status: RunStatus, made_with: ResolvedConfig | None = None) -> None:
    of = made_with or config()
    with RunWriter.create(runs, run_id, of.config.name, of.yaml_text, of.config.workload_name) as writer:
        failure = FailureRecord(message="killed by SIGKILL") if status == RunStatus.FAILED else None
        writer.finish(status, 0 if status == RunStatus.SUCCEEDED else 1, failure)
    time.sleep(0.002)  # run.json tells milliseconds, and the newest counts


def auto(runs: Path, of: ResolvedConfig | None = None) -> tuple[str | None, str]:
    choice = choose(LocalRuns(runs), "auto", of or config(), allow_changes=False)
    return (choice.folder.name if choice.folder else None), choice.reason


def test_auto_takes_the_newest_that_did_not_succeed(tmp_path: Path) -> None:
    ended(tmp_path, "older", RunStatus.FAILED)
    ended(tmp_path, "newer", RunStatus.CANCELLED)
    ended(tmp_path, "of-another-name", RunStatus.FAILED, config("day"))
    assert auto(tmp_path) == ("newer", "continuing run newer, which was cancelled")


def test_alias_of_the_starting_weights_stands_for_the_version_that_a_run_began_with(tmp_path: Path) -> None:
    ended(tmp_path, "one", RunStatus.FAILED, config(weights="model:dogs@3"))
    assert auto(tmp_path, config(weights="model:dogs@champion"))[0] == "one"
    assert auto(tmp_path, config(weights="model:dogs@4"))[0] is None
    assert auto(tmp_path, config(weights="model:cats@champion"))[0] is None


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in pairwise("abcdefghi")
)


@pytest.mark.parametrize("text", [BOMB, "[" * 10_000, "a: " + "x" * (2 << 20), "a: !!python/name:os.system", "a: *b"])
def test_configuration_of_a_run_that_is_a_bomb_is_not_read(tmp_path: Path, text: str) -> None:
    ended(tmp_path, "one", RunStatus.FAILED)
    (tmp_path / "one" / "config.yaml").write_text(text)
    began = time.process_time()
    assert auto(tmp_path) == (
        None,
        "starting a new run: run one failed (killed by SIGKILL), but had a config.yaml that can't be read",
    )
    assert time.process_time() - began < 5.0


def test_auto_starts_afresh_where_the_parameters_are_others(tmp_path: Path) -> None:
    ended(tmp_path, "failed", RunStatus.FAILED)
    folder, reason = auto(tmp_path, config(epochs=9, extra=True))
    assert folder is None
    assert reason.endswith("but had params.epochs 5 (now 9), params.extra not given (now True)")


@pytest.mark.parametrize("later", [None, RunStatus.FAILED, RunStatus.SUCCEEDED])
def test_auto_starts_nothing_while_a_run_of_this_name_is_running(tmp_path: Path, later: RunStatus | None) -> None:
    ended(tmp_path, "failed", RunStatus.FAILED)
    with RunWriter.create(tmp_path, "running", "night", config().yaml_text, "train:main") as running:
        if later is not None:
            time.sleep(0.002)
            ended(tmp_path, "later", later)
        words = rf"run running is running: process {os.getpid()} on {socket.gethostname()}; .*ddptrain stop"
        with pytest.raises(RunLocked, match=words) as refused:
            auto(tmp_path)
        assert refused.value.exit_code == 6
        assert auto(tmp_path, config("day"))[0] is None
        running.finish(RunStatus.SUCCEEDED, 0)


def test_auto_names_who_has_the_lock_also_before_run_json_does(tmp_path: Path) -> None:
    ended(tmp_path, "night", RunStatus.FAILED)
    layout = Run(tmp_path / "night")
    killed = dataclasses.replace(Run(layout.root).record, status=RunStatus.RUNNING, driver=DriverRecord(1, "old"))
    layout.run_json.write_text(killed.to_json())
    held = ownership.LockFile(layout.lock_file).take()
    try:
        with pytest.raises(RunLocked, match=rf"run night is running: process {os.getpid()} on"):
            auto(tmp_path)
    finally:
        held.release()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a run to another user")
def test_runs_of_other_users_are_not_taken_up_and_do_not_keep_us_waiting(tmp_path: Path) -> None:
    ended(tmp_path, "ours", RunStatus.FAILED)
    ended(tmp_path, "theirs", RunStatus.FAILED)
    os.mkfifo(tmp_path / "theirs" / ".store.json")
    (tmp_path / "theirs" / "config.yaml").unlink()
    os.mkfifo(tmp_path / "theirs" / "config.yaml")
    os.chown(tmp_path / "theirs", 65534, 65534)
    before = (tmp_path / "theirs" / "run.lock").stat().st_mtime_ns
    assert auto(tmp_path)[0] == "ours"
    with pytest.raises(UsageError, match=r"run theirs in .* can't be resumed: .*belongs to another user"):
        choose(LocalRuns(tmp_path), "theirs", config(), allow_changes=True)
    with pytest.raises(UsageError, match="belongs to another user"):
        idempotent(tmp_path, "theirs")
    with pytest.raises(ResultsError, match="belongs to another user"):
        RunWriter.reopen(tmp_path / "theirs", "")
    assert (tmp_path / "theirs" / "run.lock").stat().st_mtime_ns == before


def idempotent(runs: Path, run_id: str, of: ResolvedConfig | None = None, *, allow_changes: bool = False) -> Choice:
    return choose(LocalRuns(runs), "auto", of or config(), allow_changes=allow_changes, run_id=run_id)


def test_auto_with_a_run_id_creates_goes_on_with_or_is_done_with_that_run(tmp_path: Path) -> None:
    ended(tmp_path, "night-2", RunStatus.FAILED)  # not the run of which "night" is only the start
    created = idempotent(tmp_path, "night")
    assert (created.folder, created.done) == (None, None)
    assert created.reason == "starting a new run: no earlier run has this id"
    with RunWriter.create(tmp_path, "night", "night", config().yaml_text, "train:main") as writer:
        with pytest.raises(RunLocked, match="run night is running: process"):
            idempotent(tmp_path, "night")
        writer.finish(RunStatus.PREEMPTED, 75)
    resumed = idempotent(tmp_path, "night")
    assert (resumed.folder, resumed.done) == (tmp_path / "night", None)
    assert resumed.reason == "continuing run night, which was preempted"
    with pytest.raises(UsageError, match="made with other settings"):
        idempotent(tmp_path, "night", config(epochs=9))
    with RunWriter.reopen(tmp_path / "night", config().yaml_text) as writer:
        writer.finish(RunStatus.SUCCEEDED, 0)
    for of, allow_changes in ((config(), False), (config(), True), (config(epochs=9), False)):
        over = idempotent(tmp_path, "night", of, allow_changes=allow_changes)
        assert over.done is not None and over.folder is None
        assert over.reason == "run night has succeeded: there is nothing left to do"
    further = idempotent(tmp_path, "night", config(epochs=9), allow_changes=True)
    assert further.folder == tmp_path / "night" and further.reason.endswith("with params.epochs 5 (now 9)")


@pytest.mark.parametrize("status", [RunStatus.FAILED, RunStatus.SUCCEEDED])
def test_auto_goes_on_with_other_parameters_where_they_are_allowed(tmp_path: Path, status: RunStatus) -> None:
    ended(tmp_path, "older", RunStatus.FAILED)
    ended(tmp_path, "newer", status)
    choice = choose(LocalRuns(tmp_path), "auto", config(epochs=9), allow_changes=True)
    assert choice.folder == tmp_path / "newer" and choice.reason.endswith(", with params.epochs 5 (now 9)")


def test_a_run_that_was_resumed_since_it_was_chosen_is_not_resumed_again(tmp_path: Path) -> None:
    ended(tmp_path, "one", RunStatus.FAILED)
    seen = choose(LocalRuns(tmp_path), "auto", config(), allow_changes=False).driver
    layout = Run(tmp_path / "one")
    record = dataclasses.replace(Run(layout.root).record, driver=DriverRecord(1, "another-host", "its-boot"))
    layout.run_json.write_text(record.to_json())
    with pytest.raises(RunLocked, match="run one was resumed by process 1 on another-host in the meantime"):
        RunWriter.reopen(layout.root, "", seen)


def test_named_run_is_refused_where_it_succeeded_or_was_another(tmp_path: Path) -> None:
    ended(tmp_path, "good", RunStatus.SUCCEEDED)
    ended(tmp_path, "other", RunStatus.FAILED, config(epochs=1))
    with pytest.raises(UsageError, match="run good has succeeded"):
        choose(LocalRuns(tmp_path), "good", config(), allow_changes=False)
    with pytest.raises(UsageError, match=r"other settings; --allow-changes continues.*\n  params\.epochs 1 \(now 5\)"):
        choose(LocalRuns(tmp_path), "other", config(), allow_changes=False)
    with pytest.raises(RunNotFound):
        choose(LocalRuns(tmp_path), "nothing", config(), allow_changes=False)


def test_secrets_are_not_taken_for_changes(tmp_path: Path) -> None:
    ended(tmp_path, "failed", RunStatus.FAILED, config(api_key="one"))
    assert auto(tmp_path, config(api_key="other"))[0] == "failed"
