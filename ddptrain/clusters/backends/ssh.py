"""Clusters on hosts that are reached by ssh: the scheduler on the first host, a worker on each host."""

from __future__ import annotations

import json
import math
import re
import secrets
import shlex
import socket
import subprocess
import tempfile
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from ddptrain.clusters.processes import ADDRESS, FOLDER, PYTHON, is_loopback
from ddptrain.clusters.provider import Backend, Tell
from ddptrain.clusters.record import ClusterRecord, Part
from ddptrain.clusters.security import CERT_FILE, KEY_FILE
from ddptrain.config.sections.clusters import ClusterConfig, SshSettings
from ddptrain.config.wording import counted
from ddptrain.errors import ClusterError, UsageError
from ddptrain.version import __version__

_AT_ONCE = 9  # parallel ssh calls: the sshd of a jump host drops more than 10 simultaneous logins
_START_S = 30.0  # for a scheduler to listen
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
        config, hosts = cluster.config, _hosts(cluster)
        assert config.ssh is not None
        used = [pair for pair in zip(hosts, _distribution(config, len(hosts)), strict=True) if pair[1] != 0]
        cluster.workers = len(used)
        first = used[0][0]
        planned, *parts = [
            _planned(cluster, "scheduler", first),
            *(_planned(cluster, "worker", each) for each, _ in used),
        ]
        yield from (planned, *parts)
        tell(f"asking {counted(len(used), 'host')}")
        # A process starts only in a folder that was prepared. So `down`, which deletes the folders, also ends a start
        # whose command was killed and whose call is still on its way.
        answers = _of_parts(cluster, "prepare")
        if faults := {part.host: str(error) for part, error in answers if isinstance(error, ClusterError)}:
            # A host that can't be used must not become a part that can't be ended.
            cluster.parts = [part for part in cluster.parts if part.host not in faults]
            raise ClusterError("\n".join(faults.values()))
        listen = ["ddptrain.clusters.scheduler.scheduler_process", "--folder", FOLDER, "--host", ADDRESS]
        listen += ["--idle-timeout", str(config.idle_timeout_s)]
        address = _ip(config.ssh.scheduler_host or "")
        answer = _run(cluster, planned, first, listen, address=address, await_s=_START_S)
        cluster.address, at = str(answer["scheduler"]["address"]), answer["address"]
        yield planned.model_copy(update={"pid": answer["pid"]})
        tell(f"scheduler on {first.name}")

        gpus = "none" if config.gpus == 0 else "auto"
        work = ["ddptrain.worker", "--scheduler", cluster.address, "--host", ADDRESS, "--gpus", gpus]
        work += ["--scratch", f"{FOLDER}/scratch", "--tls-dir", FOLDER]
        failed: list[str] = []
        with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
            calls = {}
            for part, (host, slots) in zip(parts, used, strict=True):
                argv = [*work, "--slots", str(slots or 0), "--name", host.name]
                chosen = at if host is first else ""
                calls[pool.submit(_run, cluster, part, host, argv, address=chosen)] = part
            for call in as_completed(calls):
                part = calls[call]
                if isinstance(error := call.exception(), ClusterError):
                    failed.append(str(error))
                    continue
                answer = call.result()
                yield part.model_copy(update={"pid": answer["pid"]})
                if is_loopback(answer["address"]) != is_loopback(at):
                    failed.append(
                        f"{part.host}: ssh reaches it at {answer['address']}, and the scheduler is at {at}: a loopback "
                        "address works on its own host only; name the network address of the host, or set "
                        "cluster.ssh.scheduler_host"
                    )
                else:
                    tell(f"worker on {part.host}")
        if failed:
            raise ClusterError("\n".join(sorted(failed)))

    def fault(self, cluster: ClusterRecord) -> str | None:
        """Return the name of the process that has ended or whose host can't be reached, or None."""
        for part, running in _of_parts(cluster, "running"):
            if isinstance(running, ClusterError):
                return str(running)
            if part.pid is not None and part.pid not in running:
                return f"the {part.name} (pid {part.pid}) has ended"
        return None

    def logs(self, cluster: ClusterRecord, lines: int) -> Mapping[str, str]:
        """Return the log of each process; a worker logs only what goes wrong. For an unreachable host, the error."""
        found = _of_parts(cluster, "tail", lines=lines)
        return {part.name: f"({log})" if isinstance(log, ClusterError) else str(log) for part, log in found}

    def stop(self, cluster: ClusterRecord, tell: Tell) -> None:
        """End all processes and remove their folders. Raises ClusterError at the end if hosts could not be reached."""
        # The workers end with the scheduler; each is also ended on its own host.
        left = [(part, error) for part, error in _of_parts(cluster, "end") if isinstance(error, ClusterError)]
        cluster.parts = [part for part, _ in left]
        cluster.save()
        if left:
            words = [
                f"{error}; the {part.name} (pid {part.pid or 'unknown'}) may still run there" for part, error in left
            ]
            forget = f"if it will not come back, forget the cluster: rm -r {shlex.quote(str(cluster.folder))}"
            raise ClusterError("; ".join([*words, forget]))


def _planned(cluster: ClusterRecord, role: str, host: Host) -> Part:
    """Return a part that is not started yet; its id is the name of its folder on the host."""
    return Part(role=role, host=host.name, id=f"{cluster.name}-{secrets.token_hex(4)}", log=f"{role}.log")


def _run(
    cluster: ClusterRecord, part: Part, host: Host, module: Sequence[str], *, address: str, await_s: float = 0.0
) -> dict[str, Any]:
    """Start a process of the cluster; return what `processes` on the host answers. Raises ClusterError."""
    answer: dict[str, Any] = host.call(
        "run",
        folder=part.id,
        name=part.role,
        argv=[PYTHON, "-P", "-m", *module],
        files={file: (cluster.folder / file).read_text() for file in (CERT_FILE, KEY_FILE)},
        version=__version__,
        host=host.address,
        address=address,
        await_s=await_s,
    )
    return answer


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


def _ip(address: str) -> str:
    """Return the numeric address, by which Dask distinguishes hosts; unchanged if this machine can't resolve it."""
    try:
        return socket.gethostbyname(address) if address else ""
    except OSError:
        return address


def _of_parts(cluster: ClusterRecord, verb: str, **given: Any) -> list[tuple[Part, Any]]:
    """Return each part with the result of `processes control VERB` on its host, or its ClusterError; side by side."""
    hosts = {host.name: host for host in _hosts(cluster)}

    def call(part: Part) -> tuple[Part, Any]:
        try:
            return part, hosts[part.host].call("control", folder=part.id, name=part.role, verb=verb, **given)
        except ClusterError as error:
            return part, error

    with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
        return list(pool.map(call, cluster.parts))


# --- one host, and calls of `ddptrain.clusters.processes` there ---


@dataclass(frozen=True, slots=True)
class Host:
    """A host of the settings: `name` is unique in the cluster, `target` is the argument of ssh."""

    name: str
    target: str
    settings: SshSettings

    @property
    def address(self) -> str:
        """The name that ssh connects to: HostName of the user's configuration. Raises ClusterError."""
        answer = self._ssh(["ssh", *self.settings.options, "-G", self.target], "")
        found = re.search(r"^hostname (.+)$", answer.stdout, re.MULTILINE)
        return found[1].strip() if found else self.target.rpartition("@")[2]

    def call(self, command: str, **given: Any) -> Any:
        """Return the result of a command of `ddptrain.clusters.processes` on the host. Raises ClusterError."""
        python = self.settings.python  # quoted for the remote shell, which still expands a leading ~/
        quoted = f"~/{shlex.quote(python[2:])}" if python.startswith("~/") else shlex.quote(python)
        remote = f"{quoted} -P -m ddptrain.clusters.processes {command}"
        answer = self._ssh(["ssh", *self.settings.options, *_OPTIONS, self.target, remote], json.dumps(given))
        # A login script may have printed something before.
        lines = [line for line in answer.stdout.splitlines() if line.startswith("{")]
        if answer.returncode or not lines:
            raise ClusterError(f"{self.name}: {self._reason(answer)}")
        response: Mapping[str, Any] = json.loads(lines[-1])
        if "error" in response:
            raise ClusterError(f"{self.name}: {response['error']}")
        return response["result"]

    def _ssh(self, command: Sequence[str], text: str) -> subprocess.CompletedProcess[str]:
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
        last = answer.stderr.strip().rpartition("\n")[2].strip() or f"exit code {answer.returncode}"
        python, install = self.settings.python, f"{self.settings.python} -m pip install ddptrain=={__version__}"
        if answer.returncode == _SSH_FAILED:
            login = shlex.join(["ssh", *self.settings.options, self.target])
            return f"ssh can't connect: {last.rstrip('.')}; this must work without a question: {login}"
        if answer.returncode in _NOT_FOUND:
            return f"there is no {python} there ({last}): set cluster.ssh.python"
        if missing := re.search(r"No module named '?(\w+)", last):
            return f"{missing[1]} is missing there: {install}"
        return f"{python} can't run this version of ddptrain there ({last}): {install}, or set cluster.ssh.python"


def _hosts(cluster: ClusterRecord) -> list[Host]:
    settings = cluster.config.ssh
    assert settings is not None
    times = Counter(settings.hosts)
    return [
        Host(f"{target}#{number}" if times[target] > 1 else target, target, settings)
        for number, target in enumerate(settings.hosts, 1)
    ]
