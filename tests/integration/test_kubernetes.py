"""Clusters in Kubernetes, with the real kubectl, against an API server and pods on loopback."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import Cli, Finished, Running
from tests.servers.kube_node import GOOD_IMAGE, Node
from tests.servers.kube_server import KubeServer
from tests.support.command import wait_until

KUBECTL = shutil.which("kubectl")
pytestmark = pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed")

OURS = ("jobs", "pods", "secrets", "services")

# The API server here does not speak SPDY, so ports are forwarded by this program; all else is the real kubectl's.
KUBECTL_HERE = f"""#!{sys.executable}
import asyncio, json, os, sys
if "port-forward" not in sys.argv:
    os.execv({KUBECTL!r}, sys.argv)
job, ports = sys.argv[-2:]
here, there = map(int, ports.split(":"))
address = json.load(open(os.environ["TEST_NAMES"]))[job.removeprefix("job/")]

async def carry(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()

async def handle(reader, writer):
    to = await asyncio.open_connection(address, there)
    await asyncio.gather(carry(reader, to[1]), carry(to[0], writer), return_exceptions=True)

async def main():
    async with await asyncio.start_server(handle, "127.0.0.1", here) as server:
        await server.serve_forever()

asyncio.run(main())
"""

WORKLOAD = """
import time
from pathlib import Path


def train(ctx, until=""):
    print("rank", ctx.rank, "of", ctx.world_size, flush=True)
    while until and not Path(until).exists():
        time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def kube(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubeServer]:
    folder = tmp_path_factory.mktemp("kube")
    (folder / "bin").mkdir()
    (folder / "bin" / "kubectl").write_text(KUBECTL_HERE)
    (folder / "bin" / "kubectl").chmod(0o755)
    with KubeServer(folder, Node) as server:
        yield server
        assert not server.faults, "\n".join(server.faults)


class ClusterCli:
    """Runs `ddptrain` with a kubeconfig."""

    def __init__(self, run_cli: Cli, kube: KubeServer, path: str) -> None:
        self.run_cli = run_cli
        self.env = {
            "KUBECONFIG": str(kube.kubeconfig()),
            "PATH": f"{kube.folder / 'bin'}:{path}",
            "TEST_NAMES": str(kube.folder / "names.json"),
        }
        (run_cli.folder / "mine.py").write_text(WORKLOAD)
        (run_cli.folder / "mine.yaml").write_text("workload: mine:train\n")

    def __call__(self, *args: str, rc: int = 0) -> Finished:
        done = self.run_cli(*args, env=self.env, timeout_s=100)
        assert done.rc == rc, done
        return done

    def start_up(self, *args: str, image: str = GOOD_IMAGE) -> Running:
        """`ddptrain cluster up`."""
        settings = ("--backend", "kubernetes", "--name", "dev", "--set", f"cluster.kubernetes.image={image}", "--json")
        return self.run_cli.start("cluster", "up", *settings, *args, env=self.env)

    def up(self, *args: str, rc: int = 0, image: str = GOOD_IMAGE) -> Finished:
        done = self.start_up(*args, image=image).finish()
        assert done.rc == rc, done
        return done

    def json(self, *args: str) -> Any:
        return json.loads(self("cluster", *args, "--json").stdout)


@pytest.fixture
def cluster(kube: KubeServer, run_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClusterCli]:
    """`ddptrain cluster` for that API server; what a test leaves in Kubernetes fails it."""
    import os

    commands = ClusterCli(run_cli, kube, os.environ["PATH"])
    yield commands
    kube.forbidden.clear()
    if left := left_in(kube):  # away with it, lest the next test find it
        for plural in OURS:
            kube.clear(plural)
        pytest.fail(f"left in Kubernetes: {left}")


def left_in(kube: KubeServer) -> list[str]:
    return [f"{plural} {each['metadata']['name']}" for plural in OURS for each in kube.objects(plural)]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_cluster_lives_from_up_to_down(cluster: ClusterCli, kube: KubeServer) -> None:
    """All in one, for each worker takes seconds to start."""
    view = json.loads(cluster.up("--ranks", "2").stdout)
    assert (view["state"], view["slots"], view["tls"]) == ("up", 2, True)
    assert view["address"].startswith("tls://127.0.0.1:"), "a port-forward of this machine"
    assert [worker["warm"] for worker in view["workers"]] == [True, True]
    assert "rank 1 of 2" in cluster("train", "mine.yaml", "--cluster", "dev").stdout
    stranger = {**cluster.env, "XDG_STATE_HOME": str(cluster.run_cli.folder / "x")}
    address = view["address"].replace("tls://", "tcp://")
    limit = ("--set", "cluster.start_timeout_s=5")
    refused = cluster.run_cli("train", "mine.yaml", "--cluster", address, *limit, env=stranger)
    assert refused.rc == 4, "without the certificate"
    assert {source.split()[0] for source in cluster.json("logs", "dev")} >= {"scheduler", "worker"}

    cluster("cluster", "down", "dev")
    assert cluster.json("status") == [] and not left_in(kube)


TRAINING = """
import time
import torch


def train(ctx, steps=10000):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = ctx.resume(model=model, optimizer=optimizer)
    for step in range(found.step + 1 if found else 1, steps + 1):
        time.sleep(0.1)
        ctx.checkpoint(model=model, optimizer=optimizer, step=step)
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_submitted_run_is_a_job_that_goes_on_after_a_preemption_until_somebody_stops_it(
    cluster: ClusterCli, kube: KubeServer
) -> None:
    folder = cluster.run_cli.folder
    (folder / "saving.py").write_text(TRAINING)
    account = {**cluster.env, "PATH": f"{cluster.env['PATH']}", "PYTHONPATH": str(folder)}
    (kube.folder / "account.json").write_text(json.dumps(account))
    runs = {"name": "runs", "mountPath": str(folder), "hostPath": {"path": str(folder)}}
    settings = {"image": GOOD_IMAGE, "volumes": [runs]}
    config = {"workload": "saving:train", "name": "pods", "cluster": {"kubernetes": settings}}
    (folder / "saving.yaml").write_text(json.dumps(config))

    def run() -> Any:
        return json.loads(cluster("results", "show", "latest", "--json").stdout)

    said = cluster("train", "saving.yaml", "--submit")
    run_id = said.stdout.strip()
    (job,) = run()["jobs"]
    name = job["id"].rpartition("/")[2]
    assert f"run {run_id} is queued as kubernetes job {job['id']}" in said.stderr
    assert {f"jobs {name}", f"secrets {name}"} <= set(left_in(kube))
    wait_until(lambda: run()["checkpoints"])
    (pod,) = [pod for pod in kube.objects("pods") if pod["metadata"]["name"].startswith(name)]
    assert isinstance(kube.node, Node)
    process = kube.node.pods[pod["metadata"]["name"]].process
    assert process is not None
    process.send_signal(signal.SIGTERM)  # as a node that is drained does
    wait_until(lambda: run()["jobs"][0]["starts"] == 2 and run()["world_size"])
    wait_until(lambda: run()["status"] == "running" and not run()["waiting"])
    assert run()["attempts"][-1]["resumed_from"] > 0
    assert "stopped (saved)" in cluster("stop", run_id).stdout

    def driver_jobs() -> list[Any]:
        return [job["status"] for job in kube.objects("jobs") if job["metadata"]["name"] == name]

    wait_until(lambda: any("conditions" in status for status in driver_jobs()))
    assert run()["jobs"][0]["starts"] == 2
    kube.clear("jobs")
    kube.clear("secrets")
    wait_until(lambda: not left_in(kube))


def test_run_in_a_folder_that_its_pod_would_lose_is_not_submitted(cluster: ClusterCli) -> None:
    (cluster.run_cli.folder / "pods.yaml").write_text("{workload: petnames, cluster: {kubernetes: {image: i}}}")
    said = cluster("train", "pods.yaml", "--submit", rc=2)
    assert "cluster.kubernetes.volumes" in said.stderr
    volumes = f"[{{name: r, mountPath: {cluster.run_cli.folder}, emptyDir: {{}}}}]"
    options = ("--set", f"cluster.kubernetes.volumes={volumes}", "--report", "run.md")
    assert "--report" in cluster("train", "pods.yaml", "--submit", *options, rc=2).stderr
    assert json.loads(cluster("results", "list", "--json").stdout) == []


def test_queued_run_is_stopped_with_its_job(cluster: ClusterCli, kube: KubeServer) -> None:
    folder = str(cluster.run_cli.folder)
    settings = {"image": "registry.test/missing:1", "volumes": [{"name": "runs", "mountPath": folder, "emptyDir": {}}]}
    config = {"workload": "petnames", "cluster": {"kubernetes": settings}}
    (cluster.run_cli.folder / "pods.yaml").write_text(json.dumps(config))
    cluster("train", "pods.yaml", "--submit")
    wait_until(lambda: "ImagePullBackOff" in cluster("results", "show", "latest").stdout)
    assert "stopped" in cluster("stop", "latest").stdout
    wait_until(lambda: not left_in(kube))


@pytest.mark.slow
def test_idle_cluster_ends_with_its_pods(cluster: ClusterCli, kube: KubeServer) -> None:
    cluster.up("--idle-timeout", "15")
    wait_until(lambda: {pod["status"]["phase"] for pod in kube.objects("pods")} <= {"Succeeded", "Failed"})
    wait_until(lambda: cluster.json("status")[0]["state"] == "ended")
    cluster("cluster", "down", "dev")


def test_image_that_can_not_be_pulled_is_named_at_once_and_leaves_nothing(cluster: ClusterCli) -> None:
    failed = cluster.up("--set", "cluster.start_timeout_s=3600", image="registry.test/missing:1", rc=4)
    assert 'ImagePullBackOff: Back-off pulling image "registry.test/missing:1"' in failed.stderr
    assert cluster.json("status") == []


@pytest.mark.slow
def test_worker_without_a_node_is_named_when_the_time_is_over(cluster: ClusterCli) -> None:
    failed = cluster.up("--set", "cluster.kubernetes.gpus_per_worker=8", "--set", "cluster.start_timeout_s=20", rc=4)
    assert "Unschedulable: 0/1 nodes are available: 1 Insufficient nvidia.com/gpu." in failed.stderr


def test_scheduler_that_fails_is_named_with_its_last_words(cluster: ClusterCli) -> None:
    args = ["python", "-c", "import sys; sys.exit('no such module')"]
    broken = {"containers": [{"name": "scheduler", "image": GOOD_IMAGE, "args": args}]}
    failed = cluster.up("--set", f"cluster.kubernetes.pod={json.dumps(broken)}", rc=4)
    assert "it ended with exit code" in failed.stderr and "no such module" in failed.stderr


@pytest.mark.parametrize(
    ("method", "token", "words"), [("POST", "", "jobs is forbidden"), ("", "wrong", "Unauthorized")]
)
def test_refused_call_is_one_line_and_leaves_nothing(
    cluster: ClusterCli, kube: KubeServer, method: str, token: str, words: str
) -> None:
    kube.forbidden.add((method, "jobs"))
    if token:
        cluster.env["KUBECONFIG"] = str(kube.kubeconfig("wrong", token=token))
    failed = cluster.up(rc=4)
    assert any(line.startswith("ddptrain: error: kubectl: ") and words in line for line in failed.stderr.splitlines())
    if token:  # nothing was created, and nobody can say so
        (cluster.env["KUBECONFIG"]) = str(kube.kubeconfig())
        cluster("cluster", "down", "dev")


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_start_that_ends_early_leaves_nothing_that_down_does_not_find(
    cluster: ClusterCli, kube: KubeServer, sent: signal.Signals
) -> None:
    up = cluster.start_up("--set", "cluster.kubernetes.pod={nodeSelector: {pool: none}}")
    up.wait_for("the scheduler's pod: Unschedulable")
    if sent is signal.SIGKILL:
        up.kill_group()
        assert kube.objects("jobs")
        cluster("cluster", "down", "dev")
    else:
        up.popen.send_signal(sent)
        assert up.finish().rc == 130
    assert cluster.json("status") == []


def test_settings_are_in_the_pods_and_what_the_schema_does_not_know_is_refused(
    cluster: ClusterCli, kube: KubeServer
) -> None:
    settings = {
        "image": "registry.test/missing:1",
        "workers": 2,
        "gpus_per_worker": 4,
        "resources": {"requests": {"memory": "8Gi"}},
        "volumes": [{"name": "data", "mountPath": "/data", "persistentVolumeClaim": {"claimName": "data"}}],
        "pod": {"nodeSelector": {"pool": "gpu"}, "priorityClassName": "high"},
    }
    up = cluster.start_up("--set", f"cluster.kubernetes={json.dumps(settings)}")
    (job,) = wait_until(lambda: [job for job in kube.objects("jobs") if job["spec"].get("completions") == 2])
    spec = job["spec"]["template"]["spec"]
    container = spec["containers"][0]
    assert spec["nodeSelector"] == {"pool": "gpu"} and spec["priorityClassName"] == "high"
    assert container["resources"] == {"requests": {"memory": "8Gi"}, "limits": {"nvidia.com/gpu": "4"}}
    assert {"name": "data", "mountPath": "/data"} in container["volumeMounts"]
    up.popen.send_signal(signal.SIGINT)
    up.finish()
    wrong = cluster.up("--set", "cluster.kubernetes.pod={tolerationz: []}", rc=4)
    assert "tolerationz" in wrong.stderr
