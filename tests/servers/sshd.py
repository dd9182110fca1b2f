"""Real OpenSSH servers with keys of their own: one for two hosts on loopback, or one on each host of a network."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import PATIENCE_S
from tests.servers.netns import Host
from tests.servers.ports import free_ports
from tests.support.leaks import MARK

HOSTS = {"alpha": "127.0.0.1", "beta": "127.0.0.2"}


@dataclass(frozen=True, slots=True)
class SshHosts:
    """Hosts that ssh reaches by their names with `-F config`; `state` is where they keep their state."""

    names: Sequence[str]
    config: Path
    state: Path

    @property
    def settings(self) -> list[str]:
        """For `ddptrain cluster up`: the hosts, and how to reach them."""
        python = Path(sys.executable)
        hosts = [word for name in self.names for word in ("--host", name)]
        return ["--backend", "ssh", *hosts, *self.options, "--set", f"cluster.ssh.python={python}"]

    @property
    def options(self) -> list[str]:
        """How to reach hosts."""
        return ["--set", f"cluster.ssh.options=[-F, {self.config}]"]


@contextmanager
def ssh_hosts(folder: Path) -> Iterator[SshHosts]:
    """Two hosts on loopback, for as long as the block lasts; skips the test where there is no OpenSSH server."""
    server, (port,), log = _server(), free_ports(1), folder / "sshd.log"
    hosts = _prepare(folder, HOSTS, port, [f"{address}:{port}" for address in HOSTS.values()])
    with log.open("wb") as said:
        process = subprocess.Popen(
            [server, "-D", "-e", "-f", folder / "sshd_config"], stdin=subprocess.DEVNULL, stdout=said, stderr=said
        )
    try:
        _wait_for(port, process, log)
        yield hosts
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def ssh_network(folder: Path, machines: Sequence[Host], state: Path) -> SshHosts:
    """A server on each of these machines, which end with them; skips the test where there is no OpenSSH server."""
    server = _server()
    hosts = _prepare(folder, {machine.name: machine.name for machine in machines}, 22, ["0.0.0.0:22"], state)
    for machine in machines:
        machine.start(server, "-D", "-e", "-f", str(folder / "sshd_config"))
        deadline = time.monotonic() + PATIENCE_S
        while ":22" not in machine.run("ss", "-Hltn"):
            assert time.monotonic() < deadline, machine.log.read_text(errors="replace")
            time.sleep(0.05)
    return hosts


def _server() -> str:
    server = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if server is None or shutil.which("ssh") is None:
        pytest.skip("no OpenSSH server here: sshd or ssh is not installed")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where it separates its privileges
    return server


def _prepare(
    folder: Path, addresses: Mapping[str, str], port: int, listen: Sequence[str], state: Path | None = None
) -> SshHosts:
    """Make the keys, and the configuration of servers and client."""
    folder.mkdir(mode=0o700)
    for key in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True, timeout=60)
    shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
    hosts = SshHosts(tuple(addresses), folder / "ssh_config", state or folder / "state")
    (folder / "sshd_config").write_text(_server_config(folder, listen, hosts.state))
    hosts.config.write_text(_client_config(folder, addresses, port))
    host_key = (folder / "host_key.pub").read_text().split()[:2]
    (folder / "known_hosts").write_text(f"ours {' '.join(host_key)}\n")
    return hosts


def _server_config(folder: Path, listen: Sequence[str], state: Path) -> str:
    lines = [f"ListenAddress {address}" for address in listen]
    lines += [f"HostKey {folder}/host_key", f"AuthorizedKeysFile {folder}/authorized_keys", "PidFile none"]
    lines += ["PasswordAuthentication no", "KbdInteractiveAuthentication no", "StrictModes no", "UsePAM no"]
    # What a login there finds: a state folder of the test's own, and the mark by which a test knows its processes.
    own = [
        f"XDG_STATE_HOME={state}",
        f"{MARK}={os.environ[MARK]}",
        "CUDA_VISIBLE_DEVICES=",
    ]
    lines += ["SetEnv " + " ".join(own)]
    return "\n".join(lines) + "\n"


def _client_config(folder: Path, addresses: Mapping[str, str], port: int) -> str:
    hosts = [f"Host {name}\n  HostName {address}\n" for name, address in addresses.items()]
    common = f"Host *\n  Port {port}\n  IdentityFile {folder}/user_key\n  IdentitiesOnly yes\n  HostKeyAlias ours\n"
    return "".join(hosts) + common + f"  UserKnownHostsFile {folder}/known_hosts\n  StrictHostKeyChecking yes\n"


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            socket.create_connection((HOSTS["beta"], port), timeout=1).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.skip(f"the OpenSSH server does not run here: {log.read_text(errors='replace').strip()}")
            time.sleep(0.05)
