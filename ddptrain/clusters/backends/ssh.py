"""Clusters on hosts that are reached by ssh: the scheduler on the first host, a worker on each host."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import secrets
import shlex
import socket
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, TypeVar

from ddptrain import __version__
from ddptrain.clusters.hosts import is_loopback
from ddptrain.clusters.processes import FOLDER, PYTHON, DaemonId, DaemonOrder
from ddptrain.clusters.provider import Backend, Tell
from ddptrain.clusters.record import ClusterRecord, Part
from ddptrain.clusters.security import CERT_FILE, KEY_FILE
from ddptrain.config.sections.clusters import ClusterConfig, SshSettings
from ddptrain.config.wording import counted
from ddptrain.errors import ClusterError, UsageError

_A = TypeVar("_A")
_B = TypeVar("_B")
_AT_ONCE = 9  # parallel ssh calls: the sshd of a jump host drops more than 10 simultaneous logins
_START_S = 30.0  # for a scheduler to listen
_END_S = 10.0  # from SIGTERM to SIGKILL
_CALL_S = 60.0
# The user's settings for logins (a terminal, a command, forwarded ports) must not apply to our calls.
_OPTIONS = (
    *("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5"),
    *("-T", "-o", "RemoteCommand=none", "-o", "ClearAllForwardings=yes"),
)
_SSH_FAILED = 255
_NOT_FOUND = (126, 127)


class SshBackend(Backend):
    """Runs a worker on each host, started by the user's ssh command with its configured keys and options."""

    tls = True
    own_workers = True

    def start(self, cluster: ClusterRecord, tell: Tell) -> Generator[Part]:
        """Start the scheduler and the workers. Raises ClusterError, UsageError."""
        hosts = _hosts(cluster)
        used = [(host, count) for host, count in zip(hosts, _distribution(cluster.config, len(hosts)), strict=True)]
        used = [(host, count) for host, count in used if count != 0]
        tell(f"asking {counted(len(used), 'host')}")
        addresses = _addresses(_settings(cluster), [host for host, _ in used])
        cluster.workers = len(used)
        yield from _start_scheduler(cluster, used[0][0], addresses[0])
        tell(f"scheduler on {used[0][0].name}")
        yield from _start_workers(
            cluster, [(host, at, count) for (host, count), at in zip(used, addresses, strict=True)], tell
        )

    def fault(self, cluster: ClusterRecord) -> str | None:
        """Return the name of the process that has ended or whose host can't be reached, or None."""

        def ask(part: Part, host: Host) -> str | None:
            try:
                return None if all(host.call("alive", daemons=_daemons(part))) else f"{part.description} has ended"
            except ClusterError as error:
                return str(error)

        return next(filter(None, _of_parts(cluster, ask)), None)

    def logs(self, cluster: ClusterRecord, lines: int) -> Mapping[str, str]:
        """Return the log of each process; a worker logs only what goes wrong. For an unreachable host, the error."""

        def read(part: Part, host: Host) -> str:
            try:
                return str(host.call("tail", folder=part.id, name=part.role, lines=lines))
            except ClusterError as error:
                return f"({error})"

        return dict(zip((part.name for part in cluster.parts), _of_parts(cluster, read), strict=True))

    def stop(self, cluster: ClusterRecord, tell: Tell) -> None:
        """End all processes and remove their folders. Raises ClusterError at the end if hosts could not be reached."""

        def end(part: Part, host: Host) -> str | None:
            try:
                host.call("end", folder=part.id, daemons=_daemons(part), timeout_s=_END_S)
            except ClusterError as error:
                return f"{error}; {part.description} may still run there"
            return None

        # The workers end with the scheduler; each is also ended on its own host.
        faults = _of_parts(cluster, end)
        cluster.parts = [part for part, fault in zip(cluster.parts, faults, strict=True) if fault is not None]
        cluster.save()
        if left := [fault for fault in faults if fault is not None]:
            forget = f"if it will not come back, forget the cluster: rm -r {shlex.quote(str(cluster.folder))}"
            raise ClusterError(f"{'; '.join(left)}; {forget}")


def _addresses(settings: SshSettings, hosts: Sequence[Host]) -> list[str]:
    """Return each host's address for its processes. Raises ClusterError with a line for each unusable host."""
    of_first = settings.scheduler_host

    def ask(host: Host) -> str:
        address = _address(host)
        return _ip(of_first) if of_first and host.number == 0 else address

    addresses = _all_or_faults(ask, hosts)
    if apart := [
        f"{host.name}: ssh reaches it at {address}, and the scheduler is at {addresses[0]}: a loopback "
        "address works on its own host only; name the network address of the host, or set cluster.ssh.scheduler_host"
        for host, address in zip(hosts, addresses, strict=True)
        if is_loopback(address) != is_loopback(addresses[0])
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


def _start_scheduler(cluster: ClusterRecord, host: Host, address: str) -> Iterator[Part]:
    arguments = ["-m", "ddptrain.clusters.scheduler.scheduler_process", "--folder", FOLDER, "--host", address]
    part = _planned(cluster, "scheduler", host)
    yield part
    yield _started(cluster, part, host, [*arguments, "--idle-timeout", str(cluster.config.idle_timeout_s)])
    try:
        scheduler = host.call("read", folder=part.id, name="scheduler.json", timeout_s=_START_S)
    except ClusterError as error:
        raise ClusterError(f"{host.name}: the scheduler did not start at {address}: {error}") from error
    cluster.address = str(scheduler["address"])


def _start_workers(cluster: ClusterRecord, orders: list[tuple[Host, str, int | None]], tell: Tell) -> Iterator[Part]:
    parts = [_planned(cluster, "worker", host) for host, _, _ in orders]
    yield from parts
    faults = []
    with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
        calls = [
            pool.submit(_started, cluster, part, host, _worker_arguments(cluster, host, address, slots))
            for part, (host, address, slots) in zip(parts, orders, strict=True)
        ]
        for call in as_completed(calls):
            if isinstance(error := call.exception(), ClusterError):
                faults.append(str(error))
                continue
            yield call.result()
            tell(f"worker on {call.result().host}")
    if faults:
        raise ClusterError("\n".join(faults))


def _worker_arguments(cluster: ClusterRecord, host: Host, address: str, slots: int | None) -> list[str]:
    arguments = ["-m", "ddptrain.worker", "--scheduler", cluster.address, "--host", address]
    arguments += ["--slots", str(slots or 0), "--gpus", "none" if cluster.config.gpus == 0 else "auto"]
    arguments += ["--scratch", f"{FOLDER}/scratch", "--name", host.name]
    return [*arguments, "--tls-dir", FOLDER]


def _planned(cluster: ClusterRecord, role: str, host: Host) -> Part:
    """Return a part that is not started yet; its id is the name of its folder on the host."""
    folder = f"{cluster.name}-{secrets.token_hex(4)}"
    return Part(role=role, host=host.name, id=folder, log=f"{role}.log")


def _started(cluster: ClusterRecord, part: Part, host: Host, arguments: list[str]) -> Part:
    files = {file: (cluster.folder / file).read_text() for file in (CERT_FILE, KEY_FILE)}
    order = DaemonOrder(part.role, part.id, [PYTHON, "-P", *arguments], files)
    daemon = DaemonId.of(host.call("start", **dataclasses.asdict(order)))
    return part.model_copy(update={"process": daemon})


def _distribution(config: ClusterConfig, hosts: int) -> list[int | None]:
    """Return the number of slots of each host; None means as many as fit. Raises UsageError if they don't fit."""
    assert config.ssh is not None
    each = config.ssh.ranks_per_host
    if config.gpus not in ("auto", 0):
        raise UsageError(
            f"cluster.gpus is {config.gpus}: with backend ssh it is auto or 0; cluster.ssh.ranks_per_host says "
            "how many of a host's GPUs are used"
        )
    total = config.slots
    if total is None:
        return [None if each == "auto" else each] * hosts
    room = math.ceil(total / hosts) if each == "auto" else each
    if room * hosts < total:
        raise UsageError(
            f"{total} slots don't fit on {hosts} hosts with {room} each (cluster.ssh.ranks_per_host): name more hosts"
        )
    return [max(0, min(room, total - room * number)) for number in range(hosts)]


def _settings(cluster: ClusterRecord) -> SshSettings:
    assert cluster.config.ssh is not None
    return cluster.config.ssh


def _daemons(part: Part) -> list[dict[str, Any]]:
    return [dataclasses.asdict(part.process)] if part.process else []


def _ip(address: str) -> str:
    """Return the numeric address, by which Dask distinguishes hosts; unchanged if this machine can't resolve it."""
    try:
        return socket.gethostbyname(address)
    except OSError:
        return address


def _of_parts(cluster: ClusterRecord, call: Callable[[Part, Host], _B]) -> list[_B]:
    """Return the results of calls on the hosts of all parts, side by side, in the order of the parts."""
    hosts = {host.name: host for host in _hosts(cluster)}
    with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
        return list(pool.map(lambda part: call(part, hosts[part.host]), cluster.parts))


def _all_or_faults(call: Callable[[_A], _B], given: Iterable[_A]) -> list[_B]:
    """Return the results of all calls, in order. Raises ClusterError with a line for each failed call."""
    with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
        calls = [pool.submit(call, argument) for argument in given]
    if faults := [str(error) for each in calls if isinstance(error := each.exception(), ClusterError)]:
        raise ClusterError("\n".join(faults))
    return [each.result() for each in calls]


# --- one host, and calls of `ddptrain.clusters.processes` there ---


@dataclass(frozen=True, slots=True)
class Host:
    """A host of the settings: `name` is unique in the cluster, `target` is the argument of ssh, `number` the index."""

    name: str
    target: str
    number: int
    settings: SshSettings

    @property
    def address(self) -> str:
        """The name that ssh connects to: HostName of the user's configuration. Raises ClusterError."""
        answer = self._run(["ssh", *self.settings.options, "-G", self.target], "")
        for line in answer.stdout.splitlines():
            if line.startswith("hostname "):
                return line.split(maxsplit=1)[1].strip()
        return self.target.rpartition("@")[2]

    def call(self, command: str, **given: Any) -> Any:
        """Return the result of a command of `ddptrain.clusters.processes` on the host. Raises ClusterError."""
        python = self.settings.python  # quoted for the remote shell, which still expands a leading ~/
        quoted = f"~/{shlex.quote(python[2:])}" if python.startswith("~/") else shlex.quote(python)
        remote = f"{quoted} -P -m ddptrain.clusters.processes {command}"
        answer = self._run(["ssh", *self.settings.options, *_OPTIONS, self.target, remote], json.dumps(given))
        # A login script may have printed something before.
        lines = [line for line in answer.stdout.splitlines() if line.startswith("{")]
        if answer.returncode or not lines:
            raise ClusterError(f"{self.name}: {self._reason(answer)}")
        response: Mapping[str, Any] = json.loads(lines[-1])
        if "error" in response:
            raise ClusterError(f"{self.name}: {response['error']}")
        return response["result"]

    def _run(self, command: Sequence[str], text: str) -> subprocess.CompletedProcess[str]:
        try:
            # stderr is a file, not a pipe: a master process of ssh (ControlPersist) may keep it open for ever.
            with tempfile.TemporaryFile() as stderr:
                answer = subprocess.run(
                    command,
                    input=text,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    encoding="utf-8",
                    errors="replace",
                    timeout=_CALL_S,
                    check=False,
                    start_new_session=True,  # Ctrl-C must not end ssh: its answer says what has been started
                )
                stderr.seek(0)
                answer.stderr = stderr.read().decode("utf-8", "replace")
                return answer
        except FileNotFoundError as error:
            raise ClusterError(f"there is no program {error.filename}: install an ssh client") from error
        except subprocess.TimeoutExpired as error:
            raise ClusterError(f"{self.name}: no answer over ssh within {_CALL_S:g} s") from error

    def _reason(self, answer: subprocess.CompletedProcess[str]) -> str:
        """Return the error in one line."""
        error_lines = [line.strip() for line in answer.stderr.splitlines() if line.strip()]
        last = error_lines[-1] if error_lines else f"exit code {answer.returncode}"
        python = self.settings.python
        if answer.returncode == _SSH_FAILED:
            login = shlex.join(["ssh", *self.settings.options, self.target])
            return f"ssh can't connect: {last.rstrip('.')}; this must work without a question: {login}"
        if answer.returncode in _NOT_FOUND:
            return f"there is no {python} there ({last}): set cluster.ssh.python"
        if missing := re.search(r"No module named '?(\w+)", last):
            return f"{missing[1]} is missing there: {python} -m pip install ddptrain=={__version__}"
        if "nknown option" in answer.stderr or "invalid choice" in last:
            return f"{python} is too old there: ddptrain needs Python 3.11 or newer; set cluster.ssh.python"
        if answer.returncode == 0 or "llegal option" in last or "SyntaxError" in last:  # of a shell; of Python 2
            return f"{python} is not Python 3.11 or newer there ({last}): set cluster.ssh.python"
        return last


def _hosts(cluster: ClusterRecord) -> list[Host]:
    settings = _settings(cluster)
    times = Counter(settings.hosts)
    return [
        Host(f"{target}#{number + 1}" if times[target] > 1 else target, target, number, settings)
        for number, target in enumerate(settings.hosts)
    ]
