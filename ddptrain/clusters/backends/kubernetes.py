"""Clusters in Kubernetes, through kubectl: a Job for the scheduler, an indexed Job with a pod for each worker.

The pods run the same programs as clusters elsewhere, with TLS. kubectl brings the authentication: kubeconfigs, service
accounts in a pod, credential plugins. From a pod the scheduler is reached by the name of its Service, from outside
through `kubectl port-forward`, a process on this machine that outlives the command.

The scheduler is no Deployment: that would start it again, without its state, after it has ended because it was idle.
"""

from __future__ import annotations

import base64
import json
import math
import os
import re
import secrets
import shlex
import socket
import subprocess
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from ddptrain.clusters import processes
from ddptrain.clusters.processes import FOLDER
from ddptrain.clusters.provider import Backend, DriverJob, Tell
from ddptrain.clusters.record import ClusterRecord, Part
from ddptrain.clusters.security import CERT_FILE, KEY_FILE
from ddptrain.config.sections.clusters import ClusterConfig, KubernetesSettings
from ddptrain.errors import ClusterError, ExitCode, UsageError
from ddptrain.protocol.exec_env import JOB

_PORT = 8786
_OWNER = "ddptrain-owner"  # the label that finds all objects of a cluster; its value is random
_ROLE = "ddptrain-role"
_FOLDER = "/run/ddptrain"
_CONFIG = "train.yaml"
# A pod that was evicted, or whose node is drained, is replaced without limit.
_EVICTED = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
_OF_A_MOUNT = ("mountPath", "subPath", "subPathExpr", "readOnly", "mountPropagation")
_SHARED_MEMORY = "/dev/shm"  # noqa: S108  # a mount point in the pod
_FORWARD = "port-forward"
_GRACE_S = 10  # for the pods to end
_SAVED_S = 120  # for a driver to have its ranks save
_KEPT_S = 7 * 24 * 3600  # the job of a driver, after its end
_COMMAND_S = 30.0
_END_S = 60.0
_POLL_S = 0.5
_TELL_EVERY_S = 5.0  # seconds between progress messages: a user may want to interrupt the wait
_LOG_LINES = 5
# "-scheduler" is appended, and a label holds 63 characters.
_NAME = re.compile(r"(?=.{1,53}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?")
# Reasons that waiting does not remove. ErrImagePull becomes ImagePullBackOff after a second try.
_HOPELESS = frozenset(
    {
        "CrashLoopBackOff",
        "CreateContainerConfigError",
        "CreateContainerError",
        "ErrImageNeverPull",
        "ImagePullBackOff",
        "InvalidImageName",
        "RunContainerError",
    }
)
_HARMLESS = frozenset({"", "ContainerCreating", "PodInitializing"})


class KubernetesBackend(Backend):
    """One worker pod with a slot per GPU, or as many as configured, for each worker."""

    tls = True

    def start(self, cluster: ClusterRecord, tell: Tell) -> Generator[Part]:
        """Create the objects, wait for the scheduler's pod, and open the way to it. Raises ClusterError, UsageError."""
        if not _NAME.fullmatch(cluster.name):
            raise UsageError(
                f'"{cluster.name}" is not a cluster name in Kubernetes: use at most 53 lower-case letters, digits and '
                "dashes"
            )
        settings = _settings(cluster.config)
        slots = settings.gpus_per_worker or settings.ranks_per_worker
        cluster.workers = math.ceil(cluster.config.slots / slots) if cluster.config.slots else settings.workers
        objects = Part(role="objects", host=_place(settings), id=secrets.token_hex(8))
        yield objects
        _kubectl(objects, "create", "-f", "-", text="\n".join(map(json.dumps, manifests(cluster, objects.id))))
        tell(f"created the jobs {cluster.name}-scheduler and {cluster.name}-worker")
        shown, shown_at, deadline = "", 0.0, time.monotonic() + cluster.config.start_timeout_s
        while not _is_ready(pod := next(iter(_pods(objects, "scheduler")), None)):
            words, hopeless = _trouble(pod) if pod else ("not there yet", False)
            if hopeless or time.monotonic() > deadline:
                why = _log(objects, pod, _LOG_LINES) if pod else _events(objects, f"{cluster.name}-scheduler")
                late = "" if hopeless else f" after {cluster.config.start_timeout_s:g} s (cluster.start_timeout_s)"
                lines = "".join(f"\n  {line}" for line in why.splitlines() if words not in line)
                raise ClusterError(f"the scheduler's pod: {words or 'is starting'}{late}{lines}")
            if words != shown or time.monotonic() - shown_at > _TELL_EVERY_S:
                tell(f"the scheduler's pod: {words or 'is starting'}")
                shown, shown_at = words, time.monotonic()
            yield objects
            time.sleep(_POLL_S)
        assert pod is not None
        service = f"{cluster.name}-scheduler.{pod['metadata']['namespace']}.svc"
        if "KUBERNETES_SERVICE_HOST" in os.environ and _resolves(service):
            cluster.address = f"tls://{service}:{_PORT}"
            yield objects
        else:
            yield _forward(cluster, objects)

    def fault(self, cluster: ClusterRecord) -> str | None:
        """Return why a pod will never run, or has failed, or that the port-forward has ended; else None."""
        for pod in (pod for objects in cluster.of_role("objects") for pod in _pods(objects)):
            words, hopeless = _trouble(pod)
            if hopeless:
                return f"the pod {pod['metadata']['name']}: {words}"
        return cluster.ended_process()

    def logs(self, cluster: ClusterRecord, lines: int) -> Mapping[str, str]:
        """Return the last lines of each pod, and why it does not run. Raises ClusterError."""
        found: dict[str, str] = {}
        for objects in cluster.of_role("objects"):
            pods = _pods(objects)
            for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["name"])):
                role, labels = pod["metadata"]["labels"][_ROLE], pod["metadata"].get("labels", {})
                index = labels.get("batch.kubernetes.io/job-completion-index", pod["metadata"]["name"])
                name = role if role == "scheduler" else f"worker {cluster.name}-worker-{index}"
                found[name] = "\n".join(filter(None, (found.get(name), _log(objects, pod, lines))))
            for role in {"scheduler", "worker"} - {pod["metadata"]["labels"][_ROLE] for pod in pods}:
                found[role] = _events(objects, f"{cluster.name}-{role}")
        if forwarded := processes.tail(str(cluster.folder), _FORWARD, lines).strip():
            found[_FORWARD] = forwarded
        return found

    def submit(self, config: ClusterConfig, driver: DriverJob) -> str:
        """See Backend. The driver is a pod, which starts the pods of the workers by the kubectl of its image."""
        settings = _settings(config)
        if not any(driver.folder.is_relative_to(each.get("mountPath", "/nowhere")) for each in settings.volumes):
            raise UsageError(
                f"results.dir is {driver.folder.parent}, which the pod of the driver would lose: mount it there with "
                "cluster.kubernetes.volumes, at the same path as on this host"
            )
        if "--report" in driver.words:
            raise UsageError("--report names a file of this host, which the driver's pod does not see; leave it out")
        slug = re.sub("[^a-z0-9]+", "-", driver.run_id.lower())[:48].strip("-")
        name, place = f"{slug}-{secrets.token_hex(2)}", _place(settings)
        where = Part(role="objects", host=place)
        job, secret = driver_manifests(settings, driver, name, f"kubernetes {place}/{name} {driver.run_id}")
        try:
            made = json.loads(_kubectl(where, "create", "--output=json", "-f", "-", text=json.dumps(job)))
            owner = {key: made[key] for key in ("apiVersion", "kind")} | {"name": name, "uid": made["metadata"]["uid"]}
            secret["metadata"]["ownerReferences"] = [owner]  # it is deleted with the job
            _kubectl(where, "create", "-f", "-", text=json.dumps(secret))
        except BaseException:
            self.cancel_job(f"{place}/{name}")
            raise
        return f"{place}/{name}"

    def job_state(self, job: str) -> str:
        """See Backend."""
        where, name = _placed(job)
        found = json.loads(_kubectl(where, "get", "job", name, "--ignore-not-found", "--output=json") or "{}")
        ended = [each for each in found.get("status", {}).get("conditions") or () if each["status"] == "True"]
        if not found or found["metadata"].get("deletionTimestamp") or ended:
            return ""
        pods = _pods(Part(role="objects", host=where.host, id=name))
        if any(pod["status"].get("phase") == "Running" for pod in pods):
            return "RUNNING"
        why = ", ".join(filter(None, (_trouble(pod)[0] for pod in pods if pod["status"].get("phase") == "Pending")))
        return f"PENDING ({why})" if why else "PENDING"

    def cancel_job(self, job: str) -> None:
        """See Backend."""
        where, name = _placed(job)
        _kubectl(where, "delete", "job", name, "--ignore-not-found", "--wait=false")

    def stop(self, cluster: ClusterRecord, tell: Tell) -> None:
        """Delete the objects with their pods. Raises ClusterError."""
        processes.end(str(cluster.folder))
        for objects in cluster.of_role("objects"):
            label = f"{_OWNER}={objects.id}"
            deadline = time.monotonic() + _END_S
            while left := _kubectl(objects, "get", "job,service,secret,pod", "--selector", label, "--output=name"):
                if time.monotonic() > deadline:
                    raise ClusterError(f"Kubernetes has not ended {', '.join(left.split())} within {_END_S:g} s")
                # Again and again: a kubectl that has outlived its command may still be creating some.
                _kubectl(objects, "delete", "job,service,secret", "--selector", label, "--wait=false")
                time.sleep(_POLL_S)


def _settings(config: ClusterConfig) -> KubernetesSettings:
    assert config.kubernetes is not None
    return config.kubernetes


def _place(settings: KubernetesSettings) -> str:
    """Return "context/namespace", so that a later command finds the objects after the user has changed the context."""
    context, namespace = settings.context or "", settings.namespace or ""
    chosen = ("--context", context) if context else ()
    config = json.loads(_run(["kubectl", *chosen, "config", "view", "--minify", "--output=json"]) or "{}")
    named = (config.get("contexts") or [{"name": "", "context": {}}])[0]  # none in a pod
    return f"{context or named['name']}/{namespace or named['context'].get('namespace', '')}"


def _placed(job: str) -> tuple[Part, str]:
    """Return where a submitted job is, and its name; a pod has a service account and no contexts."""
    place, _, name = job.rpartition("/")
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        place = f"/{place.rpartition('/')[2]}"
    return Part(role="objects", host=place), name


def _where(objects: Part) -> list[str]:
    context, _, namespace = objects.host.rpartition("/")
    return [*(["--context", context] if context else []), *(["--namespace", namespace] if namespace else [])]


def _kubectl(objects: Part, *arguments: str, text: str = "") -> str:
    """Return the output of kubectl in the namespace of these objects. Raises ClusterError."""
    return _run(["kubectl", *_where(objects), "--request-timeout=15s", *arguments], text)


def _run(command: Sequence[str], text: str = "") -> str:
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_COMMAND_S,
            check=False,
            start_new_session=True,  # Ctrl-C must not end it: objects may be half created
        )
    except FileNotFoundError as error:
        raise ClusterError("there is no kubectl here: backend kubernetes needs it, and a kubeconfig") from error
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"kubectl did not answer within {_COMMAND_S:g} s: is the API server down?") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip() and not re.match(r"[EW]\d{4} ", line)]
        last = (lines or [f"exit code {done.returncode}"])[-1].removeprefix("error: ")
        raise ClusterError(f"kubectl: {last.removeprefix('Error from server ').strip()}")
    return done.stdout


def _forward(cluster: ClusterRecord, objects: Part) -> Part:
    """Start a process that forwards a local port to the scheduler for as long as its job runs."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
    kubectl = shlex.join(["kubectl", *_where(objects)])
    job = f"{cluster.name}-scheduler"
    look = f"{kubectl} get job {job} --ignore-not-found --output='jsonpath={{.status.active}}'"
    script = f"""trap 'kill $!; exit' TERM
while active=$({look}); [ $? -ne 0 ] || [ -n "$active" ]; do
  {kubectl} port-forward --address 127.0.0.1 job/{job} {port}:{_PORT} & wait $!
  sleep 1 & wait $!
done"""
    cluster.address = f"tls://127.0.0.1:{port}"
    folder = str(cluster.folder)
    pid = processes.start(folder, _FORWARD, ["sh", "-c", script, FOLDER])
    return Part(role=_FORWARD, id=folder, log=f"{folder}/{_FORWARD}.log", pid=pid)


def _resolves(host: str) -> bool:
    try:
        socket.getaddrinfo(host, _PORT)
    except OSError:
        return False
    return True


# --- pods ---


def _pods(objects: Part, role: str = "") -> list[dict[str, Any]]:
    label = f"{_OWNER}={objects.id}" + (f",{_ROLE}={role}" if role else "")
    found: list[dict[str, Any]] = json.loads(
        _kubectl(objects, "get", "pods", "--selector", label, "--output=json") or '{"items": []}'
    )["items"]
    return found


def _is_ready(pod: Mapping[str, Any] | None) -> bool:
    """Return whether the containers run and have passed their probes."""
    conditions = pod["status"].get("conditions") or () if pod else ()
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def _trouble(pod: Mapping[str, Any]) -> tuple[str, bool]:
    """Return why the pod does not run, "" if it does or will, and whether waiting won't help."""
    status = pod.get("status", {})
    for container in status.get("containerStatuses") or ():
        waiting = container.get("state", {}).get("waiting") or {}
        if (reason := waiting.get("reason", "")) not in _HARMLESS:
            return _joined(reason, waiting.get("message", "")), reason in _HOPELESS
        if (ended := container.get("state", {}).get("terminated")) and ended.get("exitCode"):
            return f"it ended with exit code {ended['exitCode']}", True
    if status.get("phase") == "Failed":
        return _joined(status.get("reason", "it has failed"), status.get("message", "")), True
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return _joined(condition.get("reason", ""), condition.get("message", "")), False
    return "", False


def _log(objects: Part, pod: Mapping[str, Any], lines: int) -> str:
    """Return the last log lines of a pod, and why it does not run."""
    try:
        log = _kubectl(objects, "logs", str(pod["metadata"]["name"]), f"--tail={lines}")
    except ClusterError:  # its container has not started
        log = ""
    trouble, _ = _trouble(pod)
    return "\n".join(filter(None, (log.rstrip(), f"({trouble})" if trouble else "")))


def _events(objects: Part, job: str) -> str:
    """Return why a job has no pod, such as an exceeded quota; "" if that is not known."""
    chosen = f"involvedObject.name={job},type=Warning"
    answer = _kubectl(objects, "get", "events", "--field-selector", chosen, "--output=json") or '{"items": []}'
    return "\n".join(_joined(each.get("reason", ""), each.get("message", "")) for each in json.loads(answer)["items"])


def _joined(reason: str, message: str) -> str:
    return ": ".join(part for part in (reason, " ".join(message.split())) if part)


# --- manifests ---


def manifests(cluster: ClusterRecord, owner: str) -> list[dict[str, Any]]:
    """Return all objects of a cluster. They are no List: the API server would not check its fields."""
    settings, name = _settings(cluster.config), cluster.name
    labels = {"app.kubernetes.io/managed-by": "ddptrain", _OWNER: owner}
    files = {file: base64.b64encode((cluster.folder / file).read_bytes()).decode() for file in (CERT_FILE, KEY_FILE)}
    service = {"selector": {**labels, _ROLE: "scheduler"}, "ports": [{"port": _PORT, "targetPort": _PORT}]}
    scheduler = {"backoffLimit": 0, "template": _pod(cluster, labels, "scheduler", _scheduler(cluster, settings))}
    workers = {
        "completions": cluster.workers,
        "parallelism": cluster.workers,
        "completionMode": "Indexed",
        "backoffLimit": 6,
        "podFailurePolicy": {"rules": [_EVICTED]},
        "template": _pod(cluster, labels, "worker", _worker(cluster, settings)),
    }

    def described(version: str, kind: str, suffix: str, content: Mapping[str, Any]) -> dict[str, Any]:
        metadata = {"name": f"{name}-{suffix}", "labels": labels}
        return {"apiVersion": version, "kind": kind, "metadata": metadata, **content}

    return [
        described("v1", "Secret", "tls", {"type": "Opaque", "data": files}),
        described("v1", "Service", "scheduler", {"spec": service}),
        described("batch/v1", "Job", "scheduler", {"spec": scheduler}),
        described("batch/v1", "Job", "worker", {"spec": workers}),
    ]


def driver_manifests(
    settings: KubernetesSettings, driver: DriverJob, name: str, job: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the Job of a driver, whose environment says `job`, and the Secret with its configuration."""
    labels = {"app.kubernetes.io/managed-by": "ddptrain", _OWNER: name}
    mounts, volumes = _volumes(settings)
    path = f"{_FOLDER}/{_CONFIG}"
    container = {
        "name": "driver",
        "image": settings.image,
        "args": ["python", "-P", "-m", "ddptrain", "train", *driver.options, path],
        "env": [{"name": JOB, "value": job}],
        "volumeMounts": [{"name": "config", "mountPath": _FOLDER}, *mounts],
    }
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _SAVED_S,
        "containers": [container],
        "volumes": [{"name": "config", "secret": {"secretName": name, "defaultMode": 0o444}}, *volumes],
        **settings.pod,
    }
    # A run that was preempted goes on in another pod, one that has failed does not.
    preempted = {"containerName": "driver", "operator": "In", "values": [int(ExitCode.PREEMPTED)]}
    rules = [
        _EVICTED,  # the first rule that fits counts: an evicted driver may have been killed
        {"action": "Ignore", "onExitCodes": preempted},
        {"action": "FailJob", "onExitCodes": {**preempted, "operator": "NotIn"}},
    ]
    job_spec = {
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": rules},
        "ttlSecondsAfterFinished": _KEPT_S,
        "template": {"metadata": {"labels": labels}, "spec": spec},
    }
    metadata = {"name": name, "labels": labels}
    data = {_CONFIG: base64.b64encode(json.dumps(driver.config).encode()).decode()}
    return (
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job_spec},
        {"apiVersion": "v1", "kind": "Secret", "metadata": dict(metadata), "type": "Opaque", "data": data},
    )


def _volumes(settings: KubernetesSettings) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the mounts of a container, and the volumes of its pod."""
    return (
        [{key: each[key] for key in each if key == "name" or key in _OF_A_MOUNT} for each in settings.volumes],
        [{key: each[key] for key in each if key not in _OF_A_MOUNT} for each in settings.volumes],
    )


def _scheduler(cluster: ClusterRecord, settings: KubernetesSettings) -> dict[str, Any]:
    arguments = ["-m", "ddptrain.clusters.scheduler.scheduler_process", "--folder", _FOLDER]
    arguments += ["--host", "0.0.0.0", "--port", str(_PORT)]  # a port-forward arrives on the pod's loopback
    return {
        "args": ["python", "-P", *arguments, "--idle-timeout", str(cluster.config.idle_timeout_s)],
        # The scheduler deletes the file when it ends.
        "readinessProbe": {"exec": {"command": ["test", "-f", f"{_FOLDER}/scheduler.json"]}, "periodSeconds": 1},
        "ports": [{"containerPort": _PORT}],
        # The scheduler writes files beside the certificate, and the mount of a secret is read-only.
        "volumeMounts": [
            {"name": "ddptrain", "mountPath": _FOLDER},
            *({"name": "tls", "mountPath": f"{_FOLDER}/{file}", "subPath": file} for file in (CERT_FILE, KEY_FILE)),
        ],
    }


def _worker(cluster: ClusterRecord, settings: KubernetesSettings) -> dict[str, Any]:
    gpus, slots = settings.gpus_per_worker, settings.gpus_per_worker or settings.ranks_per_worker
    arguments = ["-m", "ddptrain.worker", "--scheduler", f"tls://{cluster.name}-scheduler:{_PORT}"]
    arguments += ["--name", f"{cluster.name}-worker-$(JOB_COMPLETION_INDEX)", "--tls-dir", _FOLDER]
    arguments += ["--slots", str(slots), "--gpus", "auto" if gpus else "none"]
    arguments += ["--timeout", f"{max(600.0, cluster.config.start_timeout_s):g}"]  # until its pod has an image
    resources = {kind: dict(values) for kind, values in settings.resources.items()}
    if gpus:
        resources["limits"] = {"nvidia.com/gpu": gpus, **resources.get("limits", {})}
    given, _ = _volumes(settings)
    mounts = [{"name": "tls", "mountPath": _FOLDER}, *given]
    if all(mount.get("mountPath") != _SHARED_MEMORY for mount in given):
        mounts.append({"name": "shm", "mountPath": _SHARED_MEMORY})
    quantities = {kind: {key: str(value) for key, value in values.items()} for kind, values in resources.items()}
    return {"args": ["python", "-P", *arguments], "resources": quantities, "volumeMounts": mounts}


def _pod(cluster: ClusterRecord, labels: Mapping[str, str], role: str, container: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template of a pod; `cluster.kubernetes.pod` has precedence over what is written here."""
    settings = _settings(cluster.config)
    # The user that the image runs as must be able to read the secret.
    volumes: list[Any] = [{"name": "tls", "secret": {"secretName": f"{cluster.name}-tls", "defaultMode": 0o444}}]
    if role == "scheduler":
        volumes.append({"name": "ddptrain", "emptyDir": {}})
    else:
        # 64 MB otherwise, which is too little for NCCL and for DataLoader's workers.
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
        volumes += _volumes(settings)[1]
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _GRACE_S,
        "containers": [{"name": role, "image": settings.image, **container}],
        "volumes": volumes,
        **settings.pod,
    }
    return {"metadata": {"labels": {**labels, _ROLE: role}}, "spec": spec}
