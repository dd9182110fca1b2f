"""Scores checkpoints on the same held-out data with the same code, in one launch on the ranks of the configuration."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ddptrain.config.plugin_names import BUILT_IN
from ddptrain.config.resolved import ResolvedConfig, resolve
from ddptrain.config.run_config import ResultsConfig
from ddptrain.config.sections.tracking import TrackingConfig
from ddptrain.config.wording import shorten
from ddptrain.driver.rank_specs import EvaluationPlan
from ddptrain.driver.run import LaunchOptions, train
from ddptrain.errors import DdptrainError, HangDetected, Interrupted, TrainingFailed, UsageError, one_line
from ddptrain.file_ops import read_regular
from ddptrain.model_registry.model_reader import RECORD
from ddptrain.model_registry.records import VersionRecord
from ddptrain.results.checkpoints.verification import VerifiedCheckpoint, verify
from ddptrain.results.errors import CheckpointDamaged, results_errors
from ddptrain.results.layout import BEST, RunLayout, new_run_id
from ddptrain.results.lookup import find_checkpoint, list_runs, load_run, parse_time
from ddptrain.results.run_record import RecordError, RunRecord, root_cause
from ddptrain.results.runs import LocalRuns
from ddptrain.results.secure_files import make_folder
from ddptrain.retrain.start import read_metrics
from ddptrain.run_handle import error_of
from ddptrain.storage.store import is_url

Value = TypeVar("Value")

FOLDER = ".evaluations"  # below results.dir: the run directories of evaluations
_MOST_KEPT = 5  # run directories of evaluations that failed


@dataclass(frozen=True, slots=True)
class EvaluationTarget:
    """What is scored: its name, and a folder laid out like a run directory (a run, or a version of a model)."""

    name: str
    folder: Path


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The scores of each target by metric; a target that could not be scored has none, and a reason in `failures`.

    held_out, n: the digest (SHA-256) and the number of the data, "" and 0 if the user's function knows them alone.
    notes: remarks for the user, the failures included.
    """

    scores: Mapping[str, Mapping[str, float]]
    held_out: str = ""
    n: int = 0
    noun: str = ""
    notes: tuple[str, ...] = ()
    failures: Mapping[str, str] = dataclasses.field(default_factory=dict)


def evaluate(
    resolved: ResolvedConfig,
    targets: Sequence[EvaluationTarget],
    *,
    output: str = "auto",
    data: str | None = None,
    to_stderr: bool = False,
) -> Evaluation:
    """Score all targets on the data that the first one held out, or on the source `data`.

    The first target must be scored; of the others a note says why they were not. output: as for `ddptrain train`, shown
    on stderr if `to_stderr`. The metrics of scripts are read from files; nothing is launched for them.

    Raises:
        UsageError: the first target cannot be evaluated, or there is nothing to evaluate it on.
        ClusterError, TrainingFailed, HangDetected, Interrupted, ...: the launch failed. The message names its
            run directory.
    """
    names = [target.name for target in targets]
    if not names or len(set(names)) < len(names):
        raise UsageError(f"name different things to evaluate, not {' and '.join(names) or 'none'}")
    if resolved.config.script is not None:
        return _script_scores(resolved, targets, data)
    function = _function(resolved)
    first = targets[0]
    checkpoints, failures = _of_each(targets, lambda target: _checkpoint(target, resolved))
    launch = partial(_launch, resolved, function, first, data, output, to_stderr)
    try:
        result = launch(checkpoints)
    except (TrainingFailed, HangDetected) as error:
        if len(checkpoints) == 1:
            raise
        # Another target may have crashed or stopped a rank: without it, the first one can still be scored.
        failures |= dict.fromkeys([name for name in checkpoints if name != first.name], one_line(error))
        result = launch({first.name: checkpoints[first.name]})
    failures |= result.failures
    notes = [f"{name} has no scores: {reason}" for name, reason in failures.items()]
    return dataclasses.replace(result, failures=failures, notes=(*result.notes, *notes))


def _of_each(
    targets: Sequence[EvaluationTarget], get: Callable[[EvaluationTarget], Value]
) -> tuple[dict[str, Value], dict[str, str]]:
    """What `get` returns for each target, by name, and why not for the others. Raises the error of the first target."""
    results, failures = {targets[0].name: get(targets[0])}, {}
    for target in targets[1:]:
        try:
            results[target.name] = get(target)
        except DdptrainError as error:
            failures[target.name] = one_line(error)
    return results, failures


def script_metrics(resolved: ResolvedConfig, *, since: datetime | None = None) -> dict[str, float]:
    """Read the metrics that a script has written: the file workload.metrics, relative to the working directory.

    since: the start of the run; an older file is of another run.

    Raises UsageError if there is no such file, or it has no numbers by name.
    """
    script = resolved.config.script
    if script is None or script.metrics is None:
        raise UsageError(
            "workload.metrics is not set: name the JSON file in which the script writes its metrics, as metrics.json"
        )
    path = Path(os.path.abspath(os.path.expanduser(script.metrics)))
    metrics = read_metrics(path)
    if not metrics:
        raise UsageError(f'{path} (workload.metrics) has no metrics: write an object such as {{"val/loss": 2.1}}')
    if since is not None and path.stat().st_mtime < since.timestamp():
        raise UsageError(f"{path} (workload.metrics) is older than the run: the script did not write it")
    return metrics


def _launch(
    resolved: ResolvedConfig,
    function: str,
    first: EvaluationTarget,
    data: str | None,
    output: str,
    to_stderr: bool,
    checkpoints: Mapping[str, VerifiedCheckpoint],
) -> Evaluation:
    """Launch ranks that score checkpoints on the held-out data of `first`. Raises the error that ended them."""
    config = resolved.config
    built_in = BUILT_IN.get(str(config.workload))
    plan = EvaluationPlan(
        function=function,
        checkpoints=checkpoints,
        prepare=built_in.held_out if built_in else "",
        request={"params": dict(config.params), "run": str(first.folder), "data": data},
        data=data,
    )
    with _runs_folder(config.results.dir) as folder:
        changed = config.model_copy(
            update={"results": ResultsConfig(dir=str(folder)), "tracking": TrackingConfig(), "retrain": None}
        )
        derived = resolve(changed, resolved.path)
        derived = dataclasses.replace(derived, import_folders=resolved.import_folders)
        run_id = new_run_id(config.name)
        layout = RunLayout(folder / run_id)
        options = LaunchOptions(run_id, output, evaluation=plan, to_stderr=to_stderr)
        try:
            exit_code = train(derived, options)
            if exit_code:
                raise _failure(layout, exit_code)
            return _result(layout)
        finally:
            failure = load_run(layout.root).record.failure if layout.run_json.is_file() else None
            if failure is None or failure.rank is None:  # no rank has failed, so that its log may be needed
                shutil.rmtree(layout.root, ignore_errors=True)


def _function(resolved: ResolvedConfig) -> str:
    """Return the function that scores a checkpoint. Raises UsageError if the workload has none."""
    config = resolved.config
    built_in = BUILT_IN.get(str(config.workload))
    function = built_in.evaluate if built_in else config.evaluate
    if not function:
        raise UsageError(
            f"the workload {config.workload} cannot be evaluated: write a function (ctx, checkpoint) that returns "
            "metrics, and name it in the configuration, as evaluate: module:function"
        )
    return function


def _checkpoint(target: EvaluationTarget, resolved: ResolvedConfig) -> VerifiedCheckpoint:
    """Return the best checkpoint of a target, compared with its hashes. Raises UsageError."""
    layout = RunLayout(target.folder)
    try:
        record = RunRecord.from_json(read_regular(layout.run_json))
    except (OSError, RecordError) as error:
        raise UsageError(f"{target.folder} is neither a run nor a version of a model: {one_line(error)}") from error
    if record.workload != resolved.config.workload_name:
        raise UsageError(
            f"{target.name} is a model of the workload {shorten(record.workload)}, not of "
            f"{resolved.config.workload_name}"
        )
    try:
        return verify(find_checkpoint(layout, BEST))
    except (CheckpointDamaged, OSError) as error:
        raise UsageError(f"the checkpoint of {target.name} is damaged: {one_line(error)}") from error


@contextmanager
def _runs_folder(place: str) -> Iterator[Path]:
    """Yield the folder for the run directories of evaluations; it is removed if nothing is kept in it.

    Of evaluations that have failed the newest run directories are kept. Raises ResultsError.
    """
    if is_url(place):
        folder = Path(tempfile.mkdtemp(prefix="ddptrain-evaluation-"))
        is_new = False
    else:
        folder = Path(os.path.abspath(os.path.expanduser(place)), FOLDER)
        is_new = not folder.parent.exists()
        with results_errors(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
        make_folder(folder)
        runs = LocalRuns(folder)
        for view in [view for view in list_runs(folder) if not view.is_running][_MOST_KEPT:]:
            with suppress(DdptrainError):  # it runs after all, or it cannot be deleted
                runs.delete(view)
    try:
        yield folder
    finally:
        with suppress(OSError):  # it has the run directory of an evaluation that failed, or of one that is running
            folder.rmdir()
            if is_new:
                folder.parent.rmdir()


def _failure(layout: RunLayout, exit_code: int) -> DdptrainError:
    record = load_run(layout.root).record
    failure = record.failure
    if failure is None:
        cause = f"the evaluation ended as {record.status}"
    elif failure.rank is None:
        cause = failure.message
    else:
        cause = f"the evaluation failed: {root_cause(failure)}; log: {failure.log}"
    error = error_of(exit_code, cause)
    if not isinstance(error, Interrupted):
        error.exit_code = exit_code
    return error


def _result(layout: RunLayout) -> Evaluation:
    """Return the scores in run.json, and the description of the data in the run's inputs. Raises TrainingFailed."""
    result = load_run(layout.root).record.result
    if not isinstance(result, dict) or not isinstance(result.get("scores"), dict):
        raise TrainingFailed(f"the evaluation returned no scores: see the logs in {layout.logs_dir}")
    held_out: dict[str, Any] = {}
    with suppress(FileNotFoundError):
        held_out = json.loads((layout.inputs_dir / "held_out.json").read_bytes())
    return Evaluation(
        scores={
            name: {metric: float(value) for metric, value in scores.items()}
            for name, scores in result["scores"].items()
        },
        held_out=str(held_out.get("digest", "")),
        n=int(held_out.get("n", 0)),
        noun=str(held_out.get("noun", "")),
        notes=tuple(result["notes"]),
        failures=result["failures"],
    )


def _script_scores(resolved: ResolvedConfig, targets: Sequence[EvaluationTarget], data: str | None) -> Evaluation:
    """Return the metrics of scripts: those that a version has recorded, or for a run those in the declared file."""
    if data is not None:
        raise UsageError("--data: a script evaluates itself, so it cannot be scored on other data")
    scores, failures = _of_each(targets, lambda target: _script_score(resolved, target))
    notes = tuple(f"{name} has no scores: {reason}" for name, reason in failures.items())
    return Evaluation(scores, notes=notes, failures=failures)


def _script_score(resolved: ResolvedConfig, target: EvaluationTarget) -> dict[str, float]:
    record = target.folder / RECORD
    if record.is_file():
        metrics = VersionRecord.from_json(record.read_bytes(), str(record)).metrics
        if not metrics:
            raise UsageError(f"{target.name} has no recorded metrics")
        return dict(metrics)
    run = load_run(target.folder).record
    return script_metrics(resolved, since=parse_time(run.started_at))
