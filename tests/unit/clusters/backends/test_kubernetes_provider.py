"""Clusters in Kubernetes, with an API server that keeps its objects in memory: what is created, told and deleted."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ddptrain.clusters.backends.kubernetes import pods, provider, reach
from ddptrain.clusters.backends.kubernetes.api_client import APPS, CORE, DASK, Kubernetes
from ddptrain.clusters.backends.kubernetes.provider import KubernetesProvider, Parts
from ddptrain.clusters.cluster_records import ClusterRecord, Deployment
from ddptrain.clusters.status import State
from ddptrain.config.sections.clusters import KubernetesSettings
from ddptrain.errors import ClusterError, UsageError

Object = dict[str, Any]


def labels(component: str = "", **more: str) -> dict[str, str]:
    return {**pods.cluster_labels("dev", component), **more}


def thing(name: str, its_labels: Mapping[str, str], **more: Any) -> Object:
    return {"metadata": {"name": name, "labels": dict(its_labels)}, **more}


def pod(name: str, component: str = "scheduler", *, ready: bool = True, **status: Any) -> Object:
    condition = {"type": "Ready", "status": "True" if ready else "False"}
    told = {"conditions": [{"type": "Initialized", "status": "True"}, condition], **status}
    container = {"env": [{"name": "A", "value": "1"}, {"name": "DASK_WORKER_NAME", "value": f"dask-{name}"}]}
    return thing(name, labels(component), status=told, spec={"containers": [container]})


def state_of_container(**state: Any) -> dict[str, Any]:
    return {"containerStatuses": [{"state": state, "restartCount": 0}]}


BACKOFF = state_of_container(waiting={"reason": "CrashLoopBackOff", "message": "back-off  5m"})
READY = pod("s-1")


class Api:
    """The API server of one namespace. `of` is (group, plural) -> objects; `logs` is pod -> text."""

    namespace, context = "ml", "here"

    def __init__(self, of: dict[tuple[str, str], list[Object]] | None = None) -> None:
        self.of = of or {}
        self.logs: dict[str, str] = {}
        self.deleted: list[str] = []
        self.asked: list[Any] = []
        self.stays = 0  # looks for which deleted objects stay

    async def get(self, group: str, path: str) -> Object | None:
        plural, _, name = path.partition("/")
        self.asked.append(path)
        return next((each for each in self.of.get((group, plural), []) if each["metadata"]["name"] == name), None)

    async def items(self, group: str, plural: str, wanted: Mapping[str, str]) -> list[Object]:
        self.stays -= 1
        found = self.of.get((group, plural), [])
        return [each for each in found if wanted.items() <= each["metadata"]["labels"].items()]

    async def delete(self, group: str, path: str) -> None:
        self.deleted.append(path)
        plural, _, name = path.partition("/")
        if self.stays < 0:
            left = [each for each in self.of[group, plural] if each["metadata"]["name"] != name]
            self.of[group, plural] = left

    async def log(self, name: str, **query: str) -> str:
        self.asked.append((name, query))
        return self.logs.get(f"{name} before" if "previous" in query else name, "")


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Api:
    there = Api({(CORE, "pods"): [READY]})

    @contextlib.asynccontextmanager
    async def opened(context: str | None, namespace: str | None) -> AsyncIterator[Api]:
        there.asked.append((context, namespace))
        yield there

    async def open_way(api: Api, cluster: Deployment, deadline: float) -> None:
        there.asked.append("way")

    monkeypatch.setattr(provider, "connected", opened)
    monkeypatch.setattr(reach, "open_way", open_way)
    monkeypatch.setattr(provider, "_POLL_S", 0.0)
    return there


def deployment(
    folder: Path, *, idle_s: float = 0.0, ranks: Any = "auto", timeout_s: float = 60, **more: Any
) -> Deployment:
    settings = KubernetesSettings.model_validate({"image": "i", **more}).model_dump(mode="json")
    given = {"kubernetes": settings, "start_timeout_s": timeout_s, "ranks": ranks}
    return Deployment(folder, ClusterRecord("dev", "kubernetes", "now", settings=given, idle_timeout_s=idle_s))


def scaled(cluster: Deployment, slots: int | None = None) -> list[str]:
    told: list[str] = []
    KubernetesProvider().scale(cluster, slots, told.append)
    return told


# --- a cluster that is there already ---


def own_secret(**files: str) -> Object:
    data = {name: base64.b64encode(text.encode()).decode() for name, text in files.items()}
    return thing("dev-ddptrain-tls", {}, data=data)


@pytest.mark.parametrize("ours", [True, False])
def test_existing_cluster_is_used_as_it_is(api: Api, tmp_path: Path, ours: bool) -> None:
    its_labels = {"ddptrain-owner": "0123", "ddptrain-slots": "4"} if ours else {}
    worker = {"worker": {"replicas": 2}}
    api.of[DASK, "daskclusters"] = [thing("dev", its_labels, spec=worker)]
    api.of[CORE, "secrets"] = [own_secret(**{"cert.pem": "c", "key.pem": "k", "../other": "o"})]
    if ours:
        api.of[DASK, "daskworkergroups"] = [thing("dev-default", {}, spec={"worker": {"replicas": 3}})]
    cluster = deployment(tmp_path)
    (notice,) = scaled(cluster)
    assert "DaskCluster dev, maybe of another user: it is used as it is" in notice and "--name" in notice
    found = {path.name: path.read_text() for path in tmp_path.glob("*.pem")}
    assert found == ({"cert.pem": "c", "key.pem": "k"} if ours else {})
    assert Parts.of(cluster) == Parts("here", "ml", "", attached=True, slots=4 if ours else 1)
    assert cluster.record.workers == (3 if ours else 2)
    assert api.asked[0] == (None, None) and api.asked[-1] == "way"


def test_cluster_that_someone_has_deleted_is_not_made_again(api: Api, tmp_path: Path) -> None:
    cluster = deployment(tmp_path)
    Parts("there", "ml", "0123").save(cluster)
    with pytest.raises(ClusterError, match=r"^the DaskCluster dev does not exist in the namespace ml$"):
        scaled(cluster, 2)
    assert api.asked[0] == ("there", "ml")


@pytest.mark.parametrize(
    ("ranks", "slots", "workers"),
    [("auto", None, 5), ("auto", 4, 2), ("auto", 5, 3), (3, None, 2), ({"min": 1, "max": 4}, None, 5), (3, 8, 4)],
)
def test_slots_decide_how_many_pods_there_are(
    api: Api, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ranks: Any, slots: int | None, workers: int
) -> None:
    resized: list[tuple[int, int]] = []

    async def resize(api: Api, cluster: Deployment, wanted: int, slots_each: int, tell: Any) -> None:
        resized.append((wanted, slots_each))

    monkeypatch.setattr(provider, "resize", resize)
    api.of[DASK, "daskclusters"] = [thing("dev", {})]
    cluster = deployment(tmp_path, ranks=ranks, workers=5)
    Parts("here", "ml", "0123", slots=2).save(cluster)
    scaled(cluster, slots)
    assert resized == [(workers, 2)]


@pytest.mark.parametrize("idle_s", [0.0, 60.0])
def test_idle_time_and_a_load_balancer_exclude_each_other(api: Api, tmp_path: Path, idle_s: float) -> None:
    cluster = deployment(tmp_path, idle_s=idle_s, scheduler_service_type="LoadBalancer")
    pytest.importorskip("dask_kubernetes")
    if idle_s:
        with pytest.raises(
            UsageError, match=r"^cluster\.idle_timeout_s can't be kept with scheduler_service_type Load"
        ):
            scaled(cluster)
    else:
        with pytest.raises(AttributeError):  # this server can't create anything
            scaled(cluster)


# --- the wait for the scheduler ---


def waited(api: Api, cluster: Deployment) -> list[str]:
    api.of[DASK, "daskclusters"] = api.of.get((DASK, "daskclusters")) or [
        thing("dev", {}, spec={"worker": {"replicas": 1}})
    ]
    return scaled(cluster)[1:]


@pytest.mark.parametrize(
    ("found", "log", "timeout_s", "told"),
    [
        (
            {(CORE, "pods"): [pod("s", ready=False, **BACKOFF)]},
            "Traceback\nImportError\n",
            60,
            "the scheduler's pod: CrashLoopBackOff: back-off 5m\n  Traceback\n  ImportError",
        ),
        (
            {(CORE, "pods"): [pod("s", ready=False)]},
            "starts\nlistens",
            -1,
            "the scheduler's pod: is starting after -1 s (cluster.start_timeout_s)\n  starts",
        ),
        (
            {
                (APPS, "deployments"): [
                    thing(
                        "dev-scheduler",
                        labels("scheduler"),
                        status={"conditions": [{"type": "ReplicaFailure", "status": "True", "message": "no quota"}]},
                    )
                ]
            },
            "",
            -1,
            "the scheduler of dev gets no pod: no quota",
        ),
        (
            {(DASK, "daskclusters"): [thing("dev", {}, spec={"worker": {"replicas": 1}}, status={"phase": "Created"})]},
            "",
            -1,
            "the scheduler of dev has got no pod within -1 s (cluster.start_timeout_s)",
        ),
        (
            {},
            "",
            -1,
            "no operator has started the DaskCluster dev within -1 s: is dask-kubernetes' operator running, and",
        ),
    ],
)
def test_scheduler_that_does_not_come_is_told_with_its_reason(
    api: Api, tmp_path: Path, found: dict[tuple[str, str], list[Object]], log: str, timeout_s: float, told: str
) -> None:
    api.of = dict(found)
    api.logs["s"] = log
    with pytest.raises(ClusterError) as error:
        waited(api, deployment(tmp_path, timeout_s=timeout_s))
    assert str(error.value).startswith(told) and (told.endswith(", and") or str(error.value) == told)


def test_each_state_of_the_scheduler_is_told_once(api: Api, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    states = [
        [],
        [],
        [pod("s", ready=False)],
        [pod("s", ready=False, **state_of_container(waiting={"reason": "ErrImagePull"}))],
    ]
    states += [[pod("s", ready=False)], [pod("s", ready=False)], [pod("s", ready=False), pod("t")]]
    looks = iter(states)

    async def items(group: str, plural: str, wanted: Mapping[str, str]) -> list[Object]:
        assert (group, plural, wanted) == (CORE, "pods", labels("scheduler"))
        return next(looks)

    monkeypatch.setattr(api, "items", items)
    said = [told.removeprefix("the scheduler's pod: ") for told in waited(api, deployment(tmp_path))]
    assert said == ["not there yet", "is starting", "ErrImagePull", "is starting"] and next(looks, None) is None


# --- the end ---


def everything(owner: str) -> dict[tuple[str, str], list[Object]]:
    its_labels = {"ddptrain-owner": owner}
    return {
        (DASK, "daskclusters"): [thing("dev", its_labels)],
        (DASK, "daskworkergroups"): [thing("dev-default", its_labels)],
        (APPS, "deployments"): [],
        (CORE, "pods"): [],
        (CORE, "secrets"): [thing("dev-ddptrain-tls", its_labels), thing("other", {"ddptrain-owner": "other"})],
    }


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Deployment:
    monkeypatch.setattr(reach, "close", lambda cluster: None)
    cluster = deployment(tmp_path)
    Parts("here", "ml", "0123", slots=2).save(cluster)
    return cluster


def test_stop_deletes_what_belongs_to_the_cluster_alone(api: Api, ours: Deployment) -> None:
    api.of = everything("0123")
    KubernetesProvider().stop(ours, print)
    # The worker group had its owner too late: it is deleted once the cluster is gone.
    assert api.deleted == ["daskclusters/dev", "secrets/dev-ddptrain-tls", "daskworkergroups/dev-default"]
    assert [each["metadata"]["name"] for each in api.of[CORE, "secrets"]] == ["other"]


def test_what_kubernetes_does_not_end_is_named(api: Api, ours: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider, "_STOP_S", 0.0)
    api.of, api.stays = everything("0123"), 99
    with pytest.raises(ClusterError) as left:
        KubernetesProvider().stop(ours, print)
    assert str(left.value).startswith(
        "Kubernetes has not ended daskcluster dev, daskworkergroup dev-default, secret dev-ddptrain-tls within 0 s: is "
    )
    assert str(left.value).endswith("--namespace ml get daskclusters,daskworkergroups,deployments,pods,secrets")


def test_worker_group_is_left_to_the_operator_as_long_as_the_cluster_is_there(
    api: Api, ours: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.of, api.stays = everything("0123"), 99
    looks = iter([0.0, 1.0, 61.0])
    monkeypatch.setattr(provider, "time", SimpleNamespace(monotonic=lambda: next(looks)))
    with pytest.raises(ClusterError):
        KubernetesProvider().stop(ours, print)
    assert api.deleted == ["daskclusters/dev", "secrets/dev-ddptrain-tls"]


def test_cluster_that_was_there_before_stays(api: Api, ours: Deployment) -> None:
    Parts("here", "ml", "", attached=True).save(ours)
    told: list[str] = []
    KubernetesProvider().stop(ours, told.append)
    assert told == ["the DaskCluster dev was there before, and keeps running: kubectl delete daskcluster ends it"]
    assert api.deleted == [] and api.asked == []


# --- pods ---


def test_fault_is_the_first_pod_that_will_never_run(api: Api, ours: Deployment) -> None:
    pulling = pod("a", "worker", ready=False, **state_of_container(waiting={"reason": "ErrImagePull"}))
    api.of = {(CORE, "pods"): [pulling, READY]}
    assert KubernetesProvider().fault(ours) is None
    api.of[CORE, "pods"].append(pod("b", "worker", ready=False, **BACKOFF))
    assert KubernetesProvider().fault(ours) == "the pod b: CrashLoopBackOff: back-off 5m"


def test_nothing_is_wrong_before_anything_was_created(api: Api, tmp_path: Path) -> None:
    assert KubernetesProvider().fault(deployment(tmp_path)) is None and api.asked == []


def test_logs_are_those_of_each_pod_by_the_name_of_its_worker(api: Api, ours: Deployment) -> None:
    restarted = pod(
        "b", "worker", **{**BACKOFF, "containerStatuses": [{**BACKOFF["containerStatuses"][0], "restartCount": 2}]}
    )
    api.of = {(CORE, "pods"): [restarted, pod("a", "worker"), READY]}
    api.logs = {"a": "works\n", "b": " \n", "b before": "failed\n"}
    assert KubernetesProvider().logs(ours, 7) == {
        "scheduler": "",
        "worker dask-a": "works",
        "worker dask-b": "failed\n(CrashLoopBackOff: back-off 5m)",
    }
    assert ("b", {"tailLines": "7", "previous": "true"}) in api.asked and ("a", {"tailLines": "7"}) in api.asked
    assert ("a", {"tailLines": "7", "previous": "true"}) not in api.asked


def test_log_of_a_component_without_pods_is_the_reason(api: Api, ours: Deployment) -> None:
    failure = {
        "conditions": [{"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": "quota"}]
    }
    well = {
        "conditions": [
            {"type": "ReplicaFailure", "status": "False", "reason": "x"},
            {"type": "Available", "status": "True"},
        ]
    }
    api.of = {
        (APPS, "deployments"): [
            thing("dev-worker-0", labels("worker"), status=well),
            thing("dev-worker-1", labels("worker"), status=failure),
            thing("dev-scheduler", labels("scheduler"), status=well),
        ]
    }
    assert KubernetesProvider().logs(ours, 7) == {"worker": "(FailedCreate: quota)"}


@pytest.mark.parametrize(
    ("status", "words", "hopeless"),
    [
        (BACKOFF, "CrashLoopBackOff: back-off 5m", True),
        (state_of_container(terminated={"exitCode": 3}), "ended with exit code 3", False),
        (state_of_container(waiting={"reason": "PodInitializing"}), None, None),
        (state_of_container(running={}), None, None),
        (state_of_container(waiting={"reason": "Other"}), "Other", False),
    ],
)
def test_trouble_of_a_pod_is_why_its_container_does_not_run(
    status: dict[str, Any], words: str | None, hopeless: bool | None
) -> None:
    trouble = pods.trouble_of(pod("a", ready=False, **status))
    assert (trouble and trouble.description, trouble and trouble.hopeless) == (words, hopeless)


@pytest.mark.parametrize(
    ("kind", "status", "ready"), [("Ready", "True", True), ("Ready", "False", False), ("Other", "True", False)]
)
def test_pod_is_ready_by_the_condition_of_that_name(kind: str, status: str, ready: bool) -> None:
    assert pods.is_ready({"status": {"conditions": [{"type": kind, "status": status}]}}) is ready
    assert not pods.is_ready({}) and not pods.is_ready({"status": {"conditions": None}})


def test_workers_are_known_only_while_the_scheduler_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    view = SimpleNamespace(state=State.UP, workers=[SimpleNamespace(name="a"), SimpleNamespace(name="b")], reason="why")
    monkeypatch.setattr("ddptrain.clusters.status.probe", lambda cluster, timeout_s: view)
    cluster = deployment(tmp_path)
    assert provider._joined(cluster) == {"a": view.workers[0], "b": view.workers[1]}
    view.state = State.ENDED
    with pytest.raises(ClusterError, match=r"^it is not known which workers are free: why$"):
        provider._joined(cluster)


@pytest.mark.parametrize(
    ("wanted", "each", "pods_there", "slots", "said"),
    [
        # (slots in use, slots) of each pod
        (2, 4, {"a": (0, 2), "b": (1, 4)}, {"a": 4}, []),  # a smaller worker that stays is made as large as the others
        (
            1,
            4,
            {"a": (1, 4), "b": (2, 2)},
            {"a": 1, "b": 4},
            ["runs use 1 of the workers to remove: scale again"],
        ),
        (
            0,
            4,
            {"a": (1, 4), "b": (2, 4)},
            {"a": 1, "b": 2},
            ["runs use 2 of the workers to remove: scale again"],
        ),
    ],
)
def test_pods_in_use_keep_as_many_slots_as_runs_hold(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    wanted: int,
    each: int,
    pods_there: dict[str, tuple[int, int]],
    slots: dict[str, int],
    said: list[str],
) -> None:
    joined = {
        name: SimpleNamespace(address=name, held=held, slots=count, warm=True)
        for name, (held, count) in pods_there.items()
    }
    joined["foreign"] = SimpleNamespace(address="foreign", held=0, slots=1, warm=None)
    given: list[dict[str, int]] = []
    monkeypatch.setattr(provider, "_joined", lambda cluster: joined)
    monkeypatch.setattr(provider, "_set_slots", lambda cluster, slots: given.append(slots))
    replicas: list[Any] = []

    class Resizing(Api):
        async def patch(self, group: str, path: str, body: dict[str, Any]) -> None:
            replicas.append((group, path, body["spec"]["worker"]["replicas"]))

    its_labels = {**labels("worker"), "dask.org/workergroup-name": "dev-default"}
    api = Resizing({(APPS, "deployments"): [thing(name, its_labels) for name in pods_there]})
    api.of[APPS, "deployments"].append(thing("of another group", labels("worker")))
    told: list[str] = []
    cluster = deployment(tmp_path)
    asyncio.run(provider.resize(cast(Kubernetes, api), cluster, wanted, each, told.append))
    assert given == [slots] and [words[: len(told[0])].partition(" when")[0] for words in told] == said
    assert replicas == [(DASK, "daskworkergroups/dev-default", 2)] and cluster.record.workers == 2 and not api.deleted
