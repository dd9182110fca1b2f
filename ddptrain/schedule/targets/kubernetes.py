"""Kubernetes: a CronJob, and a ConfigMap with the configuration."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ddptrain.errors import ExitCode, UsageError
from ddptrain.schedule.job import Job
from ddptrain.schedule.targets import target
from ddptrain.schedule.targets.target import Part, Target

_MISSING = "install kubectl, or give --output and apply the file where it is"
_CONFIG_FOLDER = "/etc/ddptrain"
_WORK_FOLDER = "/workspace"
_LONGEST_NAME = 52  # of a CronJob, as Kubernetes adds 11 characters for its jobs
_LONGEST_DEADLINE_S = 7 * 86_400
_TRIES = 3
_NOT_AGAIN = (
    *(ExitCode.TRAINING_FAILED, ExitCode.USAGE, ExitCode.INTERNAL),
    *(ExitCode.HANG, ExitCode.REJECTED, ExitCode.DEADLINE),
)


@dataclass(frozen=True, slots=True)
class Kubernetes(Target):
    """A CronJob that never runs twice at a time, and starts a missed time once.

    claim: the PersistentVolumeClaim for the working directory, "" for none.
    """

    image: str
    namespace: str = ""
    claim: str = ""

    def parts(self, job: Job, folder: Path | None) -> list[Part]:
        """See Target."""
        if not self.image:
            raise UsageError("--as kubernetes needs --image: an image with ddptrain and the training code")
        if job.hidden:
            raise UsageError(
                f"{job.config} contains secrets, which a ConfigMap would show: write env:NAME in their place"
            )
        name = f"{resource_name(job.name)}.yaml"
        config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": self._metadata(job)}
        text = target.yaml_text(job, {**config_map, "data": {job.config.name: job.config_text}}, self._cron_job(job))
        return [Part(name, text, folder / name if folder else None)]

    def install(self, job: Job, parts: Sequence[Part]) -> list[str]:
        """See Target."""
        target.run_tool(["kubectl", "apply", "--dry-run=server", "-f", "-"], parts[0].text, missing=_MISSING)
        target.run_tool(["kubectl", "apply", "-f", "-"], parts[0].text, missing=_MISSING)
        return [f"applied; kubectl get cronjob {resource_name(job.name)}{self._in_namespace} shows it"]

    def remove(self, name: str, files: Sequence[Path]) -> None:
        """See Target."""
        which = [f"cronjob/{resource_name(name)}", f"configmap/{resource_name(name)}"]
        inside = [f"--namespace={self.namespace}"] if self.namespace else []
        target.run_tool(["kubectl", "delete", "--ignore-not-found", *inside, *which], missing=_MISSING)

    def notes(self, job: Job) -> list[str]:
        """See Target."""
        notes = (
            []
            if self.claim
            else target.local_models_note(job, "which is lost with the pod: use s3://bucket/folder, or --claim")
        )
        if job.secrets:
            given = " ".join(f"--from-literal={key}=..." for key in job.secrets)
            secret = f"kubectl create secret generic {_secret_name(job)}{self._in_namespace} {given}"
            notes.append(f"secrets are read from the secret {_secret_name(job)}: {secret}")
        return notes + target.missing_time_note(job, "Kubernetes skips this time")

    @property
    def _in_namespace(self) -> str:
        return f" --namespace={self.namespace}" if self.namespace else ""

    def _metadata(self, job: Job) -> dict[str, Any]:
        inside = {"namespace": self.namespace} if self.namespace else {}
        labels = {"app.kubernetes.io/managed-by": "ddptrain"}
        return {"name": resource_name(job.name), **inside, "labels": labels}

    def _cron_job(self, job: Job) -> dict[str, Any]:
        interval_s = int(job.schedule.shortest_interval(datetime.now(UTC)).total_seconds())
        return {
            "apiVersion": "batch/v1",
            "kind": "CronJob",
            "metadata": self._metadata(job),
            "spec": {
                "schedule": job.schedule.cron,
                "timeZone": job.schedule.zone,
                "concurrencyPolicy": "Forbid",
                "startingDeadlineSeconds": min(interval_s, _LONGEST_DEADLINE_S),
                "successfulJobsHistoryLimit": 3,
                "failedJobsHistoryLimit": 3,
                "jobTemplate": {"spec": self._job(job)},
            },
        }

    def _job(self, job: Job) -> dict[str, Any]:
        """Return the job. A lost or preempted pod is replaced and continues; a failed training is not repeated."""
        return {
            "backoffLimit": _TRIES - 1,
            "podFailurePolicy": {
                "rules": [
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
                    {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [int(ExitCode.PREEMPTED)]}},
                    {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [int(c) for c in _NOT_AGAIN]}},
                ]
            },
            "template": {"spec": self._pod(job)},
        }

    def _pod(self, job: Job) -> dict[str, Any]:
        config = f"{_CONFIG_FOLDER}/{job.config.name}"
        command = ["ddptrain", "retrain", config, "--slot", str(job.schedule), "--output", "plain"]
        mounts = [{"name": "config", "mountPath": _CONFIG_FOLDER, "readOnly": True}]
        volumes: list[dict[str, Any]] = [{"name": "config", "configMap": {"name": resource_name(job.name)}}]
        container: dict[str, Any] = {"name": "retrain", "image": self.image, "command": target.jittered(job, command)}
        if self.claim:
            container["workingDir"] = _WORK_FOLDER
            mounts.append({"name": "work", "mountPath": _WORK_FOLDER})
            volumes.append({"name": "work", "persistentVolumeClaim": {"claimName": self.claim}})
        if job.secrets:
            container["env"] = [
                {"name": key, "valueFrom": {"secretKeyRef": {"name": _secret_name(job), "key": key, "optional": True}}}
                for key in job.secrets
            ]
        if job.gpus:
            container["resources"] = {"limits": {"nvidia.com/gpu": job.gpus}}
        container["volumeMounts"] = mounts
        return {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": job.stop_s,
            "containers": [container],
            "volumes": volumes,
        }


def resource_name(name: str) -> str:
    """Return the name of the CronJob: without dots and underscores, and short enough to be unique if it is cut."""
    plain = f"ddptrain-{name}".replace("_", "-").replace(".", "-").rstrip("-")
    if plain == f"ddptrain-{name}" and len(plain) <= _LONGEST_NAME:
        return plain
    digest = hashlib.blake2b(name.encode(), digest_size=4).hexdigest()
    return f"{plain[: _LONGEST_NAME - 9]}-{digest}"  # two names may differ only in what was replaced


def _secret_name(job: Job) -> str:
    return f"{resource_name(job.name)}-env"
