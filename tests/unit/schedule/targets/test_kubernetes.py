"""Kubernetes: the CronJob and the ConfigMap, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ddptrain.errors import UsageError
from ddptrain.schedule.targets.kubernetes import Kubernetes, resource_name
from tests.unit.schedule.jobs import make_job

CRON_JOB = """
apiVersion: batch/v1
kind: CronJob
metadata: {name: ddptrain-petnames, namespace: ml, labels: {app.kubernetes.io/managed-by: ddptrain}}
spec:
  schedule: 0 3 * * 1
  timeZone: Europe/Berlin
  concurrencyPolicy: Forbid
  startingDeadlineSeconds: 601200
  successfulJobsHistoryLimit: 3
  failedJobsHistoryLimit: 3
  jobTemplate:
    spec:
      backoffLimit: 2
      podFailurePolicy:
        rules:
        - {action: Ignore, onPodConditions: [{type: DisruptionTarget}]}
        - {action: Ignore, onExitCodes: {operator: In, values: [75]}}
        - {action: FailJob, onExitCodes: {operator: In, values: [1, 2, 3, 5, 7, 8]}}
      template:
        spec:
          restartPolicy: Never
          terminationGracePeriodSeconds: 90
          containers:
          - name: retrain
            image: registry.example.org/pets:1
            command: [ddptrain, retrain, /etc/ddptrain/nightly.yaml, --slot, Mon 03:00 Europe/Berlin, --output, plain]
            workingDir: /workspace
            env:
            - name: SLACK_URL
              valueFrom: {secretKeyRef: {name: ddptrain-petnames-env, key: SLACK_URL, optional: true}}
            resources: {limits: {nvidia.com/gpu: 2}}
            volumeMounts:
            - {name: config, mountPath: /etc/ddptrain, readOnly: true}
            - {name: work, mountPath: /workspace}
          volumes:
          - {name: config, configMap: {name: ddptrain-petnames}}
          - {name: work, persistentVolumeClaim: {claimName: pets}}
"""


def test_cron_job_and_config_map() -> None:
    job = make_job(secrets=("SLACK_URL",), gpus=2, stop_s=90)
    [part] = Kubernetes("registry.example.org/pets:1", "ml", "pets").parts(job, None)
    config_map, cron_job = yaml.safe_load_all(part.text)
    # The shortest week of the year in Berlin has 167 hours.
    assert cron_job == yaml.safe_load(CRON_JOB)
    assert config_map["data"] == {"nightly.yaml": "workload: petnames\nretrain: {model: petnames}\n"}
    assert config_map["metadata"] == cron_job["metadata"]


def test_jitter_waits_in_a_shell_that_becomes_the_command() -> None:
    [part] = Kubernetes("x").parts(make_job(jitter_s=60), None)
    *_, cron_job = yaml.safe_load_all(part.text)
    command = cron_job["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[:4] == ["/bin/sh", "-c", 'sleep "$(shuf -i 0-60 -n 1)"; exec "$0" "$@"', "ddptrain"]


def test_image_is_required() -> None:
    with pytest.raises(UsageError, match="--as kubernetes needs --image"):
        Kubernetes("").parts(make_job(), None)


def test_secrets_of_the_configuration_are_not_written() -> None:
    with pytest.raises(UsageError, match="contains secrets, which a ConfigMap would show"):
        Kubernetes("x").parts(make_job(hidden=True), None)


@pytest.mark.parametrize("name", ["petnames", "pet_names", "pet.names", "a" * 64, "a" * 43 + "."])
def test_resource_names_are_valid(name: str) -> None:
    import re

    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?", resource_name(name))


def test_resource_names_stay_different() -> None:
    names = ["pet-names", "pet_names", "pet.names", "a" * 60, "a" * 61]
    assert len({resource_name(name) for name in names}) == len(names)


def test_kubectl_checks_before_it_applies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "kubectl"
    tool.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\ncat > {tmp_path}/given\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    target, job = Kubernetes("x", "ml"), make_job()
    parts = target.parts(job, None)
    target.install(job, parts)
    assert (tmp_path / "given").read_text() == parts[0].text
    target.remove("petnames", [])
    assert (tmp_path / "calls").read_text().splitlines() == [
        "apply --dry-run=server -f -",
        "apply -f -",
        "delete --ignore-not-found --namespace=ml cronjob/ddptrain-petnames configmap/ddptrain-petnames",
    ]
