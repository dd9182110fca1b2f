"""Hosts on one machine: each with namespaces of its own for network, files, processes and its name, joined by a switch.

Nothing of it shows outside: the switch has a network namespace of its own, and namespaces have no names. All of it goes
with the first process of each host, and that with the test's own process.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import psutil

from tests.conftest import PATIENCE_S

TOOLS = ("ip", "unshare", "nsenter")
_SUBNET = "10.83.0"
_START_S = 20.0
_NAMESPACES = ("--net", "--mount", "--uts", "--pid")
_UNSHARE = ("unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc")

# What a host does when it comes up. As Debian has it, its own name is an address that no other host can reach.
_BOOT = """
set -e
name="$1"; hosts="$2"; shift 2
hostname "$name"
ip link set lo up
printf '127.0.0.1 localhost\\n127.0.1.1 %s\\n' "$name" > "$hosts"
mount --bind "$hosts" /etc/hosts
while [ "$1" != -- ]; do mount -t tmpfs none "$1"; shift; done
shift
exec "$@"
"""
# Its first process: whoever has lost their parent is waited for, and the end of stdin ends it with all that run there.
_INIT = """
import signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("up", flush=True)
sys.stdin.read()
"""


@functools.cache
def why_not() -> str:
    """Why no hosts can be made here; empty where they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "namespaces need Linux, and root"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(missing)}: not installed (iproute2, util-linux)"
    try_it = "ip link add name v0 type veth peer name v1 && ip link add name b0 type bridge"
    tried = subprocess.run([*_UNSHARE, "sh", "-c", try_it], capture_output=True, text=True, timeout=60)
    return f"no namespaces with a bridge and veth: {tried.stderr.strip()}" if tried.returncode else ""


@dataclass(eq=False)
class Host:
    """A machine of its own, as far as processes in it can tell; `private` are folders that only they see."""

    name: str
    address: str
    folder: Path
    private: Sequence[Path] = ()
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def boot(self) -> None:
        """Make the namespaces, and the first process in them."""
        for folder in (self.folder, *self.private):
            folder.mkdir(parents=True, exist_ok=True)
        private = [str(path) for path in self.private]
        words = [self.name, str(self.folder / "hosts"), *private, "--", sys.executable, "-ISc", _INIT]
        self._outer = subprocess.Popen(
            [*_UNSHARE, "sh", "-c", _BOOT, "boot", *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._outer.stdout is not None
        assert self._outer.stdout.readline() == b"up\n", f"the host {self.name} did not come up"
        (self.init,) = psutil.Process(self._outer.pid).children()

    def enter(self, folder: Path = Path("/")) -> tuple[str, ...]:
        """What a command starts with that runs here, in a folder; its exit code is the command's."""
        return ("nsenter", "--target", str(self.init.pid), *_NAMESPACES, "env", "--chdir", str(folder))

    def start(self, *command: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a command here, in a session of its own; what it says goes to `log`."""
        with self.log.open("ab") as log:
            popen = subprocess.Popen(
                [*self.enter(), *command],
                env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.started.append(popen)
        return popen

    @property
    def log(self) -> Path:
        """What all commands that were started here have said."""
        return self.folder / "log"

    def run(self, *command: str) -> str:
        """What a command prints that runs here."""
        done = subprocess.run([*self.enter(), *command], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done
        return done.stdout

    def processes(self) -> dict[int, str]:
        """Every process here but the first, zombies too: its pid outside and its command line."""
        here = _namespace(self.init.pid)
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.pid != self.init.pid and _namespace(process.pid) == here:
                    found[process.pid] = " ".join(process.cmdline()) or process.name()
        return found

    def end(self, popen: subprocess.Popen[bytes], timeout_s: float = PATIENCE_S) -> int:
        """SIGTERM to a command that was started here; its exit code."""
        for child in psutil.Process(popen.pid).children():
            child.terminate()
        return popen.wait(timeout_s)

    def power_off(self) -> None:
        """End everything here at once, and the namespaces."""
        assert self._outer.stdin is not None and self._outer.stdout is not None
        self._outer.stdin.close()
        for popen in self.started:
            popen.kill()
            popen.wait(PATIENCE_S)
        self._outer.wait(PATIENCE_S)
        self._outer.stdout.close()


def _namespace(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/pid")


class Network:
    """Hosts with a cable each to one switch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hosts: dict[str, Host] = {}
        self._switch = Host("switch", "", folder / "switch")

    def __enter__(self) -> Self:
        self._switch.boot()
        self._ip("link", "add", "br0", "type", "bridge")
        self._ip("link", "set", "br0", "up")
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as hosts:  # all of them, whichever fails
            for host in (self._switch, *reversed(self.hosts.values())):
                hosts.callback(host.power_off)

    def add(self, name: str, *private: Path) -> Host:
        """A host that is up and connected; nobody else sees what it has in its `private` folders."""
        host = Host(name, f"{_SUBNET}.{len(self.hosts) + 1}", self.folder / name, private)
        host.boot()
        self.hosts[name] = host
        self._ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(host.init.pid))
        self._ip("link", "set", name, "master", "br0", "up")
        host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
        host.run("ip", "link", "set", "eth0", "up")
        return host

    def cut(self, host: Host) -> None:
        """Pull a host's cable."""
        self._ip("link", "set", host.name, "down")

    def join(self, host: Host) -> None:
        """Plug the cable in again that was cut."""
        self._ip("link", "set", host.name, "up")

    def _ip(self, *words: str) -> str:
        """Run `ip` at the switch, and only there: it knows other hosts by the process ids of this machine."""
        enter = ["nsenter", "--target", str(self._switch.init.pid), "--net"]
        done = subprocess.run([*enter, "ip", *words], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done
        return done.stdout
