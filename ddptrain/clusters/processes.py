"""Processes of this host that outlive the command that starts them; also for other hosts, over ssh.

    python -m ddptrain.clusters.processes start|end|alive|tail|read|describe < JSON

reads the arguments of the function of that name as a JSON object, and prints {"result": ...} or {"error": "..."}. It
imports little, because it is called on every host of a cluster.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddptrain import __version__
from ddptrain.clusters.hosts import UNKNOWN_HOST, Relation, process_start, relation, where_to_run
from ddptrain.clusters.security import write_private
from ddptrain.errors import ClusterError
from ddptrain.file_ops import open_append
from ddptrain.host_identity import HostId, this_host

FOLDER, PYTHON = "{folder}", "{python}"
_POLL_S = 0.02
_KILLED_S = 20.0  # the kernel may need that long after SIGKILL on a very busy host
_TAIL_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class DaemonOrder:
    """A process to start in `folder`; it writes into <name>.log.

    A `folder` without a slash is the name of one in the user's state directory. FOLDER in `argv` is replaced by its
    path, PYTHON by this interpreter. `files` (name -> text) are written into the folder first. Only this user can read
    them.
    """

    name: str
    folder: str
    argv: Sequence[str]
    files: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class DaemonId:
    """A started process, and the host and boot in which its pid is valid.

    `created` is its start time, which distinguishes it from later processes with this pid (0: it ended at once).
    """

    name: str
    pid: int
    created: float
    folder: str
    host: HostId = UNKNOWN_HOST

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> DaemonId:
        """Return the process of a message."""
        return cls(**{**data, "host": HostId(**data["host"])})


def start(order: DaemonOrder) -> DaemonId:
    """Start a process in a session of its own. Raises ClusterError where the folder or the program can't be used.

    `end` finds it even if the caller was killed before it knew the id: its working directory is the folder, which its
    `argv` names, too.
    """
    folder = _located(order.folder)
    values = {FOLDER: str(folder), PYTHON: sys.executable}
    command = [functools.reduce(lambda text, each: text.replace(*each), values.items(), word) for word in order.argv]
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)
        for name, text in order.files.items():
            write_private(folder / name, text.encode())
        log = open_append(folder / f"{order.name}.log", create_mode=0o600)
        try:
            process = subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        finally:
            os.close(log)
    except OSError as error:
        raise ClusterError(f"the {order.name} could not be started in {folder}: {error}") from error
    process.returncode = 0  # this object must not wait for the process
    return DaemonId(order.name, process.pid, process_start(process.pid), str(folder), this_host())


def alive(daemon: DaemonId) -> bool:
    """Return whether this process runs; not after a restart of its host. Raises ClusterError on any other host."""
    import psutil

    here = this_host()
    where = relation(daemon.host, here)
    if where == Relation.OTHER:
        raise ClusterError(f"the {daemon.name} (pid {daemon.pid}) runs on {where_to_run(daemon.host, here)}")
    if where == Relation.RESTARTED:
        return False
    with suppress(ChildProcessError):  # reap a child of this process that has ended
        os.waitpid(daemon.pid, os.WNOHANG)
    try:
        is_zombie = psutil.Process(daemon.pid).status() == psutil.STATUS_ZOMBIE
        return not is_zombie and 0 < daemon.created == process_start(daemon.pid)
    except psutil.NoSuchProcess:
        return False


def stop(daemons: Iterable[DaemonId], timeout_s: float = 10.0) -> None:
    """End processes: SIGTERM, and after `timeout_s` SIGKILL to what is left of their groups.

    Processes that have ended already are ignored. Raises ClusterError with the names of those that can't be ended. If
    one belongs to another host, none is ended.
    """
    ending = [daemon for daemon in daemons if alive(daemon)]
    for daemon in ending:
        with suppress(ProcessLookupError):
            os.kill(daemon.pid, signal.SIGTERM)
    ending = _wait(ending, timeout_s)
    for daemon in ending:
        with suppress(ProcessLookupError):
            os.killpg(daemon.pid, signal.SIGKILL)
    if left := _wait(ending, _KILLED_S):
        names = ", ".join(f"{daemon.name} (pid {daemon.pid})" for daemon in left)
        raise ClusterError(f"could not be ended, even by SIGKILL: {names}")


def end(folder: str, known: Iterable[DaemonId], timeout_s: float = 10.0) -> None:
    """Stop the processes that were started in that folder on this host, `known` or not. Raises ClusterError."""
    import psutil

    named, here = str(_located(folder)), this_host()
    where = os.path.realpath(named)
    ending = {daemon.pid: daemon for daemon in known}
    leaders = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            is_there = process.cwd() == where and os.getsid(process.pid) == process.pid
            if is_there and named in " ".join(process.cmdline()):  # not a shell of the user that is in the folder
                leaders[process.pid] = process.ppid()
    for pid, parent in leaders.items():
        if pid not in ending and parent not in leaders:  # children end with their parent
            ending[pid] = DaemonId("process", pid, process_start(pid), where, here)
    stop(ending.values(), timeout_s)


def tail(folder: str, name: str, lines: int) -> str:
    """Return the last lines of the log of a process, "" if there is none."""
    try:
        with (_located(folder) / f"{name}.log").open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
    return "".join(text.splitlines(keepends=True)[-lines:])


def read(folder: str, name: str, timeout_s: float) -> Any:
    """Wait for a JSON file of a process and return its content. Raises ClusterError with the log after `timeout_s`."""
    path, deadline = _located(folder) / name, time.monotonic() + timeout_s
    while True:
        with suppress(FileNotFoundError):
            return json.loads(path.read_text(encoding="utf-8"))
        if time.monotonic() > deadline:
            logs = "; ".join(log.read_text(errors="replace").strip()[-500:] for log in path.parent.glob("*.log"))
            raise ClusterError(f"{name} did not appear within {timeout_s:g} s{': ' if logs else ''}{logs}")
        time.sleep(_POLL_S)


def describe(names: Sequence[str]) -> dict[str, Any]:
    """Describe this host: {"version", "addresses": {name: its address here, or ""}, "reached_at": the ssh address}."""
    connection = os.environ.get("SSH_CONNECTION", "").split()
    return {
        "version": __version__,
        "addresses": {name: _own_address(name) for name in names},
        "reached_at": connection[2] if len(connection) == 4 else "",
    }


def _own_address(name: str) -> str:
    """Return the address that the name resolves to, or "" if it does not belong to this host."""
    import socket

    with suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as bound:
            bound.bind(address)
            return str(address[0])
    return ""


def _wait(daemons: list[DaemonId], timeout_s: float) -> list[DaemonId]:
    """Wait for the end of processes; returns those that still run after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    left = [daemon for daemon in daemons if alive(daemon)]
    while left and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        left = [daemon for daemon in left if alive(daemon)]
    return left


def _located(folder: str) -> Path:
    from platformdirs import user_state_path

    return Path(folder) if os.sep in folder else user_state_path("ddptrain", appauthor=False) / "hosts" / folder


def _end_and_remove(folder: str, known: Iterable[DaemonId], timeout_s: float) -> None:
    try:
        end(folder, known, timeout_s)
    finally:
        shutil.rmtree(_located(folder), ignore_errors=True)


def _called(command: str, given: Mapping[str, Any]) -> Any:
    """Call the function of that name; returns its result as plain data."""
    calls: dict[str, Callable[[], Any]] = {
        "start": lambda: dataclasses.asdict(start(DaemonOrder(**given))),
        "end": lambda: _end_and_remove(given["folder"], map(DaemonId.of, given["daemons"]), given["timeout_s"]),
        "alive": lambda: [alive(DaemonId.of(each)) for each in given["daemons"]],
        "read": lambda: read(given["folder"], given["name"], given["timeout_s"]),
        "describe": lambda: describe(given["names"]),
        "tail": lambda: tail(given["folder"], given["name"], given["lines"]),
    }
    return calls[command]()


def main() -> int:
    """Serve one call: the function name is the argument, its arguments are JSON on stdin."""
    try:
        answer = {"result": _called(sys.argv[1], json.load(sys.stdin))}
    except ClusterError as error:
        answer = {"error": str(error)}
    print(f"\n{json.dumps(answer)}")  # a login script may have printed text that does not end its line
    return 0


if __name__ == "__main__":
    sys.exit(main())
