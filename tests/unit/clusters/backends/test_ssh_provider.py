"""The order of what the backend ssh asks of its hosts, on hosts that answer without ssh."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import pytest

from ddptrain import __version__
from ddptrain.clusters import cluster_records
from ddptrain.clusters.backends import ssh
from ddptrain.clusters.backends.ssh import Part, SshProvider
from ddptrain.clusters.backends.ssh_host import Host
from ddptrain.clusters.cluster_records import ClusterRecord, Deployment
from ddptrain.clusters.processes import FOLDER, DaemonId
from ddptrain.config.sections.clusters import ClusterConfig, SshSettings
from ddptrain.errors import ClusterError
from ddptrain.worker import driver_calls

LINK = "http://127.0.0.1:8787/status"


class Hosts:
    """Hosts by name that note what they are asked. `answers` of (host, command) come before the usual ones."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, dict[str, Any]]] = []
        self.answers: dict[tuple[str, str], Any] = {}

    def call(self, host: Host, command: str, **given: Any) -> Any:
        self.calls.append((host.name, command, given))
        answer = self.answers.get((host.name, command)) or self._usual(host, command, given)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def of(self, command: str, host: str = "") -> list[dict[str, Any]]:
        """The arguments of each call of that command."""
        return [given for name, called, given in self.calls if called == command and host in (name, "")]

    def _usual(self, host: Host, command: str, given: Mapping[str, Any]) -> Any:
        if command == "describe":
            return {"version": __version__, "reached_at": f"10.0.0.{host.number + 1}", "addresses": {host.name: ""}}
        if command == "start":
            folder = f"/{host.name}/{given['name']}"
            return dataclasses.asdict(DaemonId(given["name"], 100 + host.number, 1.0, folder))
        if command == "read":
            return {"address": "tls://10.0.0.1:4000", "dashboard": LINK}
        return {"alive": [True], "end": None, "tail": f"log of {host.name}\n"}[command]


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hosts:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    there = Hosts()

    def call(host: Host, command: str, **given: Any) -> Any:
        return there.call(host, command, **given)

    monkeypatch.setattr(Host, "call", call)
    monkeypatch.setattr(Host, "address", property(lambda host: host.name))
    return there


def deployment(names: str = "a b", *, tls: bool = False, ranks: Any = "auto", **changes: Any) -> Deployment:
    settings = {name: changes.pop(name) for name in ("ranks_per_host", "scheduler_host", "env") if name in changes}
    config = ClusterConfig(backend="ssh", ranks=ranks, ssh=SshSettings(hosts=names.split(), **settings), **changes)
    given = config.model_dump(mode="json")
    made = cluster_records.create(ClusterRecord("dev", "ssh", "now", settings=given, idle_timeout_s=60.0))
    for name in ("cert.pem", "key.pem") if tls else ():
        (made.folder / name).write_text(f"text of {name}")
    return made


def started(made: Deployment) -> list[str]:
    told: list[str] = []
    SshProvider().scale(made, None, told.append)
    return told


def test_first_host_gets_the_scheduler_and_every_host_a_worker(hosts: Hosts) -> None:
    made = deployment(tls=True, ranks=3, env={"NCCL_DEBUG": "INFO"})
    assert started(made) == ["asking 2 hosts", "scheduler on a", "worker on a", "worker on b"]
    scheduler, worker = hosts.of("start", "a")
    (other,) = hosts.of("start", "b")
    arguments = (
        f"-m ddptrain.clusters.scheduler.scheduler_process --folder {FOLDER} --host 10.0.0.1 --idle-timeout 60.0"
    )
    assert (scheduler["name"], scheduler["argv"]) == ("scheduler", arguments.split())
    command = "-m ddptrain.worker --scheduler tls://10.0.0.1:4000 --host {} --slots {} --gpus auto"
    scratch, tls = ["--scratch", f"{FOLDER}/scratch", "--name"], ["--tls-dir", FOLDER]
    assert worker["argv"] == [*command.format("10.0.0.1", 2).split(), *scratch, "a", *tls]
    assert other["argv"] == [*command.format("10.0.0.2", 1).split(), *scratch, "b", *tls]
    for order in (scheduler, worker, other):
        assert order["folder"] == "" and order["env"] == {"NCCL_DEBUG": "INFO"}
        assert order["files"] == {"cert.pem": "text of cert.pem", "key.pem": "text of key.pem"}
        assert order["label"].startswith("dev-") and len(order["label"]) == len("dev-") + 8
    assert len({order["label"] for order in (scheduler, worker, other)}) == 3
    assert hosts.of("read") == [{"folder": "/a/scheduler", "name": "scheduler.json", "timeout_s": 30.0}]


def test_record_of_a_started_cluster_has_its_processes_and_the_way_to_it(hosts: Hosts) -> None:
    made = deployment()
    started(made)
    record = cluster_records.find("dev").record
    assert (record.workers, record.address) == (2, "tls://10.0.0.1:4000")
    assert record.dashboard == f"{LINK} through ssh -N -L 127.0.0.1:8787:127.0.0.1:8787 a"
    assert {name: part["pid"] for name, part in record.parts.items()} == {
        "scheduler": 100,
        "worker a": 100,
        "worker b": 101,
    }
    assert [part["host"] for part in record.parts.values()] == [0, 0, 1]
    assert hosts.of("start")[0]["files"] == {} and "--tls-dir" not in hosts.of("start")[1]["argv"]


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"ranks": 3, "ranks_per_host": 4}, ["--slots 3"]),  # the second host stays free
        ({"gpus": 0}, ["--slots 0 --gpus none", "--slots 0 --gpus none"]),
        ({"ranks_per_host": 2}, ["--slots 2 --gpus auto", "--slots 2 --gpus auto"]),
    ],
)
def test_host_without_slots_is_not_used(hosts: Hosts, settings: dict[str, Any], wanted: list[str]) -> None:
    made = deployment(**settings)
    started(made)
    workers = [" ".join(order["argv"]) for order in hosts.of("start") if order["name"] == "worker"]
    assert [part in each for part, each in zip(wanted, workers, strict=True)] == [True] * len(wanted)
    assert made.record.workers == len(wanted) == len(hosts.of("describe"))


def test_every_host_that_cant_be_used_is_named_and_nothing_is_started(hosts: Hosts) -> None:
    for name in ("a", "c"):
        hosts.answers[name, "describe"] = ClusterError(f"{name}: no route")
    with pytest.raises(ClusterError) as refused:
        started(deployment("a b c"))
    assert str(refused.value) == "a: no route\nc: no route" and not hosts.of("start")


def test_loopback_and_network_are_not_mixed(hosts: Hosts) -> None:
    hosts.answers["b", "describe"] = {"version": __version__, "reached_at": "127.0.0.1", "addresses": {"b": ""}}
    with pytest.raises(ClusterError) as refused:
        started(deployment("a b c"))
    (line,) = str(refused.value).splitlines()
    assert line.startswith("b: ssh reaches it at 127.0.0.1, and the scheduler is at 10.0.0.1: a loopback address works")


def test_address_that_is_set_for_the_scheduler_is_that_of_the_first_host_alone(hosts: Hosts) -> None:
    made = deployment(scheduler_host="10.9.9.9")
    started(made)
    listens = {
        name: [order["argv"][order["argv"].index("--host") + 1] for order in hosts.of("start", name)] for name in "ab"
    }
    assert listens == {"a": ["10.9.9.9", "10.9.9.9"], "b": ["10.0.0.2"]}


def test_name_that_this_machine_cant_resolve_is_left_to_the_host(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"gpu1": "10.1.1.1"}

    def resolve(name: str) -> str:
        if name not in known:
            raise OSError(name)
        return known[name]

    monkeypatch.setattr(socket, "gethostbyname", resolve)
    assert (ssh._ip("gpu1"), ssh._ip("gpu2")) == ("10.1.1.1", "gpu2")


def test_scheduler_that_does_not_start_is_told_with_its_address(hosts: Hosts) -> None:
    hosts.answers["a", "read"] = ClusterError("port in use")
    made = deployment()
    with pytest.raises(ClusterError, match=r"^a: the scheduler did not start at 10\.0\.0\.1: port in use$"):
        started(made)
    assert [part["pid"] for part in made.record.parts.values()] == [100], "stop ends it"


def test_process_is_in_the_record_before_the_host_has_answered(hosts: Hosts) -> None:
    made = deployment()
    hosts.answers["b", "start"] = ClusterError("b: hung up")
    with pytest.raises(ClusterError, match="b: hung up"):
        started(made)
    assert list(made.record.parts) == ["scheduler", "worker a", "worker b"]
    assert "pid" in made.record.parts["worker a"] and "pid" not in made.record.parts["worker b"]
    SshProvider().stop(made, print)
    ended = {given["label"]: given["daemons"] for given in hosts.of("end")}
    assert [len(daemons) for daemons in ended.values()] == [1, 1, 0] and made.record.parts == {}


def test_stop_ends_each_process_and_keeps_those_that_may_still_run(hosts: Hosts) -> None:
    made = deployment("a b c")
    started(made)
    hosts.answers["b", "end"] = ClusterError("b: no answer")
    with pytest.raises(ClusterError) as left:
        SshProvider().stop(made, print)
    text = (
        "b: no answer; the worker b (pid 101) may still run there; if it will not come back, forget the cluster: rm -r "
    )
    assert str(left.value) == f"{text}{made.folder}"
    assert list(made.record.parts) == ["worker b"] and {given["timeout_s"] for given in hosts.of("end")} == {10.0}
    daemons = [daemon for given in hosts.of("end") for daemon in given["daemons"]]
    assert sorted((daemon["name"], daemon["pid"]) for daemon in daemons) == [
        ("scheduler", 100),
        ("worker", 100),
        ("worker", 101),
        ("worker", 102),
    ]


def test_fault_is_the_first_process_that_has_ended_or_the_host_that_does_not_answer(hosts: Hosts) -> None:
    made = deployment()
    started(made)
    assert SshProvider().fault(made) is None
    hosts.answers["b", "alive"] = [False]
    assert SshProvider().fault(made) == "the worker b (pid 101) has ended"
    hosts.answers["a", "alive"] = ClusterError("a: no route")
    assert SshProvider().fault(made) == "a: no route"


def test_logs_are_those_of_each_process_and_an_error_takes_the_place_of_one(hosts: Hosts) -> None:
    made = deployment()
    started(made)
    hosts.answers["b", "tail"] = ClusterError("b: no route")
    assert SshProvider().logs(made, 7) == {
        "scheduler": "log of a\n",
        "worker a": "log of a\n",
        "worker b": "(b: no route)",
    }
    assert hosts.of("tail", "a") == [
        {"folder": "/a/scheduler", "name": "scheduler", "lines": 7},
        {"folder": "/a/worker", "name": "worker", "lines": 7},
    ]
    assert Part("worker", "b", 1, "label").description == "the worker b"
    ssh._keep(made, [Part("worker", "b", 1, "label")])
    assert SshProvider().logs(made, 7) == {"worker b": ""}, "it may have no folder yet"


class Client:
    """Stands for a connection to the scheduler of a cluster with workers by name: (slots in use)."""

    def __init__(self, **held: int) -> None:
        self.held = held
        self.calls: list[Any] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.calls.append("closed")

    def run_on_scheduler(self, function: Any) -> dict[str, Any]:
        return {"workers": [{"name": each, "address": f"tls://{each}", "held": n} for each, n in self.held.items()]}

    def run(self, function: Any, *arguments: Any, workers: list[str]) -> None:
        assert function is driver_calls.set_slots
        self.calls.append((*arguments, *workers))


@pytest.mark.parametrize(
    ("held", "slots", "calls", "told", "workers", "ended"),
    [
        ({"a": 0, "b": 0}, 6, [(3, "tls://a"), (3, "tls://b")], [], 2, []),
        ({"a": 0, "b": 0}, 3, [(3, "tls://a")], ["ended the worker on b"], 1, ["b"]),
        (
            {"a": 1, "b": 2},
            3,
            [(3, "tls://a")],
            ["the worker on b is kept, because a run uses it: scale again when the run has ended"],
            2,
            [],
        ),
        ({"a": 1}, 5, [(3, "tls://a")], ["worker on b"], 2, ["b"]),  # what is left of the old one is removed first
        ({"b": 0}, 2, [], ["worker on a", "ended the worker on b"], 1, ["a", "b"]),
    ],
)
def test_scaling_changes_running_workers_starts_missing_ones_and_ends_spare_ones(
    hosts: Hosts,
    monkeypatch: pytest.MonkeyPatch,
    held: dict[str, int],
    slots: int,
    calls: list[Any],
    told: list[str],
    workers: int,
    ended: list[str],
) -> None:
    made = deployment(ranks_per_host=3)
    started(made)
    client, said = Client(**held), list[str]()
    monkeypatch.setattr(ssh, "client_of", lambda cluster: client)
    hosts.calls.clear()
    SshProvider().scale(made, slots, said.append)
    assert client.calls == [*calls, "closed"] and sorted(said) == sorted(told)
    assert made.record.workers == workers
    assert sorted(name for name, command, _ in hosts.calls if command == "end") == ended
    running = {"worker a", "worker b"} - ({"worker b"} if "ended the worker on b" in told else set())
    assert made.record.parts.keys() == {"scheduler"} | running
    for order in hosts.of("start"):
        assert order["argv"][order["argv"].index("--slots") + 1] == str(slots - 3 if "worker on b" in told else slots)
