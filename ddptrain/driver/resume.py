"""Chooses the run that `--resume` continues. Changed settings are listed, and refused unless they are allowed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddptrain.config.load import load_data
from ddptrain.config.resolved import ResolvedConfig
from ddptrain.config.wording import shorten
from ddptrain.errors import ConfigError, RunLocked, UsageError
from ddptrain.protocol.rank_spec import PARAM, same_model
from ddptrain.results import ownership
from ddptrain.results.run import Run
from ddptrain.results.run_record import DriverRecord, RunStatus, root_cause
from ddptrain.results.runs import Runs
from ddptrain.results.secure_files import read_bytes

AUTO = "auto"
_COMPARED = ("workload", "params")


@dataclass(frozen=True, slots=True)
class Choice:
    """The folder of the run to continue, or None to start a new run; `reason` is shown to the user.

    driver: the last driver of that run. done: the run, if it has the requested id and has already succeeded.
    """

    folder: Path | None
    reason: str
    driver: DriverRecord | None = None
    done: Run | None = None


def choose(
    runs: Runs, which: str, resolved: ResolvedConfig, *, allow_changes: bool = False, run_id: str | None = None
) -> Choice:
    """Choose the run to continue.

    `auto` continues the newest run of this name if it has not succeeded and its workload and params are the same;
    otherwise it starts a new run. With `allow_changes` they may differ. With a `run_id`, `auto` means that run: it is
    started, continued, or has already succeeded. Runs of other users are ignored.

    Raises:
        RunNotFound: there is no such run.
        UsageError: the run succeeded, has another workload or other params, or belongs to another user.
        RunLocked: `auto` found a run that is running, or may be running on another host.
    """
    if which == AUTO and run_id is None:
        return _newest(runs, resolved, allow_changes=allow_changes)
    found = runs.get(str(run_id)) if which == AUTO else runs.find(which)
    if found is None:
        return Choice(None, "starting a new run: no earlier run has this id")
    view = found
    if view.why_foreign():
        raise UsageError(
            f"run {view.run_id} in {view.root} can't be resumed: its directory, or the link to it, belongs to "
            "another user; resume a run of your own, or start a new one"
        )
    if which == AUTO:
        _require_ended(view)
    changes = list(_changes(view, resolved))
    if view.status == RunStatus.SUCCEEDED and which == AUTO and not (allow_changes and changes):
        return Choice(None, f"run {run_id} has succeeded: there is nothing left to do", done=view)
    if view.status == RunStatus.SUCCEEDED and not allow_changes:
        raise UsageError(
            f"run {view.run_id} has succeeded: there is nothing to resume (--allow-changes trains it further)"
        )
    if changes and not allow_changes:
        lines = "".join(f"\n  {change}" for change in changes)
        raise UsageError(f"run {view.run_id} was made with other settings; --allow-changes continues anyway:{lines}")
    return _continue(view, changes)


def _newest(runs: Runs, resolved: ResolvedConfig, *, allow_changes: bool) -> Choice:
    """Choose the newest run of this name, if it can be continued."""
    name = resolved.config.name
    named = [view for view in runs.list() if view.record.name == name and not view.problem]
    ours = [view for view in named if not view.why_foreign()]
    if not ours:
        return Choice(None, f"starting a new run: there is no run named {name} to resume in {runs.where}")
    for view in [ours[0], *(each for each in ours[1:] if each.goes_on)]:
        _require_ended(view)
        if view.status == RunStatus.QUEUED:
            raise RunLocked(f"run {view.run_id} is queued: give --run-id to start it here, or stop it first")
    view = ours[0]
    changes = list(_changes(view, resolved))
    if changes and not allow_changes and view.status != RunStatus.SUCCEEDED:
        had = ", ".join(changes)
        return Choice(None, f"starting a new run: run {view.run_id} {_how_it_ended(view)}, but had {had}")
    if view.status == RunStatus.SUCCEEDED and not (changes and allow_changes):
        return Choice(None, f"starting a new run: the last run of this name, {view.run_id}, has succeeded")
    return _continue(view, changes)


def _continue(view: Run, changes: Sequence[str]) -> Choice:
    changed = f", with {', '.join(changes)}" if changes else ""
    reason = f"continuing run {view.run_id}, which {_how_it_ended(view)}{changed}"
    return Choice(view.root, reason, view.record.driver)


def _require_ended(view: Run) -> None:
    """Raise RunLocked for a run that is running, because it must not run twice."""
    if view.is_running:
        # run.json may still name the previous driver, because a driver takes the lock first.
        who = ownership.holder(view.lock_file) or view.record.driver.description
        raise RunLocked(
            f"run {view.run_id} is running: {who}; wait for it to end, or stop it with ddptrain stop {view.argument}"
        )


def _how_it_ended(view: Run) -> str:
    words = {
        RunStatus.QUEUED: "was queued",
        RunStatus.CANCELLED: "was cancelled",
        RunStatus.PREEMPTED: "was preempted",
        RunStatus.SUCCEEDED: "succeeded",
    }
    why = f" ({shorten(cause, 100)})" if (cause := root_cause(view.record.failure)) else ""
    return f"{words.get(RunStatus(view.status), 'failed') if view.status in set(RunStatus) else view.status}{why}"


def _changes(layout: Run, resolved: ResolvedConfig) -> Iterator[str]:
    """Yield changes of workload and params, as "params.epochs 20 (now 30)". Secrets are not compared."""
    try:
        before = load_data(read_bytes(layout.config_yaml), str(layout.config_yaml))
    except (OSError, ConfigError):
        yield "a config.yaml that can't be read"
        return
    flat_before = dict(_flat({key: before.get(key) for key in _COMPARED} if isinstance(before, dict) else {}))
    flat_now = dict(_flat({key: resolved.recorded[key] for key in _COMPARED}))
    for key in [*flat_now, *(key for key in flat_before if key not in flat_now)]:
        old, new = flat_before.get(key), flat_now.get(key)
        if old != new and not (key == f"params.{PARAM}" and same_model(old, new)):
            texts = (shorten(str(flat[key]), 40) if key in flat else "not given" for flat in (flat_before, flat_now))
            yield "{} {} (now {})".format(key, *texts)


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, Mapping) and (value or not prefix):  # params: {} is no parameter
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", list(value) if isinstance(value, tuple) else value
