"""Which run --resume goes on with, and what it says about it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from ddptrain.config import RunConfig
from ddptrain.configfile import dump_config, resolved_config
from ddptrain.driver.resume import choose
from ddptrain.errors import RunNotFound, UsageError
from ddptrain.results.record import FailureRecord, RunStatus
from ddptrain.results.writer import RunWriter


def config(name: str = "night", **params: Any) -> RunConfig:
    return RunConfig(workload="train:main", name=name, params={"epochs": 5, **params})


def ended(runs: Path, run_id: str, status: RunStatus, made_with: RunConfig | None = None) -> None:
    of = made_with or config()
    with RunWriter.create(runs, run_id, of.name, dump_config(resolved_config(of)), of.workload_name) as writer:
        failure = FailureRecord(message="killed by SIGKILL") if status == RunStatus.FAILED else None
        writer.finish(status, 0 if status == RunStatus.SUCCEEDED else 1, failure)
    time.sleep(0.002)  # run.json tells milliseconds, and the newest counts


def auto(runs: Path, of: RunConfig | None = None) -> tuple[str | None, str]:
    choice = choose(runs, "auto", of or config(), allow_changes=False)
    return (choice.folder.name if choice.folder else None), choice.reason


def test_auto_takes_the_newest_that_did_not_succeed(tmp_path: Path) -> None:
    ended(tmp_path, "older", RunStatus.FAILED)
    ended(tmp_path, "newer", RunStatus.CANCELLED)
    ended(tmp_path, "of-another-name", RunStatus.FAILED, config("day"))
    assert auto(tmp_path) == ("newer", "going on with run newer, which was cancelled")


def test_auto_says_what_had_failed(tmp_path: Path) -> None:
    ended(tmp_path, "one", RunStatus.FAILED)
    assert auto(tmp_path)[1] == "going on with run one, which failed (killed by SIGKILL)"


def test_auto_starts_afresh_after_a_success(tmp_path: Path) -> None:
    ended(tmp_path, "failed", RunStatus.FAILED)
    ended(tmp_path, "good", RunStatus.SUCCEEDED)
    assert auto(tmp_path) == (None, "starting afresh: the last run of this name, good, has succeeded")


def test_auto_starts_afresh_where_the_parameters_are_others(tmp_path: Path) -> None:
    ended(tmp_path, "failed", RunStatus.FAILED)
    folder, reason = auto(tmp_path, config(epochs=9, extra=True))
    assert folder is None
    assert reason.endswith("but had params.epochs 5 (now 9), params.extra None (now True)")


def test_auto_starts_afresh_where_there_is_none(tmp_path: Path) -> None:
    assert auto(tmp_path / "runs")[0] is None


def test_auto_leaves_a_run_alone_that_another_driver_runs(tmp_path: Path) -> None:
    ended(tmp_path, "failed", RunStatus.FAILED)
    with RunWriter.create(tmp_path, "running", "night", dump_config(config()), "train:main") as running:
        assert auto(tmp_path)[0] == "failed"
        running.finish(RunStatus.SUCCEEDED, 0)


def test_named_run_is_refused_where_it_succeeded_or_was_another(tmp_path: Path) -> None:
    ended(tmp_path, "good", RunStatus.SUCCEEDED)
    ended(tmp_path, "other", RunStatus.FAILED, config(epochs=1))
    with pytest.raises(UsageError, match="run good has succeeded"):
        choose(tmp_path, "good", config(), allow_changes=False)
    with pytest.raises(UsageError, match=r"other settings; --allow-changes goes on.*\n  params\.epochs 1 \(now 5\)"):
        choose(tmp_path, "other", config(), allow_changes=False)
    with pytest.raises(RunNotFound):
        choose(tmp_path, "nothing", config(), allow_changes=False)


def test_changes_that_are_allowed_are_told(tmp_path: Path) -> None:
    ended(tmp_path, "other", RunStatus.FAILED, config(epochs=1))
    choice = choose(tmp_path, "other", config(), allow_changes=True)
    assert choice.folder == tmp_path / "other" and choice.reason.endswith(", with params.epochs 1 (now 5)")


def test_secrets_are_not_taken_for_changes(tmp_path: Path) -> None:
    ended(tmp_path, "failed", RunStatus.FAILED, config(api_key="one"))
    assert auto(tmp_path, config(api_key="other"))[0] == "failed"
