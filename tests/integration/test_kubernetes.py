"""Clusters in Kubernetes, with dask-kubernetes' own operator, against an API server and pods on loopback."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ddptrain.clusters.backends.kubernetes.spec import OWNER_LABEL
from tests.conftest import PATIENCE_S, Cli, Finished, Running

pytest.importorskip("dask_kubernetes", reason='dask-kubernetes is not installed: pip install "ddptrain[kubernetes]"')

from dask_kubernetes.operator import make_cluster_spec

from tests.servers.kube_node import GOOD_IMAGE, Node
from tests.servers.kube_server import KubeServer

OPERATOR = Path(__file__).with_name("kube_operator.py")


def wait_until(what: Callable[[], Any], timeout_s: float = PATIENCE_S) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := what()):
        assert time.monotonic() < deadline, f"still waiting after {timeout_s} s"
        time.sleep(0.05)
    return found


@pytest.fixture(scope="module")
def kube(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubeServer]:
    """An API server with the operator at work in the namespace ml."""
    folder = tmp_path_factory.mktemp("kube")
    with KubeServer(folder, Node) as server, (folder / "operator.log").open("wb") as log:
        env = {**os.environ, "KUBECONFIG": str(server.kubeconfig("operator"))}
        command = [sys.executable, str(OPERATOR), str(folder / "names.json"), "--namespace", "ml"]
        operator = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        try:
            wait_until(lambda: operator.poll() is not None or watches(server, "daskclusters", "daskworkergroups"))
            assert operator.poll() is None, last_words(folder)
            yield server
            assert operator.poll() is None, last_words(folder)
            assert not server.faults, "\n".join(server.faults)
        finally:
            end(operator)


def watches(server: KubeServer, *plurals: str) -> bool:
    """Whether somebody watches all of these."""
    watched = {call.path.rpartition("/")[2] for call in list(server.calls) if "watch" in call.query}
    return watched.issuperset(plurals)


def last_words(folder: Path) -> str:
    """What the operator and the schedulers have said last."""
    logs = {"operator": folder / "operator.log", **{log.parent.name: log for log in folder.glob("pods/*sched*/log-*")}}
    ends = [
        f"-- {name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-20:]) for name, log in logs.items()
    ]
    return "\n".join(ends)


def end(operator: subprocess.Popen[bytes]) -> None:
    """End it, also where it does not end by itself."""
    operator.terminate()
    try:
        operator.wait(60)
    except subprocess.TimeoutExpired:
        operator.kill()
        operator.wait()
        print("the operator did not end within 60 s of SIGTERM, and was killed")


OURS = ("daskclusters", "daskworkergroups", "deployments", "pods", "secrets")

WORKLOAD = """
import time
from pathlib import Path


def train(ctx, until=""):
    print("rank", ctx.rank, "of", ctx.world_size, flush=True)
    while until and not Path(until).exists():
        time.sleep(0.05)
    ctx.save_file(f"from-{ctx.rank}.txt", "done")
"""


class ClusterCli:
    """Runs `ddptrain` with a kubeconfig."""

    def __init__(self, run_cli: Cli, kube: KubeServer) -> None:
        self.run_cli = run_cli
        self.folder = run_cli.folder
        self.env = {"KUBECONFIG": str(kube.kubeconfig())}
        (self.folder / "mine.py").write_text(WORKLOAD)
        (self.folder / "mine.yaml").write_text("workload: mine:train\n")

    def __call__(self, *args: str, timeout_s: float = 100) -> Finished:
        return self.run_cli(*args, env=self.env, timeout_s=timeout_s)

    def up(self, name: str, *args: str, image: str = GOOD_IMAGE) -> Finished:
        """`ddptrain cluster up`, to its end."""
        return self.start_up(name, *args, image=image).finish()

    def start_up(self, name: str, *args: str, image: str = GOOD_IMAGE) -> Running:
        """`ddptrain cluster up`."""
        settings = ("--backend", "kubernetes", "--name", name, "--set", f"cluster.kubernetes.image={image}")
        return self.run_cli.start("cluster", "up", *settings, *args, env=self.env)

    def json(self, *args: str) -> Any:
        """What a command tells."""
        is_look = args[0] in ("status", "list")
        done = self.run_cli.look(*args, "--json", env=self.env) if is_look else self("cluster", *args, "--json")
        assert done.rc == 0, done.stderr
        return json.loads(done.stdout)

    def busy(self, name: str, ranks: int) -> Running:
        """A run that ends once the file `enough` is there, on that many ranks."""
        until = f"params.until={self.folder / 'enough'}"
        run = self.run_cli.start(
            *("train", "mine.yaml", "--cluster", name, "--ranks", str(ranks), "--set", until), env=self.env
        )
        run.wait_for(f"rank {ranks - 1} of {ranks}")
        return run

    def let_end(self, run: Running) -> None:
        """Let a busy run end; the next one will be busy again."""
        (self.folder / "enough").touch()
        ended = run.finish()
        assert ended.rc == 0, ended.stderr
        (self.folder / "enough").unlink()


@pytest.fixture
def cluster(kube: KubeServer, run_cli: Cli) -> Iterator[ClusterCli]:
    """`ddptrain cluster` for that API server; what a test leaves in Kubernetes fails it."""
    commands = ClusterCli(run_cli, kube)
    yield commands
    kube.forbidden.clear()
    kube.has_operator_crds = True
    left = left_in(kube)
    if left:  # away with it, lest the next test find it
        said = last_words(kube.folder)
        try:
            commands("cluster", "down", "--all", "--now")
        finally:
            with contextlib.suppress(AssertionError):
                wait_until(lambda: is_wiped(kube))
        pytest.fail(f"left in Kubernetes: {left}; the operator's last words:\n{said}")


def is_wiped(kube: KubeServer) -> bool:
    """Delete all there is, again and again: the operator may be about to make more of it."""
    for plural in OURS:
        kube.wipe(plural)
    return not left_in(kube)


def left_in(kube: KubeServer) -> list[str]:
    """What is left of all clusters."""
    return [f"{plural} {each['metadata']['name']}" for plural in OURS for each in kube.objects(plural)]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_cluster_lives_from_up_to_down(cluster: ClusterCli, kube: KubeServer) -> None:
    """All in one, for each worker takes seconds to start."""
    up = cluster.up("dev", "--ranks", "2", "--json")
    assert up.rc == 0, up.stderr
    told = json.loads(up.stdout)
    assert (told["state"], told["slots"], told["tls"]) == ("up", 2, True)
    assert told["address"].startswith("tls://127.0.0.1:"), "a port-forward of this machine"
    assert "creating the DaskCluster dev in the namespace ml" in up.stderr
    assert [worker["warm"] for worker in told["workers"]] == [True, True]

    others_attach_to_it_and_leave_it(cluster, kube)
    connection_without_its_certificate_is_refused(cluster, told["address"])
    worker_in_use_stays_until_its_run_has_ended(cluster, kube)
    scaling_down_ends_the_workers_that_no_run_is_on(cluster, kube)
    assert {source.split()[0] for source in cluster.json("logs", "dev")} >= {"scheduler", "worker"}
    port_forward_that_this_machine_has_lost_is_started_again(cluster, told)

    down = cluster("cluster", "down", "dev")
    assert down.rc == 0, down.stderr
    assert not any(kube.objects(plural) for plural in OURS)
    assert cluster.json("list") == []


def others_attach_to_it_and_leave_it(cluster: ClusterCli, kube: KubeServer) -> None:
    elsewhere = {**cluster.env, "XDG_STATE_HOME": str(cluster.folder / "another-machine")}
    told = cluster.run_cli(
        *("cluster", "up", "--backend", "kubernetes", "--name", "dev"),
        *("--set", "cluster.kubernetes.image=any", "--json"),
        env=elsewhere,
    )
    assert told.rc == 0, told.stderr
    assert "it is used as it is" in told.stderr
    assert json.loads(told.stdout)["address"].startswith("tls://"), "with the key that lies in Kubernetes"
    left = cluster.run_cli("cluster", "down", "dev", env=elsewhere)
    assert left.rc == 0 and "keeps running" in left.stderr
    assert len(kube.objects("daskclusters")) == 1
    assert cluster.json("status", "dev")["state"] == "up"


def connection_without_its_certificate_is_refused(cluster: ClusterCli, address: str) -> None:
    refused = cluster.run_cli(
        *("train", "mine.yaml", "--cluster", address.replace("tls://", "tcp://")),
        *("--set", "cluster.start_timeout_s=5"),
        env={**cluster.env, "XDG_STATE_HOME": str(cluster.folder / "x")},
    )
    assert refused.rc == 4, refused.stderr


def worker_in_use_stays_until_its_run_has_ended(cluster: ClusterCli, kube: KubeServer) -> None:
    run = cluster.busy("dev", ranks=2)
    scaled = cluster("cluster", "scale", "dev", "1")
    assert scaled.rc == 0, scaled.stderr
    assert "runs use 1 of the workers to remove" in scaled.stderr
    assert len(kube.objects("deployments")) == 3, "two workers' and the scheduler's"
    cluster.let_end(run)


def scaling_down_ends_the_workers_that_no_run_is_on(cluster: ClusterCli, kube: KubeServer) -> None:
    assert cluster.json("scale", "dev", "3")["slots"] == 3
    run = cluster.busy("dev", ranks=1)
    (holder,) = (worker["name"] for worker in cluster.json("status", "dev")["workers"] if worker["held"])
    assert cluster.json("scale", "dev", "1")["slots"] == 1
    workers = [each["metadata"]["name"] for each in kube.objects("deployments") if "worker" in each["metadata"]["name"]]
    assert workers == [holder]
    cluster.let_end(run)


def port_forward_that_this_machine_has_lost_is_started_again(cluster: ClusterCli, up: dict[str, Any]) -> None:
    psutil.Process(up["parts"]["forward"]["pid"]).kill()
    wait_until(lambda: cluster.json("list")[0]["state"] == "ended")
    again = cluster("cluster", "up", "--name", "dev")
    assert again.rc == 2 and f"the cluster dev is up at {up['address']}" in again.stderr
    now = cluster.json("status", "dev")
    assert now["state"] == "up"
    forward = psutil.Process(now["parts"]["forward"]["pid"])
    forward.kill()
    forward.wait(PATIENCE_S)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # another program has the port already
            stack.enter_context(socket.create_server(("127.0.0.1", up["parts"]["ports"][0])))
        trained = cluster("train", "mine.yaml", "--cluster", "dev")
    assert trained.rc == 0, trained.stderr
    assert cluster.json("status", "dev")["address"] != up["address"], "another program has the port now"


@pytest.mark.slow
def test_cluster_that_others_made_with_plain_dask_is_trained_on_and_left(cluster: ClusterCli, kube: KubeServer) -> None:
    theirs = make_cluster_spec("theirs", image=GOOD_IMAGE, n_workers=1, env=[], worker_command="dask worker")
    # The command that it writes, dask-scheduler, is none of Dask's any more.
    theirs["spec"]["scheduler"]["spec"]["containers"][0]["args"][:1] = ["dask", "scheduler"]
    kube.put("daskclusters", "ml", theirs)
    up = cluster.up("theirs", "--json")
    assert up.rc == 0, up.stderr
    assert json.loads(up.stdout)["address"].startswith("tcp://127.0.0.1:")
    trained = cluster("train", "mine.yaml", "--cluster", "theirs", "--ranks", "1")
    assert trained.rc == 0, trained.stderr
    assert cluster("cluster", "down", "theirs").rc == 0
    assert len(kube.objects("daskclusters")) == 1, "it is theirs"
    kube.clear("daskclusters")
    wait_until(lambda: not left_in(kube))


def test_load_balancer_is_used_where_it_is_asked_for(cluster: ClusterCli, kube: KubeServer) -> None:
    up = cluster.up("dev", "--set", "cluster.kubernetes.scheduler_service_type=LoadBalancer", "--json")
    assert up.rc == 0, up.stderr
    told = json.loads(up.stdout)
    (service,) = kube.objects("services")
    assert told["address"] == f"tls://{service['status']['loadBalancer']['ingress'][0]['ip']}:8786"
    assert "forward" not in told["parts"]
    assert cluster("cluster", "down", "dev").rc == 0


@pytest.mark.slow
def test_operator_deletes_a_cluster_that_is_idle_but_none_in_use(cluster: ClusterCli, kube: KubeServer) -> None:
    assert cluster.up("dev", "--idle-timeout", "600").rc == 0
    assert kube.objects("daskclusters")[0]["spec"]["idleTimeout"] == 600
    run = cluster.busy("dev", ranks=1)
    kube.change("daskclusters", "ml", "dev", {"spec": {"idleTimeout": 1}})  # no run would have begun in that time
    time.sleep(1 + 6)  # the operator asks every 5 s
    assert kube.objects("daskclusters")
    cluster.let_end(run)
    wait_until(lambda: not any(kube.objects(plural) for plural in OURS))
    assert cluster.json("list")[0]["state"] == "ended"
    assert cluster("cluster", "down", "dev").rc == 0


# --- what goes wrong ---


def test_image_that_cant_be_pulled_is_told_at_once_and_leaves_nothing(cluster: ClusterCli) -> None:
    up = cluster.up("dev", "--start-timeout", "3600", image="registry.test/missing:1")
    assert up.rc == 4
    assert 'ImagePullBackOff: Back-off pulling image "registry.test/missing:1"' in up.stderr.splitlines()[-1]
    assert cluster.json("list") == []


def test_pod_without_a_node_is_told_when_the_time_is_over(cluster: ClusterCli) -> None:
    gpus = ("--set", "cluster.kubernetes.gpus_per_worker=8")
    up = cluster.up("dev", *gpus, "--start-timeout", "6")
    if "scheduler at tls://" not in up.stderr:  # the machine is too busy for it to be there in that time
        up = cluster.up("dev", *gpus, "--start-timeout", "40")
    assert up.rc == 4
    assert "Unschedulable: 0/1 nodes are available: 1 Insufficient nvidia.com/gpu." in up.stderr


def test_scheduler_that_crashes_is_told_with_its_last_words(cluster: ClusterCli) -> None:
    up = cluster.up("dev", "--set", "cluster.kubernetes.env={PYTHONHASHSEED: nonsense}")
    assert up.rc == 4
    assert "CrashLoopBackOff" in up.stderr and "PYTHONHASHSEED must be" in up.stderr


def test_refused_right_is_told_and_leaves_nothing(cluster: ClusterCli, kube: KubeServer) -> None:
    kube.forbidden.add(("POST", "daskclusters"))
    up = cluster.up("dev")
    assert up.rc == 4
    assert up.stderr.splitlines()[-1].startswith(
        "ddptrain: error: Kubernetes does not allow it: daskclusters is forbid"
    )


def test_wrong_token_is_told(cluster: ClusterCli, kube: KubeServer) -> None:
    cluster.env["KUBECONFIG"] = str(kube.kubeconfig("wrong", token="wrong"))
    up = cluster.up("dev")
    assert up.rc == 4
    assert "Kubernetes does not accept the credentials of the kubeconfig" in up.stderr.splitlines()[-1]


def test_missing_operator_is_told_with_how_to_install_it(cluster: ClusterCli, kube: KubeServer) -> None:
    kube.has_operator_crds = False
    up = cluster.up("dev")
    assert up.rc == 4
    assert "helm install --repo https://helm.dask.org" in up.stderr.splitlines()[-1]


def test_namespace_that_the_operator_does_not_watch_is_told(cluster: ClusterCli, kube: KubeServer) -> None:
    up = cluster.up("dev", "--set", "cluster.kubernetes.context=other-context", "--start-timeout", "3")
    assert up.rc == 4
    assert "does it watch the namespace other" in up.stderr.splitlines()[-1]


def test_parts_that_the_operator_did_not_give_an_owner_in_time_are_deleted_as_well(
    cluster: ClusterCli, kube: KubeServer
) -> None:
    """It makes a worker group first, and the DaskCluster its owner later: too late, where that is gone already."""
    other = ("--set", "cluster.kubernetes.context=other-context")  # where no operator is at work
    up = cluster.start_up("dev", *other)
    (made,) = wait_until(lambda: kube.objects("daskclusters"))
    labels = made["metadata"]["labels"]
    kube.put("daskworkergroups", "other", {"metadata": {"name": "dev-default", "labels": labels}, "spec": {}})
    foreign = {"metadata": {"name": "theirs-default", "labels": {**labels, OWNER_LABEL: "someone"}}, "spec": {}}
    kube.put("daskworkergroups", "other", foreign)
    up.wait_for("the scheduler's pod: not there yet")
    up.popen.send_signal(signal.SIGINT)
    assert up.finish().rc == 130
    assert [group["metadata"]["name"] for group in kube.objects("daskworkergroups")] == ["theirs-default"]
    kube.clear("daskworkergroups")


def test_up_that_is_killed_leaves_nothing_that_down_does_not_find(cluster: ClusterCli, kube: KubeServer) -> None:
    gpus = ("--set", "cluster.kubernetes.gpus_per_worker=8")
    up = cluster.start_up("dev", *gpus)
    up.wait_for("scheduler at tls://")
    up.kill_group()
    assert kube.objects("daskclusters")
    assert cluster("cluster", "down", "dev").rc == 0


def test_interrupt_while_the_scheduler_has_no_node_leaves_nothing(cluster: ClusterCli) -> None:
    up = cluster.start_up("dev", "--set", "cluster.kubernetes.node_selector={pool: none}")
    up.wait_for("the scheduler's pod: Unschedulable")
    up.popen.send_signal(signal.SIGINT)
    assert up.finish().rc == 130
    assert cluster.json("list") == []


def test_certificate_that_stands_in_the_kubeconfig_is_left_in_no_temporary_file(
    cluster: ClusterCli, kube: KubeServer
) -> None:
    temporary = cluster.folder / "tmp"
    temporary.mkdir()
    cluster.env |= {"KUBECONFIG": str(kube.kubeconfig("inline", inline=True)), "TMPDIR": str(temporary)}
    up = cluster.up("dev", image="registry.test/missing:1")
    assert "ImagePullBackOff" in up.stderr
    assert [path for path in temporary.iterdir() if path.is_file()] == []
