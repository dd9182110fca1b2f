"""`python -m ddptrain.clusters.backends.dask_class_process`: creates, scales and closes a Dask cluster object.

    python -P -m ddptrain.clusters.backends.dask_class_process --folder DIR

DIR/order.json names the class and its arguments. Once the cluster is up, DIR contains its certificate,
DIR/scheduler.json contains its address, and DIR/keeper.sock accepts requests for other numbers of slots. SIGTERM closes
the cluster, but only after its constructor has returned: otherwise the resources that it has created so far would stay.
DIR/ended.json says why this process ended by itself, and what it could not close.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import inspect
import json
import math
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import dask

from ddptrain.clusters import security
from ddptrain.clusters.resolve import Target
from ddptrain.clusters.scheduler.idle_time import IdleWatch
from ddptrain.clusters.scheduler.scheduler_process import SCHEDULER_FILE, write_ended
from ddptrain.config.wording import did_you_mean, shorten
from ddptrain.file_ops import temp_folder
from ddptrain.protocol.rank_spec import SLOT_RESOURCE

ORDER_FILE = "order.json"
SOCKET_FILE = "keeper.sock"
_REACHABLE = ("tcp", "tls", "ws", "wss", "ucx")
_OVER = ("closed", "failed")
_ANSWER_S = 5.0
_MOST_OF_AN_ERROR = 500


@dataclass(frozen=True, slots=True)
class DaskClusterOrder:
    """The class to create as package.Cluster, its arguments, and the number of slots (None: as the arguments give)."""

    cls: str
    kwargs: Mapping[str, Any] = field(repr=False)
    slots: int | None = None
    idle_timeout_s: float = 0.0
    sys_path: Sequence[str] = ()

    def to_json(self) -> str:
        """Return the content of order.json."""
        return json.dumps(dataclasses.asdict(self))


class DaskClusterError(Exception):
    """The cluster can't be created or used. The message has one line; `is_usage`: the configuration is wrong."""

    def __init__(self, message: str, *, is_usage: bool = False) -> None:
        self.is_usage = is_usage
        super().__init__(message)


class DaskCluster:
    """The cluster object, and its name for messages."""

    def __init__(self, order: DaskClusterOrder, folder: Path, scratch: Path) -> None:
        """Create the cluster; a certificate made here is written to `folder`. Raises DaskClusterError.

        scratch: a private folder for the processes of a LocalCluster.
        """
        self.name = order.cls
        if order.kwargs.get("asynchronous"):
            raise DaskClusterError("cluster.kwargs.asynchronous can't be true: leave it out", is_usage=True)
        made = _imported(order.cls)
        if _is_local(made) and dask.config.get("temporary-directory", None) is None:
            # Dask imports modules from below it; by default others may write there.
            dask.config.set({"temporary-directory": str(scratch)})
        with self._one_line_errors("(...)", order.kwargs):
            self._cluster: Any = made(**{**_own_security(made, order.kwargs, folder), **order.kwargs})
        if not hasattr(self._cluster, "scheduler_address"):
            words = f"cluster.class {self.name} does not create a Dask cluster: the object has no scheduler_address"
            raise DaskClusterError(words, is_usage=True)

    def target(self) -> Target:
        """Return the scheduler's address and security. Raises DaskClusterError if it is not reachable."""
        address = str(self._cluster.scheduler_address)
        if address.partition("://")[0] not in _REACHABLE:
            raise DaskClusterError(
                f"the scheduler of {self.name} is at {address}, where no other process can reach it; let it listen "
                "on tcp://"
            )
        return Target(address, getattr(self._cluster, "security", None))

    def dashboard(self) -> str:
        """Return the URL of the dashboard, or ""."""
        return str(getattr(self._cluster, "dashboard_link", None) or "")

    def resize(self, slots: int | None) -> int:
        """Scale to `slots` (None: the present ones, or one worker). Return the workers. Raises DaskClusterError."""
        info = getattr(self._cluster, "scheduler_info", {})
        workers = info.get("workers", {}).values()
        planned = max(len(getattr(self._cluster, "plan", ())), len(workers))
        if slots is None and planned:
            return planned
        wanted = math.ceil((slots or 1) / min((_slots(worker) for worker in workers), default=1))
        can_scale = getattr(self._cluster, "_supports_scaling", True)
        if not can_scale and wanted != planned:
            raise DaskClusterError(f"{self.name} can't be scaled to {wanted} workers, it has {planned}")
        if can_scale:
            with self._one_line_errors(f".scale({wanted})"):
                self._cluster.scale(wanted)
        return wanted

    def is_over(self) -> bool:
        """Return whether it has ended by itself."""
        status = getattr(self._cluster, "status", None)
        return getattr(status, "name", status) in _OVER

    def close(self) -> None:
        """End it. Raises DaskClusterError."""
        with self._one_line_errors(".close()"):
            self._cluster.close()

    @contextlib.contextmanager
    def _one_line_errors(self, call: str, kwargs: Collection[str] = ()) -> Iterator[None]:
        """Convert an exception of the cluster class to a DaskClusterError with one line; the traceback goes to the log.

        It is a wrong configuration if the class, or the scheduler or a worker that it creates, refuses one of `kwargs`.
        """
        try:
            yield
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            words = _one_line(error)
            for name in kwargs:
                if (refusal := f"unexpected keyword argument '{name}'") in words:
                    raise DaskClusterError(f"cluster.kwargs: {self.name} got an {refusal}", is_usage=True) from error
            raise DaskClusterError(f"{self.name}{call} failed: {words}") from error


def main(argv: list[str] | None = None) -> int:
    """Create the cluster, and close it after SIGTERM or the idle time."""
    parser = argparse.ArgumentParser(
        prog="python -m ddptrain.clusters.backends.dask_class_process", description="Creates and closes a Dask cluster."
    )
    parser.add_argument("--folder", type=Path, required=True, help="the cluster's folder")
    folder: Path = parser.parse_args(argv).folder
    order = DaskClusterOrder(**json.loads((folder / ORDER_FILE).read_text(encoding="utf-8")))
    sys.path += order.sys_path
    with temp_folder("ddptrain-class-") as scratch, _SigtermFlag() as sigterm:
        try:
            cluster = DaskCluster(order, folder, scratch)
        except DaskClusterError as error:
            write_ended(folder, str(error), is_usage=error.is_usage)
            return 1
        return _run(cluster, order, folder, sigterm)


def _run(cluster: DaskCluster, order: DaskClusterOrder, folder: Path, sigterm: _SigtermFlag) -> int:
    """Serve requests until the end, then close the cluster. Return the exit code."""
    is_left = False
    try:
        reason = "" if sigterm else _serve(cluster, order, folder, sigterm)
    except DaskClusterError as error:
        reason = str(error)
    (folder / SCHEDULER_FILE).unlink(missing_ok=True)
    try:
        cluster.close()
    except DaskClusterError as error:
        is_left = True
        reason = "; ".join([*filter(None, [reason]), str(error), "what it has started may still be there"])
    if reason:
        write_ended(folder, reason, is_left=is_left)
    return int(is_left)


def _serve(cluster: DaskCluster, order: DaskClusterOrder, folder: Path, sigterm: _SigtermFlag) -> str:
    """Write scheduler.json and answer requests until the end. Returns the reason for the end, "" after a signal."""
    target = cluster.target()
    workers = cluster.resize(order.slots)
    if target.security is not None and not (folder / security.CERT_FILE).exists():
        security.keep(target.security, folder)
    watch = IdleWatch(target, order.idle_timeout_s)
    with _listening(folder) as listener, selectors.DefaultSelector() as selector:
        for source in (listener, sigterm):
            selector.register(source, selectors.EVENT_READ)
        card = {"address": target.address, "dashboard": cluster.dashboard(), "workers": workers}
        security.write_private_json(folder / SCHEDULER_FILE, {**card, "pid": os.getpid(), "host": socket.gethostname()})
        while True:
            ready = [key.fileobj for key, _ in selector.select(watch.pause_s)]
            if sigterm:
                return ""
            if listener in ready:
                _answer(listener, cluster)
            if cluster.is_over():
                return f"{cluster.name} has closed by itself"
            if watch.is_over():
                return f"idle for {order.idle_timeout_s:g} s"


@contextlib.contextmanager
def _listening(folder: Path) -> Iterator[socket.socket]:
    """A listening socket in the private folder, bound by a relative name: the full path may be too long."""
    (folder / SOCKET_FILE).unlink(missing_ok=True)
    os.chdir(folder)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(SOCKET_FILE)
        listener.listen()
        yield listener


def _answer(listener: socket.socket, cluster: DaskCluster) -> None:
    """Answer one request, {"slots": N}, with {"workers": N} or {"error": "..."}."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # the client hung up, or sent something else
        connection, _ = listener.accept()
        with connection, connection.makefile("rw") as stream:
            connection.settimeout(_ANSWER_S)
            slots = int(json.loads(stream.readline())["slots"])
            try:
                answer: dict[str, Any] = {"workers": cluster.resize(slots)}
            except DaskClusterError as error:
                answer = {"error": str(error)}
            stream.write(json.dumps(answer) + "\n")


class _SigtermFlag:
    """True after SIGTERM; also a file for selectors that becomes readable when the signal arrives."""

    def __init__(self) -> None:
        self._is_set = False

    def __enter__(self) -> Self:
        self._reader, self._writer = socket.socketpair()
        signal.signal(signal.SIGTERM, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._reader.close()
        self._writer.close()

    def __bool__(self) -> bool:
        return self._is_set

    def fileno(self) -> int:
        """Return the descriptor, as selectors require."""
        return self._reader.fileno()

    def _take(self, signum: int, frame: object) -> None:
        if not self._is_set:
            self._writer.send(b"!")
        self._is_set = True


def _imported(name: str) -> Any:
    """Import the class. Raises DaskClusterError, with the package to install."""
    module_name, _, attribute = name.rpartition(".")
    package = module_name.partition(".")[0]
    if not package:
        raise DaskClusterError(f"cluster.class {name} contains no module: write it as package.Cluster", is_usage=True)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = str(error.name or package)
        install = f"pip install {missing.partition('.')[0].replace('_', '-')}, if that is its package"
        words = f"cluster.class {name} can't be imported: there is no module {missing} ({install})"
        raise DaskClusterError(words, is_usage=True) from error
    except Exception as error:
        traceback.print_exc()
        raise DaskClusterError(f"cluster.class {name} can't be imported: {_one_line(error)}", is_usage=True) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        classes = [each for each in dir(module) if each.endswith("Cluster")]
        hint = did_you_mean(attribute, classes)
        words = f"cluster.class {name}: the module {module_name} has no {attribute}" + (f" ({hint})" if hint else "")
        raise DaskClusterError(words, is_usage=True)
    return found


def _own_security(made: Any, kwargs: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Make a certificate for a LocalCluster without one. Otherwise every user of this machine could use the cluster."""
    chosen = {"security", "protocol"} & kwargs.keys() or kwargs.get(
        "processes"
    ) is False  # no other process can connect to it
    if not _is_local(made) or chosen or not _takes(made, "security"):
        return {}
    security.make_tls(folder)
    return {"security": security.own_security(folder)}


def _is_local(made: Any) -> bool:
    from distributed import LocalCluster

    return isinstance(made, type) and issubclass(made, LocalCluster)


def _takes(made: Any, argument: str) -> bool:
    parameters = inspect.signature(made).parameters.values()
    return any(each.name == argument or each.kind is each.VAR_KEYWORD for each in parameters)


def _slots(worker: Mapping[str, Any]) -> int:
    """Return the slots of a worker: its Dask resource, or 1 if the worker isn't one of ddptrain's."""
    offered = int(worker.get("resources", {}).get(SLOT_RESOURCE, 1))
    return max(1, min(offered, int(worker.get("nthreads", offered))))


def _one_line(error: BaseException) -> str:
    """Return the error and its causes on one line: "failed to start" from Dask alone says little."""
    words = [_words(error)]
    while (cause := error.__cause__) is not None:
        words.append(_words(cause))
        error = cause
    return shorten(", from ".join(dict.fromkeys(words)), _MOST_OF_AN_ERROR)


def _words(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
