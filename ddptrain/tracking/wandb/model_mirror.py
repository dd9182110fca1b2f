"""The mirror `wandb`: versions with an alias become artifacts of type `model`, with the same aliases and version-<n>.

W&B numbers its versions v0, v1, ..., so v<n> cannot be an alias. Its server stores equal files only once: an artifact
that was logged before only gets the new aliases.

Options: project and entity (by default those of the run that trained the version).
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddptrain.errors import ClusterError, DdptrainError
from ddptrain.protocol.model_mirror import MirroredModel, MirroredVersion
from ddptrain.tracking.wandb.credentials import find_access

_OFFLINE = frozenset({"offline", "dryrun", "disabled"})
_TYPE = "model"
_OPEN_SHARE, _FINISH_SHARE = 0.4, 0.9  # shares of the remaining time for opening and for finishing the run
_FINISH_RESERVE_S = 1.0


def mirror(model: MirroredModel) -> None:
    """Log the versions as artifacts. Raises ClusterError if W&B does not take them; RegistryDamaged, StoreError."""
    access = find_access(os.environ)
    variable = (os.environ.get("WANDB_MODE") or access.mode).lower()
    if variable in _OFFLINE or not access.has_credentials:
        why = f"WANDB_MODE is {variable}" if variable in _OFFLINE else "no API key in WANDB_API_KEY or ~/.netrc"
        model.tell(f"W&B does not get the versions of {model.name}: {why}")
        return
    with tempfile.TemporaryDirectory(prefix="ddptrain-wandb-", ignore_cleanup_errors=True) as scratch:
        _log(model, Path(scratch) / "wandb", access.key)


def _log(model: MirroredModel, folder: Path, key: str) -> None:
    """Log all versions in a separate run of the job type `model-registry`."""
    from ddptrain.tracking.wandb import wandb_run
    from ddptrain.tracking.wandb.wandb_artifacts import ArtifactUploads

    if key:
        os.environ["WANDB_API_KEY"] = key
    folder.mkdir()
    wandb_run.prepare(folder)
    try:
        run = wandb_run.open_run(_run_options(model, folder))
    except (Exception, SystemExit) as error:  # wandb raises many types, and exits with its service
        raise ClusterError(f"W&B has opened no run ({wandb_run.reason_of(error)})") from error
    problem: DdptrainError | None = None
    uploads = ArtifactUploads(run, model.name, folder / "links")
    for version in reversed(model.versions):  # the last one gets W&B's alias `latest`: it must be the champion
        try:
            artifact = _artifact(model, version)
        except DdptrainError as error:  # the other versions are logged even if one is damaged
            problem = error
            continue
        uploads.put(artifact, [*version.aliases, f"version-{version.number}"])
    limit_s = max(_FINISH_RESERVE_S, model.timeout_s * (1 - _OPEN_SHARE) * _FINISH_SHARE)
    until = time.monotonic() + limit_s
    complete = uploads.finish(limit_s)
    if not wandb_run.finish(run, "finished", max(_FINISH_RESERVE_S, until - time.monotonic())) or not complete:
        raise ClusterError(f"W&B did not take all files within {limit_s:.0f} s; models.mirror_timeout_s is the limit")
    if uploads.problem:
        raise ClusterError(uploads.problem)
    if problem:
        raise problem
    if run.url:
        model.tell(f"W&B has the versions of {model.name} with an alias: {run.url}")


def _run_options(model: MirroredModel, folder: Path) -> Any:
    from ddptrain.tracking.wandb.wandb_run import RunOptions

    recorded = _recorded(model.versions[0]) if model.versions else {}
    settings = {
        "project": model.options.get("project") or recorded.get("project") or model.name,
        "entity": model.options.get("entity") or recorded.get("entity"),
        "run_name": f"{model.name} {', '.join(f'{each.aliases[0]} {each.number}' for each in model.versions[:2])}",
        "run_job_type": "model-registry",
        "run_notes": model.reason or None,
        "x_disable_stats": True,
    }
    return RunOptions(
        "online",
        secrets.token_hex(4),
        folder,
        {"model": model.name, "versions": {str(each.number): list(each.aliases) for each in model.versions}},
        init_timeout_s=model.timeout_s * _OPEN_SHARE,
        finish_timeout_s=model.timeout_s,
        settings=settings,
    )


def _recorded(version: MirroredVersion) -> Mapping[str, Any]:
    """Return W&B's project and entity of the run that has trained the version, from its run.json; {} if unknown."""
    with suppress(OSError, ValueError, AttributeError, DdptrainError):  # a damaged version is reported later
        run = json.loads((version.open() / "run.json").read_text(encoding="utf-8"))
        return {"project": run.get("name"), **(run.get("tracking", {}).get("wandb") or {})}
    return {}


def _artifact(model: MirroredModel, version: MirroredVersion) -> Any:
    import wandb

    from ddptrain.tracking.wandb.media import artifact_name

    record = version.record
    names = ("run_id", "workload", "step", "epoch", "metrics", "evaluation", "created_at", "parent", "data", "code")
    metadata = {name: record[name] for name in names if record.get(name) not in (None, "", {})}
    artifact = wandb.Artifact(
        artifact_name(model.name),
        type=_TYPE,
        description=f"version {version.number} of {model.name}",
        metadata={**metadata, "version": version.number, "sha256": version.sha256},
    )
    folder = version.open()
    for path in version.files:
        artifact.add_file(str(folder / path), name=path, policy="immutable", skip_cache=True)
    return artifact
