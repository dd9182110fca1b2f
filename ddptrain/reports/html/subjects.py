"""Finds what a report is about: runs, sweeps and models, by their names on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddptrain.errors import RunNotFound, UsageError
from ddptrain.model_registry.model_reader import ModelReader
from ddptrain.model_registry.reference import check_model_name, is_model_reference
from ddptrain.reports.html.limits import MOST_RUNS
from ddptrain.reports.html.model_card import ModelCard, read_model
from ddptrain.reports.html.sweep import Sweep, is_sweep, read_sweep
from ddptrain.results.lookup import RunView, load_run
from ddptrain.results.remote.runs import open_runs_dir, split_run
from ddptrain.results.run_store import NeededFiles
from ddptrain.storage.remote_folder import is_url

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
    sweeps: list[Sweep] = []
    models: list[ModelCard] = []
    for name in dict.fromkeys(names):
        if (folder := _sweep_folder(name, runs_dir)) is not None:
            sweeps.append(read_sweep(folder))
        elif is_model_reference(name):
            models.append(read_model(ModelReader.open(models_dir), name))
        else:
            _add_run_or_model(name, runs_dir, models_dir, views, models)
    if len(sweeps) > 1:
        raise UsageError(f"a report has at most one sweep, got {len(sweeps)}; write one report for each")
    sweep = sweeps[0] if sweeps else None
    views += _runs_of(sweep) if sweep is not None else _runs_of_models(models, runs_dir)
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


def _sweep_folder(name: str, runs_dir: str) -> Path | None:
    """The folder of a sweep: a path, or a name in the folder of runs."""
    if is_url(name) or "\0" in name:
        return None
    candidates = [Path(name)] if "/" in name else [] if is_url(runs_dir) else [Path(runs_dir, name)]
    return next((folder for folder in candidates if is_sweep(folder)), None)


def _runs_of(sweep: Sweep) -> list[RunView]:
    """The runs of the trials that are running, and of the best ones; then of those that failed."""
    running = [trial for trial in sweep.trials if trial.state == "running"]
    failed = [trial for trial in sweep.trials if trial.state == "failed"]
    folders = [sweep.folder / name for trial in (*running, *sweep.ranked(), *failed) for name in trial.run_ids]
    found = [folder for folder in dict.fromkeys(folders) if (folder / "run.json").is_file()]
    return [load_run(folder) for folder in found[:_RUNS_OF_SWEEP]]


def _runs_of_models(models: Sequence[ModelCard], runs_dir: str) -> list[RunView]:
    """The runs of the chosen versions, as far as they still exist."""
    found = []
    for model in models:
        try:
            found.append(open_runs_dir(runs_dir).find(model.chosen.run_id, NeededFiles.REPORT))
        except RunNotFound:
            continue  # its directory was pruned, or is elsewhere
    return found
