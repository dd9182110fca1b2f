"""One host that ssh reaches, and calls of `ddptrain.clusters.processes` there."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddptrain import __version__
from ddptrain.errors import ClusterError

_CALL_S = 60.0
# The user's settings for logins (a terminal, a command, forwarded ports) must not apply to our calls.
_OPTIONS = (
    *("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5"),
    *("-T", "-o", "RemoteCommand=none", "-o", "ClearAllForwardings=yes"),  # the user has set these for logins
)
_SSH_FAILED = 255
_NOT_FOUND = (126, 127)


@dataclass(frozen=True, slots=True)
class Host:
    """A host of the settings: `name` is unique in the cluster, `target` is the argument of ssh, `number` the index."""

    name: str
    target: str
    number: int
    ssh: tuple[str, ...]
    python: str

    @property
    def address(self) -> str:
        """The name that ssh connects to: HostName of the user's configuration. Raises ClusterError."""
        answer = self._run([*self.ssh, "-G", self.target], "")
        for line in answer.stdout.splitlines():
            if line.startswith("hostname "):
                return line.split(maxsplit=1)[1].strip()
        return self.target.rpartition("@")[2]

    def call(self, command: str, **given: Any) -> Any:
        """Return the result of a command of `ddptrain.clusters.processes` on the host. Raises ClusterError."""
        remote = f"{_quoted(self.python)} -P -m ddptrain.clusters.processes {command}"
        answer = self._run([*self.ssh, *_OPTIONS, self.target, remote], json.dumps(given))
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
            raise ClusterError(
                f"there is no program {error.filename}: install an ssh client, or set cluster.ssh.command"
            ) from error
        except subprocess.TimeoutExpired as error:
            raise ClusterError(f"{self.name}: no answer over ssh within {_CALL_S:g} s") from error

    def _reason(self, answer: subprocess.CompletedProcess[str]) -> str:
        """Return the error in one line."""
        error_lines = [line.strip() for line in answer.stderr.splitlines() if line.strip()]
        last = error_lines[-1] if error_lines else f"exit code {answer.returncode}"
        if answer.returncode == _SSH_FAILED:
            login = shlex.join([*self.ssh, self.target])
            return f"ssh can't connect: {last.rstrip('.')}; this must work without a question: {login}"
        if answer.returncode in _NOT_FOUND:
            return f"there is no {self.python} there ({last}): set cluster.ssh.python"
        if missing := re.search(r"No module named '?(\w+)", last):
            return f"{missing[1]} is missing there: {self.python} -m pip install ddptrain=={__version__}"
        if "nknown option" in answer.stderr or "invalid choice" in last:
            return f"{self.python} is too old there: ddptrain needs Python 3.11 or newer; set cluster.ssh.python"
        if answer.returncode == 0 or "llegal option" in last or "SyntaxError" in last:  # of a shell; of Python 2
            return f"{self.python} is not Python 3.11 or newer there ({last}): set cluster.ssh.python"
        return last


def hosts_of(settings: Mapping[str, Any]) -> list[Host]:
    """Return the hosts of a cluster's settings, in order."""
    ssh = settings["ssh"]
    times = Counter(ssh["hosts"])
    hosts = []
    for number, target in enumerate(ssh["hosts"]):
        name = f"{target}#{number + 1}" if times[target] > 1 else target
        hosts.append(Host(name, target, number, (ssh["command"], *ssh["options"]), ssh["python"]))
    return hosts


def _quoted(python: str) -> str:
    """Quote a path for the remote shell, which still expands a leading ~/."""
    return f"~/{shlex.quote(python[2:])}" if python.startswith("~/") else shlex.quote(python)
