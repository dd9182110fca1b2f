"""Clusters on hosts that are reached by ssh: the scheduler on the first host, a worker on each host."""

from __future__ import annotations

import dataclasses
import math
import secrets
import shlex
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from ddptrain import __version__
from ddptrain.clusters.backends.ssh_host import Host, hosts_of
from ddptrain.clusters.cluster_records import Deployment
from ddptrain.clusters.processes import FOLDER, DaemonId, DaemonOrder
from ddptrain.clusters.provider import Tell
from ddptrain.clusters.security import CERT_FILE, KEY_FILE
from ddptrain.clusters.status import client_of
from ddptrain.config.sections.clusters import slots_to_order
from ddptrain.config.wording import counted
from ddptrain.errors import ClusterError, UsageError
from ddptrain.host_identity import is_loopback

if TYPE_CHECKING:
    from distributed import Client

_A = TypeVar("_A")
_B = TypeVar("_B")
_SCHEDULER, _WORKER = "scheduler", "worker"
_SCHEDULER_FILE = "scheduler.json"
_AT_ONCE = 9  # parallel ssh calls: the sshd of a jump host drops more than 10 simultaneous logins
_START_S = 30.0  # for a scheduler to listen
_END_S = 10.0  # from SIGTERM to SIGKILL


@dataclass(frozen=True, slots=True)
class Part:
    """A process on a host. It is saved before it is started: `daemon` is None until the host has answered.

    `role` is "scheduler" or "worker", `name` the name of the host in the cluster, `host` its number in the settings,
    `label` the name of the folder of the process on that host.
    """

    role: str
    name: str
    host: int
    label: str
    daemon: DaemonId | None = None

    @property
    def daemons(self) -> list[dict[str, Any]]:
        """The process as plain data; empty if it is not known."""
        return [dataclasses.asdict(self.daemon)] if self.daemon else []

    @property
    def source(self) -> str:
        """The name of its log."""
        return self.role if self.role == _SCHEDULER else f"{self.role} {self.name}"

    @property
    def description(self) -> str:
        """What it is, for messages."""
        return f"the {self.source}{f' (pid {self.daemon.pid})' if self.daemon else ''}"


class SshProvider:
    """Runs a worker on each host, started by the user's ssh command with its configured keys and options."""

    tls = True

    def scale(self, cluster: Deployment, slots: int | None, tell: Tell) -> None:
        """Start scheduler and workers, or change the slots of the hosts. Raises ClusterError, UsageError."""
        settings = cluster.record.settings
        hosts = hosts_of(settings)
        wanted = _distribution(settings, len(hosts), slots)
        if not _parts(cluster):
            _start(cluster, hosts, wanted, tell)
            return
        with client_of(cluster) as client:
            _resize(cluster, hosts, wanted, client, tell)

    def logs(self, cluster: Deployment, lines: int) -> Mapping[str, str]:
        """Return the log of each process; a worker logs only what goes wrong. For an unreachable host, the error."""
        hosts = hosts_of(cluster.record.settings)

        def read(part: Part) -> str:
            if part.daemon is None:
                return ""
            try:
                return str(hosts[part.host].call("tail", folder=part.daemon.folder, name=part.role, lines=lines))
            except ClusterError as error:
                return f"({error})"

        parts = _parts(cluster)
        return {part.source: text for part, text in zip(parts, _side_by_side(read, parts), strict=True)}

    def stop(self, cluster: Deployment, tell: Tell) -> None:
        """End all processes and remove their folders. Raises ClusterError at the end if hosts could not be reached."""
        hosts = hosts_of(cluster.record.settings)
        # The workers end with the scheduler; each is also ended on its own host.
        try:
            _end(cluster, [(part, hosts[part.host]) for part in _parts(cluster)])
        except ClusterError as error:
            forget = f"rm -r {shlex.quote(str(cluster.folder))}"
            raise ClusterError(f"{error}; if it will not come back, forget the cluster: {forget}") from error

    def fault(self, cluster: Deployment) -> str | None:
        """Return the name of the process that has ended or whose host can't be reached, or None."""
        hosts = hosts_of(cluster.record.settings)

        def ask(part: Part) -> str | None:
            try:
                runs = all(hosts[part.host].call("alive", daemons=part.daemons))
            except ClusterError as error:
                return str(error)
            return None if runs else f"{part.description} has ended"

        return next(filter(None, _side_by_side(ask, _parts(cluster))), None)


def _start(cluster: Deployment, hosts: Sequence[Host], wanted: Sequence[int | None], tell: Tell) -> None:
    used = [(host, count) for host, count in zip(hosts, wanted, strict=True) if count is None or count > 0]
    tell(f"asking {counted(len(used), 'host')}")
    addresses = _addresses(cluster, [host for host, _ in used])
    cluster.update(workers=len(used))
    _start_scheduler(cluster, used[0][0], addresses[0])
    tell(f"scheduler on {used[0][0].name}")
    _start_workers(cluster, [(host, at, count) for (host, count), at in zip(used, addresses, strict=True)], tell)


def _addresses(cluster: Deployment, hosts: Sequence[Host]) -> list[str]:
    """Return each host's address for its processes. Raises ClusterError with a line for each unusable host."""
    of_first = cluster.record.settings["ssh"]["scheduler_host"]

    def ask(host: Host) -> str:
        address = _address(host)
        return _ip(of_first) if of_first and host.number == 0 else address

    addresses = _all_or_faults(ask, hosts)
    scheduler = urlsplit(cluster.record.address).hostname or addresses[0]
    if apart := [
        f"{host.name}: ssh reaches it at {address}, and the scheduler is at {scheduler}: a loopback "
        "address works on its own host only; name the network address of the host, or set cluster.ssh.scheduler_host"
        for host, address in zip(hosts, addresses, strict=True)
        if is_loopback(address) != is_loopback(scheduler)
    ]:
        raise ClusterError("\n".join(apart))
    return addresses


def _address(host: Host) -> str:
    """Return the address at which ssh reached the host or, behind a tunnel, that of its name. Raises ClusterError."""
    about: Mapping[str, Any] = host.call("describe", names=[host.address])
    if about["version"] != __version__:
        raise ClusterError(
            f"{host.name}: ddptrain {about['version']} is installed there, this is {__version__}: install the same one"
        )
    found = [address for address in (about["reached_at"], about["addresses"][host.address]) if address]
    return str(next((address for address in found if not is_loopback(address)), (*found, host.address)[0]))


def _start_scheduler(cluster: Deployment, host: Host, address: str) -> None:
    arguments = ["-m", "ddptrain.clusters.scheduler.scheduler_process", "--folder", FOLDER, "--host", address]
    arguments += ["--idle-timeout", str(cluster.record.idle_timeout_s)]
    part = _ordered(cluster, _SCHEDULER, host)
    _keep(cluster, [part])
    daemon = _order(cluster, host, part, arguments)
    _keep(cluster, [dataclasses.replace(part, daemon=daemon)])
    try:
        scheduler = host.call("read", folder=daemon.folder, name=_SCHEDULER_FILE, timeout_s=_START_S)
    except ClusterError as error:
        raise ClusterError(f"{host.name}: the scheduler did not start at {address}: {error}") from error
    cluster.update(address=str(scheduler["address"]), dashboard=_link(host, address, str(scheduler["dashboard"])))


def _link(host: Host, address: str, dashboard: str) -> str:
    """Return the link to the dashboard. It has no password, so it listens on the host's loopback only."""
    if not dashboard or is_loopback(address):
        return dashboard
    at = urlsplit(dashboard).netloc
    return f"{dashboard} through ssh -N -L {at}:{at} {host.target}"


def _start_workers(cluster: Deployment, orders: Sequence[tuple[Host, str, int | None]], tell: Tell) -> None:
    def begin(order: tuple[Part, Host, list[str]]) -> None:
        part, host, arguments = order
        begun = dataclasses.replace(part, daemon=_order(cluster, host, part, arguments))
        with saving:
            _keep(cluster, [begun if other == part else other for other in _parts(cluster)])

    saving = threading.Lock()
    parts = [_ordered(cluster, _WORKER, host) for host, _, _ in orders]
    _keep(cluster, [*_parts(cluster), *parts])
    arguments = [_worker_arguments(cluster, *order) for order in orders]
    _all_or_faults(begin, list(zip(parts, (host for host, _, _ in orders), arguments, strict=True)))
    for part in parts:
        tell(f"worker on {part.name}")


def _worker_arguments(cluster: Deployment, host: Host, address: str, slots: int | None) -> list[str]:
    arguments = ["-m", "ddptrain.worker", "--scheduler", cluster.record.address, "--host", address]
    arguments += ["--slots", str(slots or 0), "--gpus", "none" if cluster.record.settings["gpus"] == 0 else "auto"]
    arguments += ["--scratch", f"{FOLDER}/scratch", "--name", host.name]
    return arguments if cluster.tls_dir is None else [*arguments, "--tls-dir", FOLDER]


def _ip(address: str) -> str:
    """Return the numeric address, by which Dask distinguishes hosts; unchanged if this machine can't resolve it."""
    try:
        return socket.gethostbyname(address)
    except OSError:
        return address


def _ordered(cluster: Deployment, role: str, host: Host) -> Part:
    return Part(role, host.name, host.number, f"{cluster.name}-{secrets.token_hex(4)}")


def _order(cluster: Deployment, host: Host, part: Part, arguments: list[str]) -> DaemonId:
    tls_dir = cluster.tls_dir
    files = {file: (tls_dir / file).read_text() for file in (CERT_FILE, KEY_FILE)} if tls_dir else {}
    env = dict(cluster.record.settings["ssh"]["env"])
    order = DaemonOrder(part.role, "", arguments, files, env, part.label)
    return DaemonId.of(host.call("start", **dataclasses.asdict(order)))


def _resize(
    cluster: Deployment, hosts: Sequence[Host], wanted: Sequence[int | None], client: Client, tell: Tell
) -> None:
    """Set the slots of each host: change a running worker, start a missing one, end a worker with 0 slots."""
    from ddptrain.clusters.scheduler import slots
    from ddptrain.worker import driver_calls

    workers = {worker["name"]: worker for worker in client.run_on_scheduler(slots.overview)["workers"]}
    missing, spare = [], []
    for host, count in zip(hosts, wanted, strict=True):
        worker = workers.get(host.name)
        if worker is None and (count is None or count > 0):
            missing.append((host, count))
        elif worker is not None and count:
            client.run(driver_calls.set_slots, count, workers=[worker["address"]])
        elif worker is not None and count == 0 and worker["held"]:
            tell(f"the worker on {host.name} is kept, because a run uses it: scale again when the run has ended")
        elif worker is not None and count == 0:
            spare.append(host)
    _end(cluster, _of_workers(cluster, spare))
    for host in spare:
        tell(f"ended the worker on {host.name}")
    cluster.update(workers=len(workers) + len(missing) - len(spare))
    if missing:
        absent = [host for host, _ in missing]
        addresses = _addresses(cluster, absent)
        _end(cluster, _of_workers(cluster, absent))  # remove the folders of workers that have ended by themselves
        _start_workers(cluster, [(host, at, count) for (host, count), at in zip(missing, addresses, strict=True)], tell)


def _of_workers(cluster: Deployment, hosts: Sequence[Host]) -> list[tuple[Part, Host]]:
    by_number = {host.number: host for host in hosts}
    workers = (part for part in _parts(cluster) if part.role == _WORKER)
    return [(part, by_number[part.host]) for part in workers if part.host in by_number]


def _end(cluster: Deployment, parts: Sequence[tuple[Part, Host]]) -> None:
    """End processes with their children, and remove them from the record. Raises ClusterError if some may still run."""

    def end(each: tuple[Part, Host]) -> str | None:
        part, host = each
        try:
            host.call("end", label=part.label, daemons=part.daemons, timeout_s=_END_S)
        except ClusterError as error:
            return f"{error}; {part.description} may still run there"
        return None

    faults = _side_by_side(end, parts)
    ended = [part for (part, _), fault in zip(parts, faults, strict=True) if fault is None]
    _keep(cluster, [part for part in _parts(cluster) if part not in ended])
    if left := [fault for fault in faults if fault is not None]:
        raise ClusterError("; ".join(left))


def _distribution(settings: Mapping[str, Any], hosts: int, slots: int | None) -> list[int | None]:
    """Return the number of slots of each host; None means as many as fit. Raises UsageError if they don't fit."""
    each = settings["ssh"]["ranks_per_host"]
    if settings["gpus"] not in ("auto", 0):
        raise UsageError(
            f"cluster.gpus is {settings['gpus']}: with backend ssh it is auto or 0; cluster.ssh.ranks_per_host says "
            "how many of a host's GPUs are used"
        )
    total = slots_to_order(settings["ranks"], slots)
    if total is None:
        return [None if each == "auto" else int(each)] * hosts
    room = math.ceil(total / hosts) if each == "auto" else int(each)
    if room * hosts < total:
        raise UsageError(
            f"{total} slots don't fit on {hosts} hosts with {room} each (cluster.ssh.ranks_per_host): name more hosts"
        )
    return [max(0, min(room, total - room * number)) for number in range(hosts)]


def _all_or_faults(call: Callable[[_A], _B], given: Sequence[_A]) -> list[_B]:
    """Return the results of all calls, in order. Raises ClusterError with a line for each failed call."""
    with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
        calls = [pool.submit(call, argument) for argument in given]
    if faults := [str(error) for each in calls if isinstance(error := each.exception(), ClusterError)]:
        raise ClusterError("\n".join(faults))
    return [each.result() for each in calls]


def _side_by_side(call: Callable[[_A], _B], given: Sequence[_A]) -> list[_B]:
    with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
        return list(pool.map(call, given))


def _parts(cluster: Deployment) -> list[Part]:
    return [
        Part(
            each["role"],
            each["name"],
            each["host"],
            each["label"],
            DaemonId.of(each["daemon"]) if each.get("daemon") else None,
        )
        for each in cluster.record.parts.values()
    ]


def _keep(cluster: Deployment, parts: Sequence[Part]) -> None:
    """Save the processes in the record; `cluster status` shows their "pid"."""
    pids = ({"pid": part.daemon.pid} if part.daemon else {} for part in parts)
    cluster.update(parts={part.source: dataclasses.asdict(part) | pid for part, pid in zip(parts, pids, strict=True)})
