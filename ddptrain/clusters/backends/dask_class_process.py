"""`python -m ddptrain.clusters.backends.dask_class_process`: creates and closes an object of a Dask cluster class.

    python -P -m ddptrain.clusters.backends.dask_class_process hold|create|close DIR

DIR/order.json names the class and its arguments. `hold` creates the cluster, and closes it at the end of stdin, but
only after its constructor has returned: otherwise what it has created so far would stay. `create` leaves it, `close`
attaches to it and closes it. Once it is up, DIR has its certificate and scheduler.json; error.json says what failed.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import dask
from distributed import Client, LocalCluster, Security

from ddptrain.clusters import security
from ddptrain.clusters.scheduler.scheduler_process import LOOKER
from ddptrain.config.wording import counted, did_you_mean, shorten

_REACHABLE = ("tcp", "tls", "ws", "wss", "ucx")
_MOST_OF_AN_ERROR = 500


@dataclass(frozen=True, slots=True)
class DaskClusterOrder:
    """The class to create as package.Cluster, its arguments, and the number of ranks (None: as the arguments give).

    For `close`: `attach` are the arguments that name the existing cluster, `closing` those of its method close.
    """

    cls: str
    kwargs: Mapping[str, Any] = field(repr=False)
    ranks: int | None
    timeout_s: float
    sys_path: list[str]
    handle: str = ""  # the attribute that names the cluster, and the argument of the same name that attaches to it
    closing: Mapping[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write it into the folder, for the process."""
        security.write_private_json(folder / "order.json", asdict(self))


class DaskClusterError(Exception):
    """The cluster can't be created or used. The message has one line; `is_usage`: the configuration is wrong."""

    def __init__(self, message: str, *, is_usage: bool = False) -> None:
        self.is_usage = is_usage
        super().__init__(message)


def main(argv: list[str]) -> int:
    """Obey the order in the folder."""
    verb, folder = argv[0], Path(argv[1])
    order = DaskClusterOrder(**json.loads((folder / "order.json").read_text(encoding="utf-8")))
    sys.path += order.sys_path
    try:
        if verb == "close":
            return _close(_attached(order, folder), order)
        deadline = time.monotonic() + order.timeout_s
        cluster = _created(order, folder, order.kwargs)
        try:
            card = _reached(cluster, order, folder, deadline)
            security.write_private_json(folder / "scheduler.json", card)
            if verb == "hold":
                sys.stdin.read()
        except DaskClusterError as error:
            try:
                _close(cluster, order)
            except DaskClusterError as stuck:
                raise DaskClusterError(f"{error}; {stuck}; what it has started may still be there") from error
            raise
        if verb == "hold":
            return _close(cluster, order)
        sys.stdout.flush()
        os._exit(0)  # the object's own clean-up at the end of the process would close the cluster
    except DaskClusterError as error:
        words = {"message": str(error), "is_usage": error.is_usage}
        security.write_private_json(folder / "error.json", words)
        return 1


def _created(order: DaskClusterOrder, folder: Path, kwargs: Mapping[str, Any]) -> Any:
    """Create the object. Raises DaskClusterError."""
    if kwargs.get("asynchronous"):
        raise DaskClusterError("cluster.kwargs.asynchronous can't be true: leave it out", is_usage=True)
    made = _imported(order.cls)
    if isinstance(made, type) and issubclass(made, LocalCluster):
        # Without a certificate every user of this machine could use the cluster.
        parameters = inspect.signature(made).parameters.values()
        takes_it = any(each.name == "security" or each.kind is each.VAR_KEYWORD for each in parameters)
        if takes_it and not {"security", "protocol"} & kwargs.keys() and kwargs.get("processes") is not False:
            kwargs = {**kwargs, "security": True}
        if dask.config.get("temporary-directory", None) is None:
            # Dask imports modules from below it; by default others may write there.
            dask.config.set({"temporary-directory": str(folder)})
    with _one_line_errors(order, "(...)", kwargs):
        cluster = made(**kwargs)
    if not hasattr(cluster, "scheduler_address"):
        words = f"cluster.class {order.cls} does not create a Dask cluster: the object has no scheduler_address"
        raise DaskClusterError(words, is_usage=True)
    return cluster


def _reached(cluster: Any, order: DaskClusterOrder, folder: Path, deadline: float) -> dict[str, Any]:
    """Wait for the workers; return the content of scheduler.json. Raises DaskClusterError."""
    address = str(cluster.scheduler_address)
    if address.partition("://")[0] not in _REACHABLE:
        where = f"the scheduler of {order.cls} is at {address}, where no other process can reach it"
        raise DaskClusterError(f"{where}; let it listen on tcp://")
    plan = getattr(cluster, "plan", None)  # the workers of a SpecCluster
    wanted = int(order.kwargs.get("n_workers") or len(plan or ()) or 1)
    if "n_workers" not in order.kwargs and (order.ranks or (plan is not None and not plan)):
        wanted = order.ranks or 1
        with _one_line_errors(order, f".scale({wanted})"):
            cluster.scale(wanted)
    given = getattr(cluster, "security", None)
    if given is not None:
        security.keep(given, folder)
    tls = given if isinstance(given, Security) and given.get_tls_config_for_role("client")["cert"] else None
    with _one_line_errors(order, "'s scheduler"):
        client = Client(address, security=tls, timeout=_left_s(deadline), name=LOOKER, set_as_default=False)
    with client:
        try:
            client.wait_for_workers(wanted, timeout=_left_s(deadline))
        except TimeoutError as error:
            joined = f"{len(client.nthreads())} of {counted(wanted, 'worker')} joined"
            raise DaskClusterError(f"{joined} within {order.timeout_s:g} s (cluster.start_timeout_s)") from error
    handle = str(getattr(cluster, order.handle)) if order.handle else ""
    return {"address": address, "workers": wanted, "handle": handle}


def _attached(order: DaskClusterOrder, folder: Path) -> Any:
    """Return the object of a cluster that exists; of one whose start was interrupted, by the same arguments."""
    with contextlib.suppress(OSError, ValueError):
        if handle := json.loads((folder / "scheduler.json").read_text(encoding="utf-8"))["handle"]:
            return _created(order, folder, {order.handle: handle})
    return _created(order, folder, order.kwargs)


def _close(cluster: Any, order: DaskClusterOrder) -> int:
    with _one_line_errors(order, ".close()"):
        cluster.close(**order.closing)
    return 0


def _left_s(deadline: float) -> float:
    return max(1.0, deadline - time.monotonic())


@contextlib.contextmanager
def _one_line_errors(order: DaskClusterOrder, call: str, kwargs: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Convert an exception of the cluster class to a DaskClusterError with one line; the traceback goes to the log.

    It is a wrong configuration if the class, or the scheduler or a worker that it creates, refuses one of `kwargs`.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        words = _one_line(error)
        for name in kwargs or ():
            if (refusal := f"unexpected keyword argument '{name}'") in words:
                raise DaskClusterError(f"cluster.kwargs: {order.cls} got an {refusal}", is_usage=True) from error
        raise DaskClusterError(f"{order.cls}{call} failed: {words}") from error


def _imported(name: str) -> Any:
    """Import the class. Raises DaskClusterError, with the package to install."""
    module_name, _, attribute = name.rpartition(".")
    if not module_name:
        raise DaskClusterError(f"cluster.class {name} contains no module: write it as package.Cluster", is_usage=True)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = str(error.name or module_name).partition(".")[0]
        install = f"pip install {missing.replace('_', '-')}, if that is its package"
        words = f"cluster.class {name} can't be imported: there is no module {error.name} ({install})"
        raise DaskClusterError(words, is_usage=True) from error
    except Exception as error:
        traceback.print_exc()
        raise DaskClusterError(f"cluster.class {name} can't be imported: {_one_line(error)}", is_usage=True) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        hint = did_you_mean(attribute, [each for each in dir(module) if each.endswith("Cluster")])
        words = f"cluster.class {name}: the module {module_name} has no {attribute}" + (f" ({hint})" if hint else "")
        raise DaskClusterError(words, is_usage=True)
    return found


def _one_line(error: BaseException | None) -> str:
    """Return the error and its causes on one line: "failed to start" from Dask alone says little."""
    words = []
    while error is not None:
        text = " ".join(str(error).split())
        words.append(f"{type(error).__name__}: {text}" if text else type(error).__name__)
        error = error.__cause__
    return shorten(", from ".join(dict.fromkeys(words)), _MOST_OF_AN_ERROR)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
