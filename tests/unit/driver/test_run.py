"""Decisions of `train` that need no ranks; runs with ranks are in tests/end_to_end and tests/integration."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ddptrain.driver import run
from ddptrain.driver.run import LaunchOptions
from ddptrain.results.layout import RunLayout
from ddptrain.results.lookup import RunView
from ddptrain.results.run_record import RunRecord

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
