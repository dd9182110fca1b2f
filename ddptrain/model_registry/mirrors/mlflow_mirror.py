"""The mirror `mlflow`: versions with an alias are model versions of MLflow's registry, with the same aliases.

Options: tracking_uri and registry_uri (by default those of MLFLOW_TRACKING_URI and MLFLOW_REGISTRY_URI), experiment.
MLflow numbers its versions itself; the tags ddptrain.version and ddptrain.sha256 say which of ours one is.
"""

from __future__ import annotations

import os
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from ddptrain.errors import UsageError
from ddptrain.optional_packages import install_command
from ddptrain.protocol.model_mirror import MirroredModel, MirroredVersion

if TYPE_CHECKING:
    from mlflow import MlflowClient

_VERSION, _SHA256 = "ddptrain.version", "ddptrain.sha256"
_FOLDER = "model"
_EXPERIMENT = "ddptrain-models"


def mirror(model: MirroredModel) -> None:
    """Add the versions that MLflow lacks, and set the aliases. Raises UsageError, and what mlflow raises."""
    # By default, mlflow tries seven times for two minutes each before it reports that a server cannot be reached.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", f"{max(1, int(model.timeout_s))}")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    try:
        from mlflow import MlflowClient
    except ModuleNotFoundError as error:
        raise UsageError(f"the package mlflow is not installed here: {install_command('mlflow')}") from error
    client = MlflowClient(model.options.get("tracking_uri"), model.options.get("registry_uri"))
    _create_model(client, model.name)
    for version in model.versions:  # the champion is the first: a problem of another version does not delay it
        number = _find_version(client, model.name, version) or _create_version(client, model, version)
        for alias in version.aliases:
            client.set_registered_model_alias(model.name, alias, number)
    for alias in set(client.get_registered_model(model.name).aliases) & {model.removed_alias}:
        client.delete_registered_model_alias(model.name, alias)


def _create_model(client: MlflowClient, name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _find_version(client: MlflowClient, name: str, version: MirroredVersion) -> str:
    """Return MLflow's number of a version, or ""."""
    wanted = {_VERSION: str(version.number), _SHA256: version.sha256}
    pages = [client.search_model_versions(f"name = '{name}'")]
    while pages[-1].token:
        pages.append(client.search_model_versions(f"name = '{name}'", page_token=pages[-1].token))
    found = [each for page in pages for each in page if wanted.items() <= each.tags.items()]
    return str(found[0].version) if found else ""


def _create_version(client: MlflowClient, model: MirroredModel, version: MirroredVersion) -> str:
    """Upload the files of a version as artifacts of a run, and register them. Returns MLflow's number."""
    record = version.record
    tags = {_VERSION: str(version.number), _SHA256: version.sha256, "ddptrain.run_id": str(record["run_id"])}
    name = str(model.options.get("experiment") or _EXPERIMENT)
    known = client.get_experiment_by_name(name)
    experiment = str(known.experiment_id if known else client.create_experiment(name))
    # A process that was killed may have left a run without a registered version: its upload is done again there.
    same = [f"tags.`{name}` = '{value}'" for name, value in tags.items()]
    runs = client.search_runs([experiment], " and ".join([*same, f"tags.`ddptrain.model` = '{model.name}'"]))
    run_name, run_tags = f"{model.name}-{version.number}", {**tags, "ddptrain.model": model.name}
    run = runs[0] if runs else client.create_run(experiment, tags=run_tags, run_name=run_name)
    for metric, value in {**record["metrics"], **record["evaluation"]}.items():
        if value is not None:
            client.log_metric(run.info.run_id, metric, value, step=record["step"])
    folder = version.open()
    for path in version.files:
        client.log_artifact(run.info.run_id, str(folder / path), str(PurePosixPath(_FOLDER, path).parent))
    client.set_terminated(run.info.run_id)
    source = f"{run.info.artifact_uri}/{_FOLDER}"
    made = client.create_model_version(
        model.name, source, run.info.run_id, tags=tags, description=model.reason or None, await_creation_for=0
    )
    model.tell(f"MLflow has version {version.number} of {model.name} as version {made.version}")
    return str(made.version)
