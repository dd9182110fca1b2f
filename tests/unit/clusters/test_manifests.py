"""What is sent to Kubernetes and to Slurm, from known settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from ddptrain.clusters.backends import kubernetes, slurm
from ddptrain.clusters.provider import DriverJob
from ddptrain.clusters.record import ClusterRecord
from ddptrain.clusters.security import make_tls
from ddptrain.config.sections.clusters import ClusterConfig, KubernetesSettings, SlurmSettings


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def objects(**settings: Any) -> dict[str, Any]:
    """The objects of a cluster of two workers, by kind and name."""
    config = ClusterConfig(backend="kubernetes", kubernetes=KubernetesSettings(image="image", **settings))
    cluster = ClusterRecord(name="dev", config=config, workers=2)
    cluster.folder.mkdir()
    make_tls(cluster.folder)
    made = kubernetes.manifests(cluster, "owner")
    for each in made:
        kubernetes_validate.validate(each, "1.33", strict=True)
    return {f"{each['kind']} {each['metadata']['name']}": each for each in made}


def test_objects_follow_the_published_schemas_and_have_the_label_that_finds_them() -> None:
    made = objects()
    assert set(made) == {"Secret dev-tls", "Service dev-scheduler", "Job dev-scheduler", "Job dev-worker"}
    assert {each["metadata"]["labels"]["ddptrain-owner"] for each in made.values()} == {"owner"}
    spec = made["Job dev-worker"]["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (2, 2, "Indexed")
    container = spec["template"]["spec"]["containers"][0]
    assert container["args"][-4:] == ["--gpus", "none", "--timeout", "600"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"], "64 MB are too little"


def test_settings_of_pods_are_those_of_kubernetes() -> None:
    made = objects(
        gpus_per_worker=4,
        resources={"requests": {"memory": "8Gi"}},
        volumes=[{"name": "big", "mountPath": "/dev/shm", "emptyDir": {"medium": "Memory"}}],
        pod={
            "nodeSelector": {"pool": "gpu"},
            "priorityClassName": "high",
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
        },
    )
    pod = made["Job dev-worker"]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert container["resources"] == {"requests": {"memory": "8Gi"}, "limits": {"nvidia.com/gpu": "4"}}
    assert [mount["name"] for mount in container["volumeMounts"]] == ["tls", "big"]
    assert (pod["priorityClassName"], pod["nodeSelector"]) == ("high", {"pool": "gpu"})
    assert made["Job dev-scheduler"]["spec"]["template"]["spec"]["tolerations"], "also of the scheduler"


def test_batch_script_has_the_settings_and_the_users_directives_last() -> None:
    settings = SlurmSettings(
        partition="gpu long",
        gres="gpu:4",
        directives=["--mem=64G", "#SBATCH --cpus-per-task=32"],
        setup=["module load x"],
    )
    config = ClusterConfig(backend="slurm", slurm=settings)
    lines = slurm.batch_script(config, 2, 4, {"requeue": ""}, ["one command"]).splitlines()
    stated = [line for line in lines if line.startswith("#SBATCH")]
    assert lines[0] == "#!/bin/bash" and '#SBATCH --partition="gpu long"' in stated and "#SBATCH --nodes=2" in stated
    assert stated[-2:] == ["#SBATCH --mem=64G", "#SBATCH --cpus-per-task=32"]
    assert "#SBATCH --requeue" in stated and lines[-1] == "one command"


def test_job_of_a_driver_follows_the_published_schemas() -> None:
    volumes = [{"name": "runs", "mountPath": "/runs", "persistentVolumeClaim": {"claimName": "runs"}}]
    settings = KubernetesSettings(image="image", volumes=volumes, pod={"serviceAccountName": "ml"})
    driver = DriverJob(
        "lines", "lines-1", Path("/runs/lines-1"), ["train", "x.yaml"], ["--run-id", "lines-1"], {"a": 1}
    )
    job, secret = kubernetes.driver_manifests(settings, driver, "lines-1-ab", "kubernetes c/n/lines-1-ab lines-1")
    for each in (job, secret):
        kubernetes_validate.validate(each, "1.33", strict=True)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["args"][-4:] == ["train", "--run-id", "lines-1", "/run/ddptrain/train.yaml"]
    assert {"name": "runs", "mountPath": "/runs"} in container["volumeMounts"] and pod["serviceAccountName"] == "ml"
