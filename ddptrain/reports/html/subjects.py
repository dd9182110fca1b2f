"""Finds what a report is about: runs, sweeps and models, by their names on the command line."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddptrain.errors import RunNotFound, UsageError
from ddptrain.model_registry.model_reader import ModelReader, ModelState
from ddptrain.model_registry.records import Change, VersionRecord
from ddptrain.model_registry.reference import check_model_name, is_model_reference, parse_reference
from ddptrain.reports.html.run_card import MOST_RUNS
from ddptrain.reports.html.sweep import SWEEP_JSON, Sweep, is_sweep, read_sweep
from ddptrain.results.lookup import RunView
from ddptrain.results.remote.runs import RunsDir, open_runs_dir, split_run
from ddptrain.results.run_store import LocalRuns, NeededFiles
from ddptrain.storage.remote_folder import is_url

_MOST = 200  # versions and changes, the newest ones
_MOST_METRICS = 8


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model; `chosen` is the version that was asked for. versions, history: the newest first.

    metrics: names of the metrics of the versions, evaluations first; those that most versions have.
    """

    name: str
    where: str
    chosen: VersionRecord
    state: ModelState
    versions: Sequence[VersionRecord]
    history: Sequence[Change]
    metrics: Sequence[str]

    def values(self, version: VersionRecord) -> Mapping[str, float]:
        """Return the metrics of a version; those of its evaluation win over those of its checkpoint."""
        return {**version.metrics, **version.evaluation}


def read_model(reader: ModelReader, name: str) -> ModelCard:
    """Read a model, named as on the command line. Raises UsageError, RegistryDamaged, StoreError."""
    reference = parse_reference(name)
    chosen = reader.resolve(reference)
    versions = reader.versions(reference.model)[-_MOST:][::-1]
    counts: dict[str, int] = {}
    for version in versions:
        for metric in {**version.evaluation, **version.metrics}:
            counts[metric] = counts.get(metric, 0) + 1
    metrics = sorted(counts, key=lambda metric: -counts[metric])[:_MOST_METRICS]
    return ModelCard(
        reference.model,
        reader.where,
        chosen,
        reader.state(reference.model),
        versions,
        reader.history(reference.model)[-_MOST:][::-1],
        metrics,
    )


_RUNS_OF_SWEEP = 50  # the best ones


@dataclass(frozen=True, slots=True)
class Subjects:
    """The runs, the sweep if there is one (its best runs are among the runs), and the models."""

    views: Sequence[RunView]
    sweep: Sweep | None = None
    models: Sequence[ModelCard] = ()

    @property
    def are_running(self) -> bool:
        """Whether a run or the sweep is running."""
        is_sweeping = self.sweep is not None and self.sweep.is_running
        return is_sweeping or any(view.is_running for view in self.views)


def find_subjects(names: Sequence[str], runs_dir: str, models_dir: str) -> Subjects:
    """Return what the names stand for; a name is first that of a run, then of a sweep, then of a model.

    Raises UsageError, RunNotFound, StoreError, RegistryDamaged.
    """
    views: list[RunView] = []
    sweeps: list[tuple[Sweep, RunsDir]] = []
    models: list[ModelCard] = []
    for name in dict.fromkeys(names):
        if (found := _find_sweep(name, runs_dir)) is not None:
            sweeps.append(found)
        elif is_model_reference(name):
            models.append(read_model(ModelReader.open(models_dir), name))
        else:
            _add_run_or_model(name, runs_dir, models_dir, views, models)
    if len(sweeps) > 1:
        raise UsageError(f"a report has at most one sweep, got {len(sweeps)}; write one report for each")
    sweep = sweeps[0][0] if sweeps else None
    views += _runs_of(*sweeps[0]) if sweeps else _runs_of_models(models, runs_dir)
    views = list({view.layout.root: view for view in views}.values())
    if len(views) > MOST_RUNS:
        raise UsageError(f"a report has at most {MOST_RUNS} runs, got {len(views)}; name fewer")
    return Subjects(views, sweep, models)


def _add_run_or_model(name: str, runs_dir: str, models_dir: str, views: list[RunView], models: list[ModelCard]) -> None:
    place, run = split_run(name, runs_dir)
    try:
        views.append(open_runs_dir(place).find(run, NeededFiles.REPORT))
    except RunNotFound:
        reader = ModelReader.open(models_dir) if _could_be_model(name) else None
        if reader is None or not reader.state(name).number:
            raise
        models.append(read_model(reader, name))


def _could_be_model(name: str) -> bool:
    try:
        check_model_name(name)
    except UsageError:
        return False
    return True


def _find_sweep(name: str, runs_dir: str) -> tuple[Sweep, RunsDir] | None:
    """Return the sweep of that path, URL or name in the folder of runs, and its trials' runs; None if there is none."""
    if "\0" in name:
        return None
    if is_url(name) or "/" in name:
        place = name.rstrip("/")
    else:
        place = f"{runs_dir.rstrip('/')}/{name}" if is_url(runs_dir) else str(Path(runs_dir, name))
    runs = open_runs_dir(place)
    if isinstance(runs, LocalRuns):
        return (read_sweep(runs.folder), runs) if is_sweep(runs.folder) else None
    copy = runs.copy_file(SWEEP_JSON)
    return (read_sweep(copy.parent), runs) if copy is not None else None


def _runs_of(sweep: Sweep, runs: RunsDir) -> list[RunView]:
    """Return the runs of the trials that are running, and of the best ones; then of those that failed."""
    running = [trial for trial in sweep.trials if trial.state == "running"]
    failed = [trial for trial in sweep.trials if trial.state == "failed"]
    names = dict.fromkeys(name for trial in (*running, *sweep.ranked(), *failed) for name in trial.run_ids)
    found = (runs.find_exact(name, NeededFiles.REPORT) for name in names)
    return list(itertools.islice((view for view in found if view is not None), _RUNS_OF_SWEEP))


def _runs_of_models(models: Sequence[ModelCard], runs_dir: str) -> list[RunView]:
    """Return the runs of the chosen versions, as far as they still exist."""
    found = []
    for model in models:
        try:
            found.append(open_runs_dir(runs_dir).find(model.chosen.run_id, NeededFiles.REPORT))
        except RunNotFound:
            continue  # its directory was pruned, or is elsewhere
    return found
