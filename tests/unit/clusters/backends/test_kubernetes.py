"""What is asked of Kubernetes, and how its answers are told."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import math
import socket
import time
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, cast

import pytest
import yaml

from ddptrain.clusters.backends.kubernetes import provider, reach, spec
from ddptrain.clusters.backends.kubernetes.api_client import Kubernetes, connected
from ddptrain.clusters.backends.kubernetes.pods import trouble_of
from ddptrain.clusters.backends.kubernetes.provider import KubernetesProvider
from ddptrain.clusters.cluster_records import ClusterRecord, Deployment
from ddptrain.clusters.security import make_tls
from ddptrain.config.sections.clusters import KubernetesSettings
from ddptrain.errors import ClusterError, DdptrainError, UsageError
from ddptrain.worker import driver_calls

needs_dask_kubernetes = pytest.mark.skipif(
    find_spec("dask_kubernetes") is None, reason='dask-kubernetes is not installed: pip install "ddptrain[kubernetes]"'
)


def settings(**more: Any) -> KubernetesSettings:
    return KubernetesSettings.model_validate({"image": "registry.test/ddptrain:1", **more})


def cluster_of(idle_timeout_s: float = 0.0, **more: Any) -> dict[str, Any]:
    pytest.importorskip("dask_kubernetes")
    whole = spec.cluster_spec("dev", "ml", "0123", 2, settings(**more), idle_timeout_s)
    cluster: dict[str, Any] = whole["spec"]
    return cluster


def worker_of(cluster: dict[str, Any]) -> dict[str, Any]:
    container: dict[str, Any] = cluster["worker"]["spec"]["containers"][0]
    return container


def scheduler_of(cluster: dict[str, Any]) -> dict[str, Any]:
    container: dict[str, Any] = cluster["scheduler"]["spec"]["containers"][0]
    return container


def test_worker_pod_runs_our_worker_under_the_operators_name() -> None:
    args = " ".join(worker_of(cluster_of(ranks_per_worker=4))["args"])
    assert "-m ddptrain.worker --scheduler $(DASK_SCHEDULER_ADDRESS) --name $(DASK_WORKER_NAME)" in args
    assert "--slots 4 --gpus none" in args


def test_gpus_of_a_worker_are_its_slots_and_its_limit() -> None:
    cluster = cluster_of(gpus_per_worker=8, ranks_per_worker=3, resources={"requests": {"memory": "64Gi", "cpu": 16}})
    worker = worker_of(cluster)
    assert worker["resources"] == {"requests": {"memory": "64Gi", "cpu": "16"}, "limits": {"nvidia.com/gpu": "8"}}
    assert "--slots 8 --gpus auto" in " ".join(worker["args"])
    assert scheduler_of(cluster)["resources"] == {}, "the scheduler needs no GPU"


def test_limit_of_the_users_own_wins() -> None:
    worker = worker_of(cluster_of(gpus_per_worker=2, resources={"limits": {"nvidia.com/gpu": 4}}))
    assert worker["resources"]["limits"] == {"nvidia.com/gpu": "4"}


def test_scheduler_and_workers_use_tls_with_the_clusters_key() -> None:
    cluster = cluster_of()
    address = next(each["value"] for each in worker_of(cluster)["env"] if each["name"] == "DASK_SCHEDULER_ADDRESS")
    assert address == "tls://dev-scheduler.ml.svc:8786"
    for part in ("scheduler", "worker"):
        volumes = cluster[part]["spec"]["volumes"]
        assert {"secretName": "dev-ddptrain-tls", "defaultMode": 0o444} in [each.get("secret") for each in volumes]
    mounted = {mount["mountPath"] for mount in scheduler_of(cluster)["volumeMounts"]}
    assert {"/run/ddptrain", "/run/ddptrain/cert.pem", "/run/ddptrain/key.pem"} == mounted


def test_pods_get_what_the_settings_say() -> None:
    toleration = {"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}
    cluster = cluster_of(
        node_selector={"pool": "a100"},
        tolerations=[toleration],
        env={"NCCL_DEBUG": "INFO"},
        service_account="trainer",
        volumes=[{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
        volume_mounts=[{"name": "data", "mountPath": "/data"}],
    )
    for part in ("scheduler", "worker"):
        pod = cluster[part]["spec"]
        assert pod["nodeSelector"] == {"pool": "a100"}
        assert pod["tolerations"] == [toleration]
        assert pod["serviceAccountName"] == "trainer"
        assert {"name": "NCCL_DEBUG", "value": "INFO"} in pod["containers"][0]["env"]
    assert {"name": "data", "mountPath": "/data"} in worker_of(cluster)["volumeMounts"]
    assert "data" not in str(scheduler_of(cluster)["volumeMounts"])


def test_worker_has_room_in_shared_memory_unless_the_user_mounts_it() -> None:
    def mounts(**more: Any) -> list[str]:
        return [
            mount["name"] for mount in worker_of(cluster_of(**more))["volumeMounts"] if mount["mountPath"] == "/dev/shm"
        ]

    assert mounts() == ["ddptrain-shm"]
    volumes = [{"name": "mine", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}]
    assert mounts(volumes=volumes, volume_mounts=[{"name": "mine", "mountPath": "/dev/shm"}]) == ["mine"]


def test_load_balancer_publishes_the_port_with_tls_alone() -> None:
    service = cluster_of(scheduler_service_type="LoadBalancer")["scheduler"]["service"]
    assert service["type"] == "LoadBalancer"
    assert [port["port"] for port in service["ports"]] == [8786]


def test_idle_cluster_is_for_the_operator_to_end() -> None:
    cluster = cluster_of(idle_timeout_s=600.0)
    assert cluster["idleTimeout"] == 600
    assert "ddptrain.clusters.backends.kubernetes.idle_route" in scheduler_of(cluster)["args"]
    assert "ddptrain.clusters.backends.kubernetes.idle_route" not in scheduler_of(cluster_of())["args"]


@pytest.mark.parametrize("name", ["my_cluster", "a.b", "x" * 54, "ends-", ""])
def test_name_that_kubernetes_refuses_is_refused_before_anything_happens(name: str) -> None:
    with pytest.raises(UsageError, match="is not a cluster name in Kubernetes"):
        spec.checked_name(name)


def test_secret_holds_the_certificate_and_the_key(tmp_path: Path) -> None:
    make_tls(tmp_path)
    secret = spec.secret_spec("dev", "0123", tmp_path)
    assert set(secret["data"]) == {"cert.pem", "key.pem"}
    assert secret["metadata"]["labels"]["ddptrain-owner"] == "0123"


# --- what pods tell ---


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    state = {"state": {"waiting": {"reason": reason, "message": message}}, "restartCount": 0}
    return {"metadata": {"name": "p"}, "status": {"phase": "Pending", "containerStatuses": [state]}}


def test_image_that_cant_be_pulled_is_hopeless_the_second_time() -> None:
    first, second = trouble_of(waiting("ErrImagePull", "not found")), trouble_of(waiting("ImagePullBackOff"))
    assert first is not None and first.description == "ErrImagePull: not found" and not first.hopeless
    assert second is not None and second.hopeless


def test_container_that_is_being_made_is_no_trouble() -> None:
    assert trouble_of(waiting("ContainerCreating")) is None
    assert trouble_of({"status": {"phase": "Pending"}}) is None


def test_pod_without_a_node_tells_why() -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no nvidia.com/gpu"}
    trouble = trouble_of({"status": {"conditions": [condition]}})
    assert trouble is not None and trouble.description == "Unschedulable: no nvidia.com/gpu" and not trouble.hopeless


# --- before the API server is reached ---


def failure(context: str | None = None) -> DdptrainError:
    async def connect() -> None:
        async with connected(context, None) as api:
            await api.get("api/v1", "pods/x")

    with pytest.raises(DdptrainError) as caught:
        asyncio.run(connect())
    assert "\n" not in str(caught.value)
    return caught.value


def kubeconfig(folder: Path, server: str) -> str:
    path = folder / "kubeconfig"
    config = {
        "current-context": "here",
        "clusters": [{"name": "k", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "here", "context": {"cluster": "k", "user": "u"}}],
    }
    path.write_text(yaml.safe_dump(config))
    return str(path)


def test_missing_package_is_one_line_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "dask_kubernetes":
            raise ImportError(f"No module named {name}", name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    error = failure()
    assert isinstance(error, UsageError) and "pip install 'dask-kubernetes>=2025.4.3'" in str(error)


@needs_dask_kubernetes
def test_missing_kubeconfig_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nothing"))
    error = failure()
    assert isinstance(error, ClusterError) and f"{tmp_path / 'nothing'} does not exist" in str(error)


@needs_dask_kubernetes
def test_broken_kubeconfig_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "kubeconfig").write_text("clusters: [")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    assert f"{tmp_path / 'kubeconfig'} can't be used" in str(failure())


@needs_dask_kubernetes
def test_unknown_context_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KUBECONFIG", kubeconfig(tmp_path, "https://127.0.0.1:1"))
    assert 'has no context "there"' in str(failure("there"))


@needs_dask_kubernetes
def test_api_server_that_does_not_listen_is_told_by_its_address(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"https://127.0.0.1:{closed.getsockname()[1]}"
        monkeypatch.setenv("KUBECONFIG", kubeconfig(tmp_path, url))
        error = failure()
    assert isinstance(error, ClusterError) and f"the Kubernetes API at {url} can't be reached" in str(error)


@needs_dask_kubernetes
def test_cluster_of_which_nothing_was_ordered_stops_and_has_no_logs(tmp_path: Path) -> None:
    cluster = Deployment(tmp_path, ClusterRecord("dev", "kubernetes", "now"))
    KubernetesProvider().stop(cluster, print)
    assert KubernetesProvider().logs(cluster, 5) == {}


class _Creating:
    """Stands for an API server without clusters: records what is created, and ends the order afterwards."""

    namespace = "ml"
    context = ""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, str, Any]] = []

    async def get(self, group: str, path: str) -> None:
        assert (group, path) == ("apis/kubernetes.dask.org/v1", "daskclusters/dev")

    async def create(self, group: str, kind: str, body: dict[str, Any]) -> dict[str, Any]:
        self.calls.append(("create", group, kind, body["metadata"]["name"]))
        return {"metadata": {"uid": "u-1"}}

    async def patch(self, group: str, path: str, body: dict[str, Any]) -> None:
        self.calls.append(("patch", group, path, body))
        raise InterruptedError


@needs_dask_kubernetes
def test_new_cluster_is_created_after_its_key_which_is_deleted_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    api = _Creating()

    @contextlib.asynccontextmanager
    async def opened(context: str, namespace: str) -> AsyncIterator[_Creating]:
        yield api

    monkeypatch.setattr(provider, "connected", opened)
    said = {"kubernetes": settings(workers=3).model_dump(mode="json"), "start_timeout_s": 1, "ranks": None}
    cluster = Deployment(tmp_path, ClusterRecord("dev", "kubernetes", "now", settings=said))
    with pytest.raises(InterruptedError):
        KubernetesProvider().scale(cluster, None, lambda text: None)
    secret = spec.secret_name("dev")
    owner = {"apiVersion": "kubernetes.dask.org/v1", "kind": "DaskCluster", "name": "dev", "uid": "u-1"}
    assert api.calls == [
        ("create", "api/v1", "secrets", secret),
        ("create", "apis/kubernetes.dask.org/v1", "daskclusters", "dev"),
        ("patch", "api/v1", f"secrets/{secret}", {"metadata": {"ownerReferences": [owner]}}),
    ]
    assert cluster.record.workers == 3


class _Resizing:
    """Stands for an API server with worker pods: records what is deleted and set."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.calls: list[Any] = []

    async def items(self, group: str, kind: str, labels: dict[str, str]) -> list[dict[str, Any]]:
        return [{"metadata": {"name": name}} for name in self.names]

    async def delete(self, group: str, path: str) -> None:
        self.calls.append(path)

    async def patch(self, group: str, path: str, body: dict[str, Any]) -> None:
        self.calls.append(body["spec"]["worker"]["replicas"])


@pytest.mark.parametrize(
    ("wanted", "held", "calls", "replicas"),
    [
        (3, {"a": 0, "b": 0}, [3], 3),  # more: no pod is deleted
        (2, {"a": 0, "b": 0}, [2], 2),
        (1, {"a": 2, "b": 0}, ["deployments/b", 1], 1),  # the one without a run
        (0, {"a": 0, "b": 0}, ["deployments/a", "deployments/b", 0], 0),
        (1, {"a": 1, "b": 2}, [2], 2),  # runs are on both: none is deleted
        (1, {}, ["deployments/a", 1], 1),  # none has joined
    ],
)
def test_resize_deletes_only_pods_without_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wanted: int, held: dict[str, int], calls: list[Any], replicas: int
) -> None:
    joined = {name: SimpleNamespace(address=name, held=count, slots=2, warm=True) for name, count in held.items()}
    monkeypatch.setattr(provider, "_joined", lambda cluster: joined)
    monkeypatch.setattr(provider, "_set_slots", lambda cluster, slots: None)
    cluster = Deployment(tmp_path, ClusterRecord("dev", "kubernetes", "now"))
    api = _Resizing("a", "b")
    asyncio.run(provider.resize(cast(Kubernetes, api), cluster, wanted, 2, lambda text: None))
    assert api.calls == calls and cluster.record.workers == replicas


def test_slots_are_set_on_each_worker_by_its_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[Any] = []

    class Client:
        def __init__(self, address: str, **options: Any) -> None:
            assert address == "tcp://127.0.0.1:8786"

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *error: object) -> None:
            calls.append("closed")

        def run(self, function: Any, *arguments: Any, workers: list[str]) -> None:
            calls.append((function, *arguments, *workers))

    monkeypatch.setattr("distributed.Client", Client)
    cluster = Deployment(tmp_path, ClusterRecord("dev", "kubernetes", "now", address="tcp://127.0.0.1:8786"))
    provider._set_slots(cluster, {"tcp://a": 2, "tcp://b": 1})
    set_slots = driver_calls.set_slots
    assert calls == [(set_slots, 2, "tcp://a"), (set_slots, 1, "tcp://b"), "closed"]
    provider._set_slots(cluster, {})
    assert len(calls) == 3


# --- how the scheduler is reached ---


class _Service:
    """Stands for the API server of a pod's own cluster: it has the scheduler's service, as the operator makes it."""

    namespace = "ml"
    context = ""

    def __init__(self, looks_before: float = 0) -> None:
        self.looks_before = looks_before  # that the operator lets pass before it makes the service

    async def get(self, group: str, path: str) -> dict[str, Any] | None:
        assert (group, path) == ("api/v1", "services/dev-scheduler")
        self.looks_before -= 1
        return {"spec": {"type": "ClusterIP"}, "status": {"loadBalancer": {}}} if self.looks_before < 0 else None


def test_pod_of_the_cluster_reaches_the_scheduler_by_its_services_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port: asked.append((host, port)))
    monkeypatch.setattr(reach, "_answers", lambda url: url == "http://dev-scheduler.ml.svc:8787/status")
    make_tls(tmp_path)
    cluster = Deployment(tmp_path, ClusterRecord("dev", "kubernetes", "now"))
    asyncio.run(reach.open_way(cast(Kubernetes, _Service()), cluster, deadline=0.0))
    assert asked == [("dev-scheduler.ml.svc", 8786)]
    assert cluster.record.address == "tls://dev-scheduler.ml.svc:8786"
    assert cluster.record.dashboard == "http://dev-scheduler.ml.svc:8787/status"


def test_service_that_comes_after_the_schedulers_pod_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The operator makes the deployment first: on a busy machine its pod is ready before there is a service."""
    monkeypatch.setattr(reach, "_resolves", lambda host: True)
    monkeypatch.setattr(reach, "_answers", lambda url: False)
    cluster = Deployment(tmp_path, ClusterRecord("dev", "kubernetes", "now"))
    asyncio.run(reach.open_way(cast(Kubernetes, _Service(looks_before=2)), cluster, time.monotonic() + 60))
    assert cluster.record.address == "tcp://dev-scheduler.ml.svc:8786"
    with pytest.raises(ClusterError, match="the service dev-scheduler is missing from the namespace ml"):
        asyncio.run(reach.open_way(cast(Kubernetes, _Service(looks_before=math.inf)), cluster, deadline=0.0))
