"""Processes that outlive the command that starts them; those of other hosts over ssh.

    python -m ddptrain.clusters.processes run|control < JSON

calls that function with the JSON object as arguments, and prints {"result": ...} or {"error": "..."}. It imports
little, because it is called on every host of a cluster.

The processes of a cluster on a host have a folder in common: their working directory, with their files, their logs and
host.json. So they are found again, even if the command that started them was killed before it knew their ids.
"""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from ddptrain.clusters.security import write_private, write_private_json
from ddptrain.errors import ClusterError
from ddptrain.file_ops import open_append, text_or_empty
from ddptrain.host_identity import HostId, this_host
from ddptrain.version import __version__

FOLDER, PYTHON, ADDRESS = "{folder}", "{python}", "{address}"
_HOST_FILE = "host.json"
_POLL_S = 0.02
_END_S = 10.0  # from SIGTERM to SIGKILL
_KILLED_S = 20.0  # the kernel may need that long after SIGKILL on a very busy host
_TAIL_BYTES = 256 * 1024


class Relation(StrEnum):
    """How the host in a record relates to this host: whether process ids and loopback addresses there are valid here.

    RESTARTED: they were valid before the restart of this host.
    """

    SAME = "same"
    RESTARTED = "restarted"
    OTHER = "other"


def relation(recorded: HostId, here: HostId) -> Relation:
    """Return how a recorded host relates to this one. If it is not certain: OTHER, so that nothing is deleted."""
    if recorded == HostId():  # not in the record
        return Relation.SAME
    if recorded.boot and recorded.boot == here.boot:
        return Relation.SAME if recorded.pids == here.pids else Relation.OTHER
    # Container images contain a machine id, so the name and the namespace must be the same as well.
    known = (recorded.name, recorded.machine, recorded.pids)
    if not recorded.machine or known != (here.name, here.machine, here.pids):
        return Relation.OTHER
    return Relation.RESTARTED if recorded.boot and here.boot else Relation.SAME


def where_to_run(recorded: HostId, here: HostId) -> str:
    """Return the host of a record and what to do, as the continuation of a message that ends with "runs on"."""
    if recorded.name != here.name:
        return f"the host {recorded.name}, and this is {here.name}: run the command on {recorded.name}"
    return f"another machine or container that is also called {here.name}: run the command there"


def is_loopback(host: str) -> bool:
    """Return whether an address or a name is a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def start(folder: str, name: str, argv: Sequence[str], files: Mapping[str, str] | None = None) -> int:
    """Start a process in a session of its own, which writes into `folder`/<name>.log; return its id.

    A `folder` without a slash is the name of one in the user's state directory. It must exist: a call that arrives
    after the cluster was ended, and its folder deleted, starts nothing. FOLDER in `argv`, which must contain it, is
    replaced by its path, PYTHON by this interpreter. `files` (name -> text) are written into the folder first. Only
    this user can read them. Raises ClusterError.
    """
    path = located(folder)
    command = [word.replace(FOLDER, str(path)).replace(PYTHON, sys.executable) for word in argv]
    try:
        write_private_json(path / _HOST_FILE, asdict(this_host()))
        for file, text in (files or {}).items():
            write_private(path / file, text.encode())
        log = open_append(path / f"{name}.log", create_mode=0o600)
        try:
            process = subprocess.Popen(
                command, cwd=path, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        finally:
            os.close(log)
    except OSError as error:
        raise ClusterError(f"the {name} could not be started in {path}: {error}") from error
    process.returncode = 0  # this object must not wait for the process
    return process.pid


def running(folder: str) -> set[int]:
    """Return the ids of the processes that were started in that folder and run. Raises ClusterError on another host."""
    path, here = located(folder), this_host()
    known = json.loads(text_or_empty(path / _HOST_FILE) or "{}")
    host = HostId(**{field.name: known.get(field.name, "") for field in fields(HostId)})
    if (where := relation(host, here)) == Relation.OTHER:
        raise ClusterError(f"the processes in {path} run on {where_to_run(host, here)}")
    if where == Relation.RESTARTED:
        return set()
    leaders, real = {}, os.path.realpath(path)
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with suppress(OSError, IndexError):
            is_there = os.readlink(f"/proc/{pid}/cwd") == real and os.getsid(pid) == pid
            # A shell of the user that is in the folder does not name it. A process that has ended has no command line.
            if is_there and str(path).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                leaders[pid] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return {pid for pid, parent in leaders.items() if parent not in leaders}  # children end with their parent


def end(folder: str, grace_s: float = _END_S) -> None:
    """End the processes that were started in that folder: SIGTERM, then SIGKILL to the groups. Raises ClusterError."""
    for send, number, patience_s in ((os.kill, signal.SIGTERM, grace_s), (os.killpg, signal.SIGKILL, _KILLED_S)):
        deadline = time.monotonic() + patience_s
        left = ending = running(folder)
        for pid in ending:
            with suppress(ProcessLookupError):
                send(pid, number)
        while left and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            left = running(folder) & ending
        for pid in ending:
            with suppress(ChildProcessError):  # reap it if it was started by this process
                os.waitpid(pid, os.WNOHANG)
    if left := running(folder):
        raise ClusterError(f"could not be ended in {folder}, even by SIGKILL: {', '.join(map(str, sorted(left)))}")


def tail(folder: str, name: str, lines: int) -> str:
    """Return the last lines of the log of a process, "" if there is none."""
    try:
        with (located(folder) / f"{name}.log").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
    return "".join(text.splitlines(keepends=True)[-lines:])


def located(folder: str) -> Path:
    """Return the path of a folder, or of a name in the user's state directory."""
    from platformdirs import user_state_path

    return Path(folder) if os.sep in folder else user_state_path("ddptrain", appauthor=False) / "hosts" / folder


# --- The other side of an ssh connection ---


def _run(
    folder: str,
    name: str,
    argv: Sequence[str],
    files: Mapping[str, str],
    version: str,
    host: str,
    address: str,
    await_s: float,
) -> dict[str, Any]:
    """Start a process as `start`; return {"pid", "address", "scheduler"}: the content of its scheduler.json.

    version: that of the caller, which must be the same here. host: the name of this host. address: the one to listen
    on, for which ADDRESS in `argv` stands; "": that at which ssh has reached this host or, behind a tunnel, that of its
    name. await_s: for how long to wait for scheduler.json, which is None with 0.
    """
    if version != __version__:
        raise ClusterError(f"ddptrain {__version__} is installed there, this is {version}: install the same one")
    if not address:
        connection = os.environ.get("SSH_CONNECTION", "").split()
        found = [each for each in (connection[2] if len(connection) == 4 else "", own_address(host)) if each]
        address = next((each for each in found if not is_loopback(each)), (*found, host)[0])
    pid = start(folder, name, [word.replace(ADDRESS, address) for word in argv], files)
    path, deadline = located(folder) / "scheduler.json", time.monotonic() + await_s
    scheduler = None
    while await_s and scheduler is None:
        with suppress(FileNotFoundError):
            scheduler = json.loads(path.read_text(encoding="utf-8"))
        # Not running(): a process that is just being started has no command line yet.
        has_ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        if scheduler is None and (time.monotonic() > deadline or has_ended):
            words = tail(folder, name, 5).strip()[-500:]
            raise ClusterError(f"the {name} did not start at {address}: {words or f'no answer in {await_s:g} s'}")
        time.sleep(_POLL_S)
    return {"pid": pid, "address": address, "scheduler": scheduler}


def _control(folder: str, verb: str, name: str = "", lines: int = 0) -> Any:
    """`prepare` the folder of a process; return the ids of the `running` ones, or the `tail` of a log.

    Or `end` the processes and delete their folder.
    """
    if verb == "prepare":
        located(folder).mkdir(parents=True, exist_ok=True, mode=0o700)
        return None
    if verb == "running":
        return sorted(running(folder))
    if verb == "tail":
        return tail(folder, name, lines)
    end(folder)
    return shutil.rmtree(located(folder), ignore_errors=True)


def own_address(name: str) -> str:
    """Return the address that the name resolves to, or "" if it does not belong to this host."""
    with suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as bound:
            bound.bind(address)
            return str(address[0])
    return ""


def main() -> int:
    """Serve one call: the function name is the argument, its arguments are JSON on stdin."""
    calls: dict[str, Callable[..., Any]] = {"run": _run, "control": _control}
    try:
        answer = {"result": calls[sys.argv[1]](**json.load(sys.stdin))}
    except ClusterError as error:
        answer = {"error": str(error)}
    print(f"\n{json.dumps(answer)}")  # a login script may have printed text that does not end its line
    return 0


if __name__ == "__main__":
    sys.exit(main())
