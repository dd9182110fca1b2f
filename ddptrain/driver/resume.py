"""Which run `--resume` goes on with, and why; what has changed since is shown, and refused unless it is allowed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ddptrain.config import RunConfig
from ddptrain.configfile import resolved_config, without_secrets
from ddptrain.errors import UsageError
from ddptrain.results.find import RunView, find_run, list_runs, load_run
from ddptrain.results.layout import RunLayout
from ddptrain.results.origin import where_of
from ddptrain.results.record import RunStatus
from ddptrain.wording import shown

AUTO = "auto"
_COMPARED = ("workload", "params")


@dataclass(frozen=True, slots=True)
class Choice:
    """The folder of the run to go on with, or None to start afresh; `reason` says why."""

    folder: Path | None
    reason: str


def choose(runs_dir: Path, which: str, config: RunConfig, *, allow_changes: bool) -> Choice:
    """The run to go on with.

    `auto` takes the newest run of this name that has not succeeded, if its workload and parameters agree, and no later
    one has succeeded; else it starts afresh.

    Raises: RunNotFound; UsageError where the run succeeded, or was another workload or had other parameters.
    """
    if which == AUTO:
        return _auto(runs_dir, config)
    view = load_run(find_run(runs_dir, which))
    if view.status == RunStatus.SUCCEEDED and not allow_changes:
        raise UsageError(
            f"run {view.run_id} has succeeded: there is nothing to resume (--allow-changes trains it further)"
        )
    changes = list(_changes(view.layout, config))
    if changes and not allow_changes:
        lines = "".join(f"\n  {change}" for change in changes)
        raise UsageError(
            f"run {view.run_id} was made with other settings; --allow-changes goes on all the same:{lines}"
        )
    changed = f", with {', '.join(changes)}" if changes else ""
    return Choice(view.layout.root, f"going on with run {view.run_id}, which {_how_it_ended(view)}{changed}")


def _auto(runs_dir: Path, config: RunConfig) -> Choice:
    ours = [view for view in list_runs(runs_dir) if view.record.name == config.name and not view.problem]
    for view in ours:
        if view.is_running:
            continue  # its driver holds the lock, or will tell
        if view.status == RunStatus.SUCCEEDED:
            return Choice(None, f"starting afresh: the last run of this name, {view.run_id}, has succeeded")
        if changes := list(_changes(view.layout, config)):
            return Choice(
                None, f"starting afresh: run {view.run_id} {_how_it_ended(view)}, but had {', '.join(changes)}"
            )
        return Choice(view.layout.root, f"going on with run {view.run_id}, which {_how_it_ended(view)}")
    return Choice(None, f"starting afresh: there is no run named {config.name} to resume in {where_of(runs_dir)}")


def _how_it_ended(view: RunView) -> str:
    words = {
        RunStatus.CANCELLED: "was cancelled",
        RunStatus.PREEMPTED: "was preempted",
        RunStatus.SUCCEEDED: "succeeded",
    }
    failure = view.record.failure
    why = f" ({shown(failure.message.splitlines()[0], 60)})" if failure and failure.message else ""
    return f"{words.get(RunStatus(view.status), 'failed') if view.status in set(RunStatus) else view.status}{why}"


def _changes(layout: RunLayout, config: RunConfig) -> Iterator[str]:
    """What differs in what decides the weights: "params.epochs 20 (now 30)". Secrets are not compared."""
    try:
        before = yaml.safe_load(layout.config_yaml.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        yield "a config.yaml that can't be read"
        return
    now = without_secrets(resolved_config(config)).model_dump(mode="json")
    flat_before = dict(_flat({key: before.get(key) for key in _COMPARED} if isinstance(before, dict) else {}))
    flat_now = dict(_flat({key: now[key] for key in _COMPARED}))
    for key in [*flat_now, *(key for key in flat_before if key not in flat_now)]:
        old, new = flat_before.get(key), flat_now.get(key)
        if old != new:
            yield f"{key} {shown(str(old), 40)} (now {shown(str(new), 40)})"


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", list(value) if isinstance(value, tuple) else value
