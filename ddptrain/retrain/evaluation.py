"""Scores checkpoints on the same held-out data with the same code, in one launch on the ranks of the configuration."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ddptrain.config.plugin_names import BUILT_IN
from ddptrain.config.resolved import ResolvedConfig, resolve
from ddptrain.config.run_config import ResultsConfig
from ddptrain.config.sections.tracking import TrackingConfig
from ddptrain.config.wording import shorten
from ddptrain.driver.rank_specs import EvaluationPlan
from ddptrain.driver.run import LaunchOptions, train
from ddptrain.errors import DdptrainError, HangDetected, Interrupted, TrainingFailed, UsageError, one_line
from ddptrain.file_ops import read_regular
from ddptrain.results.checkpoints.verification import VerifiedCheckpoint, verify
from ddptrain.results.errors import CheckpointDamaged, results_errors
from ddptrain.results.layout import BEST, new_run_id
from ddptrain.results.prune import PrunePolicy, prune
from ddptrain.results.run import Run
from ddptrain.results.run_record import RecordError, RunRecord, root_cause
from ddptrain.results.runs import open_runs_dir
from ddptrain.results.secure_files import make_folder
from ddptrain.run_handle import error_of
from ddptrain.storage.store import is_url

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


_RESULT = TypeAdapter(Evaluation)


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
    on stderr if `to_stderr`.

    Raises:
        UsageError: the first target cannot be evaluated, or there is nothing to evaluate it on.
        ClusterError, TrainingFailed, HangDetected, Interrupted, ...: the launch failed. The message names its
            run directory.
    """
    names = [target.name for target in targets]
    if not names or len(set(names)) < len(names):
        raise UsageError(f"name different things to evaluate, not {' and '.join(names) or 'none'}")
    function = _function(resolved)
    first = targets[0]
    checkpoints, failures = {first.name: _checkpoint(first, resolved)}, dict[str, str]()
    for target in targets[1:]:
        try:
            checkpoints[target.name] = _checkpoint(target, resolved)
        except DdptrainError as error:
            failures[target.name] = one_line(error)
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
            update={"results": ResultsConfig(dir=str(folder)), "tracking": TrackingConfig()}
            | dict.fromkeys(("retrain", "stop_early"))
        )
        derived = resolve(changed, resolved.path)
        derived = dataclasses.replace(derived, import_folders=resolved.import_folders)
        run_id = new_run_id(config.name)
        layout = Run(folder / run_id)
        options = LaunchOptions(run_id, output, evaluation=plan, to_stderr=to_stderr)
        try:
            exit_code = train(derived, options)
            if exit_code:
                raise _failure(layout, exit_code)
            return _result(layout)
        finally:
            failure = layout.record.failure if layout.run_json.is_file() else None
            if failure is None or failure.rank is None:  # no rank has failed, so that its log may be needed
                shutil.rmtree(layout.root, ignore_errors=True)


def _function(resolved: ResolvedConfig) -> str:
    """Return the function that scores a checkpoint. Raises UsageError if the workload has none."""
    config = resolved.config
    built_in = BUILT_IN.get(str(config.workload))
    if function := built_in.evaluate if built_in else config.evaluate:
        return function
    what = "a script" if config.script is not None else f"the workload {config.workload}"
    raise UsageError(
        f"{what} cannot be evaluated: write a function (ctx, checkpoint) that returns metrics, and name it in the "
        "configuration, as evaluate: module:function; the workload must be a function, too"
    )


def _checkpoint(target: EvaluationTarget, resolved: ResolvedConfig) -> VerifiedCheckpoint:
    """Return the best checkpoint of a target, compared with its hashes. Raises UsageError."""
    layout = Run(target.folder)
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
        return verify(layout.checkpoint(BEST))
    except (CheckpointDamaged, OSError) as error:
        raise UsageError(f"the checkpoint of {target.name} is damaged: {one_line(error)}") from error


@contextmanager
def _runs_folder(place: str) -> Iterator[Path]:
    """Yield the folder for the run directories of evaluations. Those that have failed stay, the newest five.

    For a store it is a temporary folder. Raises ResultsError.
    """
    if is_url(place):
        folder = Path(tempfile.mkdtemp(prefix="ddptrain-evaluation-"))
    else:
        folder = Path(os.path.abspath(os.path.expanduser(place)), FOLDER)
        with results_errors(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
        make_folder(folder)
        prune(open_runs_dir(str(folder)), PrunePolicy(keep=0, failed_keep=_MOST_KEPT), {})
    try:
        yield folder
    finally:
        with suppress(OSError):  # an evaluation has failed, or another one runs
            folder.rmdir()


def _failure(layout: Run, exit_code: int) -> DdptrainError:
    record = layout.record
    failure = record.failure
    cause = f"the evaluation ended as {record.status}" if failure is None else failure.message
    if failure is not None and failure.rank is not None:
        cause = f"the evaluation failed: {root_cause(failure)}; log: {failure.log}"
    error = error_of(exit_code, cause)
    if not isinstance(error, Interrupted):
        error.exit_code = exit_code
    return error


def _result(layout: Run) -> Evaluation:
    """Return the scores in run.json, and the description of the data in the run's inputs. Raises TrainingFailed."""
    held_out: dict[str, Any] = {}
    with suppress(FileNotFoundError):
        held_out = json.loads((layout.inputs_dir / "held_out.json").read_bytes())
    data = {"held_out": held_out.get("digest", ""), "n": held_out.get("n", 0), "noun": held_out.get("noun", "")}
    try:
        return _RESULT.validate_python({**(layout.record.result or {}), **data})
    except (ValueError, TypeError):
        raise TrainingFailed(f"the evaluation returned no scores: see the logs in {layout.logs_dir}") from None
