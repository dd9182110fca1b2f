"""Exports runs to MLflow, in a folder or on a tracking server."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddptrain.errors import ClusterError, UsageError, one_line
from ddptrain.optional_packages import install_command
from ddptrain.redact import hide_credentials
from ddptrain.results.compare import flat
from ddptrain.results.export.output import encodable
from ddptrain.results.export.tensorboard import points
from ddptrain.results.lookup import RunView, parse_time
from ddptrain.results.metrics import read_series
from ddptrain.results.recorded_config import params_of
from ddptrain.results.run_record import RunStatus
from ddptrain.storage.remote_folder import is_url

if TYPE_CHECKING:
    from mlflow import MlflowClient

_RUN = "ddptrain.run_id"
_STATUS = {RunStatus.SUCCEEDED: "FINISHED", RunStatus.FAILED: "FAILED", RunStatus.RUNNING: "RUNNING"}
_NOT_IN_NAMES = re.compile(r"[^\w\-. /:]", re.ASCII)
_LONGEST_NAME, _LONGEST_VALUE = 250, 6_000
_MOST_PARAMS, _MOST_METRICS = 100, 1_000  # of one request


def export_mlflow(views: Sequence[RunView], output: str) -> list[str]:
    """Write runs into a folder, or to the tracking server at a URL; the experiment is the name of the run.

    An earlier export of the same run is replaced. Returns the ids of the runs in MLflow.

    Raises UsageError if mlflow is missing; ClusterError if MLflow refuses the data, or does not answer; ResultsError.
    """
    # By default, mlflow tries seven times for two minutes each before it reports that a server cannot be reached.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    try:
        from mlflow import MlflowClient
    except ImportError:
        raise UsageError(f"this needs mlflow: {install_command('mlflow')}, or choose --format csv") from None
    series = [read_series(view.layout.metrics_jsonl, view.record.attempts) for view in views]
    try:
        client = MlflowClient(output if is_url(output) else Path(output).absolute().as_uri())
        return [_export(client, view, run_series) for view, run_series in zip(views, series, strict=True)]
    except Exception as error:  # errors of mlflow, of its HTTP library, and of the disk
        raise ClusterError(hide_credentials(f"cannot export to MLflow in {output}: {one_line(error)}")) from error


def _export(client: MlflowClient, view: RunView, series: Any) -> str:
    record = view.record
    experiment = _experiment(client, record.name or "ddptrain")
    earlier = client.search_runs([experiment], f"tags.`{_RUN}` = '{view.run_id}'")
    tags = {_RUN: view.run_id, "ddptrain.run_dir": view.layout.where, "ddptrain.workload": record.workload}
    if record.git is not None:
        tags["mlflow.source.git.commit"] = record.git.commit
    annotations = view.annotations
    tags |= {f"tag.{tag}": "true" for tag in annotations.tags if not _NOT_IN_NAMES.search(tag)}
    if annotations.note:
        tags["mlflow.note.content"] = encodable(annotations.note)
    began, ended = parse_time(record.started_at), parse_time(record.ended_at)
    start_ms = None if began is None else int(began.timestamp() * 1000)
    run_id: str = client.create_run(experiment, start_ms, tags, view.run_id).info.run_id
    try:
        _log(client, run_id, view, series)
    except BaseException:
        with suppress(Exception):  # the first error matters, not that the server does not answer
            client.delete_run(run_id)
        raise
    status = _STATUS.get(RunStatus(record.status), "KILLED") if record.status in set(RunStatus) else "KILLED"
    if status != "RUNNING":
        client.set_terminated(run_id, status, None if ended is None else int(ended.timestamp() * 1000))
    for run in earlier:
        client.delete_run(run.info.run_id)
    return run_id


def _log(client: MlflowClient, run_id: str, view: RunView, series: Any) -> None:
    from mlflow.entities import Metric, Param

    named = {_name(name): encodable(str(value))[:_LONGEST_VALUE] for name, value in flat(params_of(view))}
    params = [Param(name, value) for name, value in named.items()]
    metrics = [
        Metric(_name(name), value, int(time_s * 1000), step)
        for name in sorted({name for name, _ in series})
        for time_s, step, value in points(series, name)
    ]
    for at in range(0, len(params), _MOST_PARAMS):
        client.log_batch(run_id, params=params[at : at + _MOST_PARAMS])
    for at in range(0, len(metrics), _MOST_METRICS):
        client.log_batch(run_id, metrics=metrics[at : at + _MOST_METRICS])


def _name(name: str) -> str:
    """Return the name with an underscore in place of each character that MLflow refuses."""
    return _NOT_IN_NAMES.sub("_", name)[:_LONGEST_NAME]


def _experiment(client: MlflowClient, name: str) -> str:
    experiment = client.get_experiment_by_name(name)
    return str(experiment.experiment_id) if experiment is not None else str(client.create_experiment(name))
