"""Clusters on hosts that ssh reaches: the scheduler on the first of them, a worker on each."""

from __future__ import annotations

import dataclasses
import math
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ddptrain import __version__
from ddptrain.clusters.daemons import FOLDER, DaemonId, DaemonOrder
from ddptrain.clusters.protocol import Tell
from ddptrain.clusters.security import CERT_FILE, KEY_FILE
from ddptrain.clusters.sshhost import Host, hosts_of
from ddptrain.clusters.state import Deployment
from ddptrain.errors import ClusterError, UsageError

if TYPE_CHECKING:
    from distributed import Client

_A = TypeVar("_A")
_B = TypeVar("_B")
_SCHEDULER, _WORKER = "scheduler", "worker"
_SCHEDULER_FILE = "scheduler.json"
_START_S = 30.0  # for a scheduler to listen
_END_S = 10.0  # from SIGTERM to SIGKILL


@dataclass(frozen=True, slots=True)
class Part:
    """A process on a host: `name` is "scheduler", or the worker's name in the cluster."""

    name: str
    host: int  # its number in the settings
    daemon: DaemonId


class SshProvider:
    """A worker on each host, started by the user's own ssh, with the keys and options that its configuration has."""

    tls = True

    def scale(self, cluster: Deployment, slots: int | None, tell: Tell) -> None:
        """Start scheduler and workers, or change how many slots there are on which host.

        Raises: ClusterError with a line for each host that can't be used; UsageError.
        """
        settings = cluster.record.settings
        hosts = hosts_of(settings)
        wanted = _distribution(settings, len(hosts), slots)
        if not _parts(cluster):
            _start(cluster, hosts, wanted, tell)
            return
        with _connected(cluster) as client:
            _resize(cluster, hosts, wanted, client, tell)

    def logs(self, cluster: Deployment, lines: int) -> Mapping[str, str]:
        """What each process has written; nothing, as long as all is well. An unreachable host says so."""
        hosts = hosts_of(cluster.record.settings)

        def read(part: Part) -> str:
            try:
                return str(hosts[part.host].call("tail", folder=part.daemon.folder, name=part.daemon.name, lines=lines))
            except ClusterError as error:
                return f"({error})"

        parts = _parts(cluster)
        return {_source(part): text for part, text in zip(parts, _side_by_side(read, parts), strict=True)}

    def stop(self, cluster: Deployment, tell: Tell) -> None:
        """End all processes, and remove their folders. Raises ClusterError, at the end, for hosts not to be reached."""
        hosts = hosts_of(cluster.record.settings)
        # The scheduler takes its workers along; each is ended on its own host all the same.
        ended: list[str] = []
        faults: list[str] = []

        def end(part: Part) -> str | None:
            try:
                hosts[part.host].call("stop", daemons=[dataclasses.asdict(part.daemon)], timeout_s=_END_S, remove=True)
            except ClusterError as error:
                return f"{error} (the {_source(part)}, pid {part.daemon.pid}, may still run there)"
            return None

        parts = _parts(cluster)
        for part, fault in zip(parts, _side_by_side(end, parts), strict=True):
            if fault is None:
                ended.append(part.name)
            else:
                faults.append(fault)
        _keep(cluster, [part for part in parts if part.name not in ended])
        if faults:
            raise ClusterError("; ".join(faults))

    def fault(self, cluster: Deployment) -> str | None:
        """Which process has ended, or can't be asked."""
        hosts = hosts_of(cluster.record.settings)

        def ask(part: Part) -> str | None:
            try:
                (runs,) = hosts[part.host].call("alive", daemons=[dataclasses.asdict(part.daemon)])
            except ClusterError as error:
                return str(error)
            return None if runs else f"the {_source(part)} (pid {part.daemon.pid}) has ended"

        return next(filter(None, _side_by_side(ask, _parts(cluster))), None)


def _start(cluster: Deployment, hosts: Sequence[Host], wanted: Sequence[int | None], tell: Tell) -> None:
    used = [host for host, count in zip(hosts, wanted, strict=True) if count is None or count > 0]
    tell(f"asking {len(used)} hosts")
    addresses = dict(zip(used, _addresses(used), strict=True))
    cluster.update(workers=len(used))
    first = used[0]
    at = cluster.record.settings["ssh"]["scheduler_host"] or addresses[first]
    address = _start_scheduler(cluster, first, at)
    cluster.update(address=address)
    tell(f"scheduler on {first.name}")
    orders = [(host, addresses[host], count) for host, count in zip(hosts, wanted, strict=True) if host in addresses]
    _start_workers(cluster, orders, tell)


def _addresses(hosts: Sequence[Host]) -> list[str]:
    """Where each host's processes listen. Raises ClusterError with a line for each host that can't be used."""

    def ask(host: Host) -> str | ClusterError:
        try:
            return _address(host)
        except ClusterError as error:
            return error

    answers = _side_by_side(ask, hosts)
    if faults := [str(answer) for answer in answers if isinstance(answer, ClusterError)]:
        raise ClusterError("\n".join(faults))
    return [str(answer) for answer in answers]


def _address(host: Host) -> str:
    """The address that ssh connects to where it is the host's own, not one that is translated on the way."""
    about: Mapping[str, Any] = host.call("describe", names=[host.address])
    if about["version"] != __version__:
        raise ClusterError(
            f"{host.name}: ddptrain {about['version']} is installed there, this is {__version__}: install the same one"
        )
    return str(about["addresses"][host.address] or about["reached_at"] or host.address)


def _start_scheduler(cluster: Deployment, host: Host, address: str) -> str:
    idle_s = cluster.record.idle_timeout_s
    arguments = ["-m", "ddptrain.clusters.scheduler", "--folder", FOLDER, "--host", address]
    daemon = _order(cluster, host, _SCHEDULER, [*arguments, "--idle-timeout", str(idle_s)])
    _keep(cluster, [Part(_SCHEDULER, host.number, daemon)])
    try:
        told = host.call("read", folder=daemon.folder, name=_SCHEDULER_FILE, timeout_s=_START_S)
    except ClusterError as error:
        raise ClusterError(f"{host.name}: the scheduler did not start at {address}: {error}") from error
    return str(told["address"])


def _start_workers(cluster: Deployment, orders: Sequence[tuple[Host, str, int | None]], tell: Tell) -> None:
    def begin(order: tuple[Host, str, int | None]) -> Part | ClusterError:
        host, address, count = order
        try:
            return Part(host.name, host.number, _start_worker(cluster, host, address, count))
        except ClusterError as error:
            return error

    answers = _side_by_side(begin, orders)
    _keep(cluster, [*_parts(cluster), *(part for part in answers if isinstance(part, Part))])
    if faults := [str(answer) for answer in answers if isinstance(answer, ClusterError)]:
        raise ClusterError("\n".join(faults))
    for host, _, _ in orders:
        tell(f"worker on {host.name}")


def _start_worker(cluster: Deployment, host: Host, address: str, slots: int | None) -> DaemonId:
    arguments = ["-m", "ddptrain.worker", "--scheduler", cluster.record.address, "--host", _ip(address)]
    arguments += ["--slots", str(slots or 0), "--gpus", "none" if cluster.record.settings["gpus"] == 0 else "auto"]
    arguments += ["--scratch", f"{FOLDER}/scratch", "--name", host.name]
    if cluster.tls_dir is not None:
        arguments += ["--tls-dir", FOLDER]
    return _order(cluster, host, _WORKER, arguments)


def _ip(address: str) -> str:
    """The address as a number, by which Dask tells hosts apart; as it is where this machine can't resolve it."""
    try:
        return socket.gethostbyname(address)
    except OSError:
        return address


def _order(cluster: Deployment, host: Host, name: str, arguments: list[str]) -> DaemonId:
    tls_dir = cluster.tls_dir
    files = {file: (tls_dir / file).read_text() for file in (CERT_FILE, KEY_FILE)} if tls_dir else {}
    env = dict(cluster.record.settings["ssh"]["env"])
    order = DaemonOrder(name, "", arguments, files, env, label=cluster.name)
    return DaemonId(**host.call("start", **dataclasses.asdict(order)))


def _resize(
    cluster: Deployment, hosts: Sequence[Host], wanted: Sequence[int | None], client: Client, tell: Tell
) -> None:
    """Give each host its slots: change those of a worker that runs, start it where it is missing, end it at none."""
    from ddptrain.clusters import slots
    from ddptrain.worker import task

    workers = {worker["name"]: worker for worker in client.run_on_scheduler(slots.overview)["workers"]}
    missing, spare = [], []
    for host, count in zip(hosts, wanted, strict=True):
        worker = workers.get(host.name)
        if worker is None and (count is None or count > 0):
            missing.append((host, count))
        elif worker is not None and count:
            client.run(task.set_slots, count, workers=[worker["address"]])
        elif worker is not None and count == 0 and worker["held"]:
            tell(f"the worker on {host.name} stays, for a run is on it: scale again when that has ended")
        elif worker is not None and count == 0:
            spare.append(host)
    _end_workers(cluster, spare, tell)
    cluster.update(workers=len(workers) + len(missing) - len(spare))
    if missing:
        addresses = _addresses([host for host, _ in missing])
        _forget(cluster, [host for host, _ in missing])
        _start_workers(cluster, [(host, at, count) for (host, count), at in zip(missing, addresses, strict=True)], tell)


def _end_workers(cluster: Deployment, hosts: Sequence[Host], tell: Tell) -> None:
    for part in [part for part in _parts(cluster) if part.name in {host.name for host in hosts}]:
        host = next(host for host in hosts if host.name == part.name)
        host.call("stop", daemons=[dataclasses.asdict(part.daemon)], timeout_s=_END_S, remove=True)
        _keep(cluster, [other for other in _parts(cluster) if other != part])
        tell(f"ended the worker on {host.name}")


def _forget(cluster: Deployment, hosts: Sequence[Host]) -> None:
    """Clear away what is left of workers that have ended by themselves."""
    gone = [part for part in _parts(cluster) if part.name in {host.name for host in hosts}]
    by_number = {host.number: host for host in hosts}
    for part in gone:
        by_number[part.host].call("stop", daemons=[dataclasses.asdict(part.daemon)], timeout_s=_END_S, remove=True)
    _keep(cluster, [part for part in _parts(cluster) if part not in gone])


def _distribution(settings: Mapping[str, Any], hosts: int, slots: int | None) -> list[int | None]:
    """How many slots each host gets; None is what it has room for. Raises UsageError where they don't fit."""
    each = settings["ssh"]["ranks_per_host"]
    if settings["gpus"] not in ("auto", 0):
        raise UsageError(
            f"cluster.gpus is {settings['gpus']}: with backend ssh it is auto or 0; cluster.ssh.ranks_per_host says "
            "how many of a host's GPUs are used"
        )
    total = slots or (None if settings["ranks"] == "auto" else int(settings["ranks"]))
    if total is None:
        return [None if each == "auto" else int(each)] * hosts
    room = math.ceil(total / hosts) if each == "auto" else int(each)
    if room * hosts < total:
        raise UsageError(
            f"{total} slots don't fit on {hosts} hosts with {room} each (cluster.ssh.ranks_per_host): name more hosts"
        )
    return [max(0, min(room, total - room * number)) for number in range(hosts)]


def _connected(cluster: Deployment) -> Client:
    from distributed import Client

    from ddptrain.clusters.find import of_deployment
    from ddptrain.clusters.scheduler import LOOKER

    target = of_deployment(cluster)
    return Client(target.address, security=target.security, timeout=10, name=LOOKER, set_as_default=False)


def _side_by_side(call: Callable[[_A], _B], arguments: Iterable[_A]) -> list[_B]:
    given = list(arguments)
    with ThreadPoolExecutor(max_workers=max(1, min(32, len(given)))) as pool:
        return list(pool.map(call, given))


def _source(part: Part) -> str:
    return part.name if part.name == _SCHEDULER else f"worker {part.name}"


def _parts(cluster: Deployment) -> list[Part]:
    stored = cluster.record.parts.get("processes", [])
    return [Part(each["name"], each["host"], DaemonId(**each["daemon"])) for each in stored]


def _keep(cluster: Deployment, parts: Sequence[Part]) -> None:
    cluster.update(parts={"processes": [dataclasses.asdict(part) for part in parts]})
