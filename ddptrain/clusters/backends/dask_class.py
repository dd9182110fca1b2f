"""Clusters of any `distributed.deploy.Cluster` class: LocalCluster, FargateCluster, Coiled, ...

A child process creates and closes the object: what the class prints does not mix with the output of a run, Ctrl-C does
not reach its workers, and the cluster of a run that is killed is closed all the same.

    python -P -m ddptrain.clusters.backends.dask_class hold|create|close DIR

DIR/order.json has the configuration. `hold` creates the cluster for a run, and closes it at the end of stdin, but only
after its constructor has returned: otherwise what it has created so far would stay. `cluster up` uses `create`, which
leaves the cluster in its cloud, and `close`. DIR then has its certificate and scheduler.json, or error.json.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

from ddptrain.clusters import processes, security
from ddptrain.clusters.processes import PYTHON
from ddptrain.clusters.provider import Backend, Cluster, Tell
from ddptrain.clusters.record import ClusterRecord, Part
from ddptrain.clusters.resolve import Target
from ddptrain.config.sections.clusters import ClusterConfig
from ddptrain.config.wording import counted, did_you_mean, shorten
from ddptrain.errors import ClusterError, DdptrainError, UsageError

_LOG = "class"
_POLL_S = 0.05
_TELL_EVERY_S = 5.0  # seconds between progress messages: a user may want to interrupt the wait
_STOP_S = 60.0  # cloud machines take longer to end than a process
_LOG_LINES = 8
_REACHABLE = ("tcp", "tls", "ws", "wss", "ucx")
_MOST_OF_AN_ERROR = 500


# The class whose clusters live on without their object: the argument `name` finds an existing one.
_CLOUD = "coiled.Cluster"


class DaskClassCluster(Cluster):
    """A cluster of a class for one run."""

    def __init__(self, config: ClusterConfig, tell: Tell) -> None:
        self.config = config
        self.name = config.class_name
        self._tell = tell
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def description(self) -> str:
        """What it is, for messages."""
        return f"a cluster of {self.name}"

    def begin(self) -> None:
        """Start the process that creates the object."""
        self._folder = tempfile.TemporaryDirectory(prefix="ddptrain-class-", ignore_cleanup_errors=True)
        command = [sys.executable, *_ordered(self.folder, "hold", self.config)]
        with (self.folder / f"{_LOG}.log").open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def folder(self) -> Path:
        """The private folder for its certificate and its log."""
        assert self._folder is not None
        return Path(self._folder.name)

    def connect(self) -> Target:
        """Wait for the cluster; return its address. Raises ClusterError, UsageError."""
        assert self._process is not None
        self._tell(f"starting {self.description}")
        deadline = time.monotonic() + self.config.start_timeout_s
        while (card := _card(self.folder, is_over=self._process.poll() is not None)) is None:
            if time.monotonic() > deadline:
                limit = f"{self.config.start_timeout_s:g} s (cluster.start_timeout_s)"
                raise ClusterError(f"{self.name} is not up after {limit}{_log_end(self.folder)}")
            time.sleep(_POLL_S)
        tls = security.own_security(self.folder) if (self.folder / security.CERT_FILE).exists() else None
        return Target(str(card["address"]), tls)

    def worker_fault(self) -> str | None:
        """Return why the process has ended; None while it runs."""
        assert self._process is not None
        return None if self._process.poll() is None else str(_failure(self.folder))

    def last_words(self) -> str:
        """Return the end of what the class has written."""
        return _log_end(self.folder).lstrip("\n")

    def close(self) -> None:
        """Close the cluster, also one that is still being created."""
        if self._process is None or self._process.stdin is None or self._folder is None:
            return
        was_running = self._process.poll() is None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            pid = self._process.pid
            self._tell(f"{self.name} is not closed after {_STOP_S:g} s: process {pid} will close it and end")
            return
        if was_running and self._process.returncode:
            self._tell(f"{_failure(self.folder)}; what it has started may still be there")
        self._folder.cleanup()


class DaskClassBackend(Backend):
    """Creates a cluster in a cloud and leaves it there; the record has its address."""

    def start(self, cluster: ClusterRecord, tell: Tell) -> Generator[Part]:
        """Create the cluster, and wait for its workers. Raises ClusterError, UsageError."""
        config, name, folder = cluster.config, cluster.config.class_name, cluster.folder
        if name != _CLOUD:
            raise UsageError(
                f"a cluster of {name} ends with the process that has created it: give its class to a run, without "
                "`cluster up`; or create it in a program of your own, and use cluster.address"
            )
        if config.idle_timeout_s:
            raise UsageError(f"cluster.idle_timeout_s is not kept by {name}: use its own setting, in cluster.kwargs")
        part = Part(role="cloud", id=name, log=str(folder / f"{_LOG}.log"))
        yield part
        part = part.model_copy(update={"pid": _begun(cluster, "create")})
        shown_at = time.monotonic()
        while (card := _card(folder, is_over=not processes.running(str(folder)))) is None:
            if time.monotonic() - shown_at > _TELL_EVERY_S:
                tell(f"{name} is starting")
                shown_at = time.monotonic()
            yield part
            time.sleep(_POLL_S)
        cluster.address, cluster.workers = str(card["address"]), int(card["workers"])
        yield part

    def fault(self, cluster: ClusterRecord) -> str | None:
        """Return None: only the cloud knows."""
        return None

    def logs(self, cluster: ClusterRecord, lines: int) -> Mapping[str, str]:
        """Return what the class has written; the pages of the cloud have the logs of its machines."""
        return {_LOG: processes.tail(str(cluster.folder), _LOG, lines)}

    def stop(self, cluster: ClusterRecord, tell: Tell) -> None:
        """Close the cluster, also one that is still starting. Raises ClusterError if it can't be closed."""
        error_file = cluster.folder / "error.json"
        for part in cluster.of_role("cloud"):
            _await_end(cluster, part.id, tell)
            if (error := _json(error_file)) is not None and error["is_usage"]:
                continue  # nothing was started
            error_file.unlink(missing_ok=True)
            _begun(cluster, "close")
            _await_end(cluster, part.id, tell)
            if error_file.exists():
                cluster.parts = []  # a second `cluster down` has nothing left to end
                cluster.save()
                raise ClusterError(
                    f"{_failure(cluster.folder)}; what it has started may still be there: see the pages of the cloud; "
                    f"ddptrain cluster down {cluster.name} deletes its record"
                )


def _ordered(folder: Path, verb: str, config: ClusterConfig, name: str = "") -> list[str]:
    """Write the order for the process into its folder; return the arguments of Python that start it."""
    order = {"config": config.model_dump(mode="json", by_alias=True), "name": name, "path": os.getcwd()}
    security.write_private_json(folder / "order.json", order)
    return ["-P", "-m", "ddptrain.clusters.backends.dask_class", verb, str(folder)]


def _begun(cluster: ClusterRecord, verb: str) -> int:
    command = [PYTHON, *_ordered(cluster.folder, verb, cluster.config, cluster.name)]
    return processes.start(str(cluster.folder), _LOG, command)


def _await_end(cluster: ClusterRecord, name: str, tell: Tell) -> None:
    """Wait for the process: what its constructor has ordered would stay if it were killed."""
    began = shown_at = time.monotonic()
    while running := processes.running(str(cluster.folder)):
        now = time.monotonic()
        if now - began > _STOP_S:
            raise ClusterError(f"{name} is still starting or closing after {_STOP_S:g} s (pid {min(running)})")
        if now - shown_at > _TELL_EVERY_S:
            tell(f"waiting for {name}")
            shown_at = now
        time.sleep(_POLL_S)


def _card(folder: Path, *, is_over: bool) -> dict[str, Any] | None:
    """Return scheduler.json, None while the cluster is created. Raises ClusterError, UsageError if it `is_over`."""
    card = _json(folder / "scheduler.json")
    if card is None and is_over:
        raise _failure(folder)
    return card


def _failure(folder: Path) -> DdptrainError:
    """Return why the process has ended, with the end of its log if one line is not enough."""
    error = _json(folder / "error.json")
    if error is None:
        return ClusterError(f"the process that holds the cluster has ended{_log_end(folder)}")
    if error["is_usage"]:
        return UsageError(str(error["message"]))
    return ClusterError(f"{error['message']}{_log_end(folder)}")


def _log_end(folder: Path) -> str:
    log = processes.tail(str(folder), _LOG, _LOG_LINES).strip()
    return "\nlast lines of its log:\n  " + log.replace("\n", "\n  ") if log else ""


def _json(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return found


# --- The child process ---


def main(argv: list[str]) -> int:
    """Obey the order in the folder."""
    verb, folder = argv[0], Path(argv[1])
    order = json.loads((folder / "order.json").read_text(encoding="utf-8"))
    sys.path.append(order["path"])
    try:
        _obey(verb, folder, ClusterConfig.model_validate(order["config"]), order["name"])
    except DdptrainError as error:
        words = {"message": str(error), "is_usage": isinstance(error, UsageError)}
        security.write_private_json(folder / "error.json", words)
        return 1
    return 0


def _obey(verb: str, folder: Path, config: ClusterConfig, name: str) -> None:
    kwargs, closing = config.kwargs, {}
    if verb != "hold":
        kwargs = {"name": f"ddptrain-{name}", **kwargs, "shutdown_on_close": False}
        closing = {"force_shutdown": True}
    deadline = time.monotonic() + config.start_timeout_s
    cluster = _created(config.class_name, folder, kwargs)
    if verb == "close":
        return _close(cluster, config.class_name, closing)
    try:
        card = _reached(cluster, config, folder, deadline)
        security.write_private_json(folder / "scheduler.json", card)
        if verb == "hold":
            sys.stdin.read()
    except DdptrainError as error:
        try:
            _close(cluster, config.class_name, closing)
        except DdptrainError as stuck:
            raise ClusterError(f"{error}; {stuck}; what it has started may still be there") from error
        raise
    if verb == "create":
        sys.stdout.flush()
        os._exit(0)  # the object's own clean-up at the end of the process would close the cluster
    return _close(cluster, config.class_name, closing)


def _created(name: str, folder: Path, kwargs: Mapping[str, Any]) -> Any:
    """Create the object. Raises ClusterError, UsageError."""
    import dask
    from distributed import LocalCluster

    if kwargs.get("asynchronous"):
        raise UsageError("cluster.kwargs.asynchronous can't be true: leave it out")
    made = _imported(name)
    if isinstance(made, type) and issubclass(made, LocalCluster):
        # Without a certificate every user of this machine could use the cluster.
        parameters = inspect.signature(made).parameters.values()
        takes_it = any(each.name == "security" or each.kind is each.VAR_KEYWORD for each in parameters)
        if takes_it and not {"security", "protocol"} & kwargs.keys() and kwargs.get("processes") is not False:
            kwargs = {**kwargs, "security": True}
        if dask.config.get("temporary-directory", None) is None:
            # Dask imports modules from below it; by default others may write there.
            dask.config.set({"temporary-directory": str(folder)})
    with _one_line_errors(name, "(...)", kwargs):
        cluster = made(**kwargs)
    if not hasattr(cluster, "scheduler_address"):
        raise UsageError(f"cluster.class {name} does not create a Dask cluster: the object has no scheduler_address")
    return cluster


def _reached(cluster: Any, config: ClusterConfig, folder: Path, deadline: float) -> dict[str, Any]:
    """Wait for the workers; return the content of scheduler.json. Raises ClusterError."""
    from distributed import Client, Security

    name, address = config.class_name, str(cluster.scheduler_address)
    if address.partition("://")[0] not in _REACHABLE:
        where = f"the scheduler of {name} is at {address}, where no other process can reach it"
        raise ClusterError(f"{where}; let it listen on tcp://")
    ranks = config.ranks if isinstance(config.ranks, int) else None
    plan = getattr(cluster, "plan", None)  # the workers of a SpecCluster
    wanted = int(config.kwargs.get("n_workers") or len(plan or ()) or 1)
    if "n_workers" not in config.kwargs and (ranks or (plan is not None and not plan)):
        wanted = ranks or 1
        with _one_line_errors(name, f".scale({wanted})"):
            cluster.scale(wanted)
    given = getattr(cluster, "security", None)
    if given is not None:
        security.keep(given, folder)
    tls = given if isinstance(given, Security) and given.get_tls_config_for_role("client")["cert"] else None
    with _one_line_errors(name, "'s scheduler"):
        client = Client(address, security=tls, timeout=max(1.0, deadline - time.monotonic()), set_as_default=False)
    with client:
        try:
            client.wait_for_workers(wanted, timeout=max(1.0, deadline - time.monotonic()))
        except TimeoutError as error:
            joined = f"{len(client.nthreads())} of {counted(wanted, 'worker')} joined"
            raise ClusterError(f"{joined} within {config.start_timeout_s:g} s (cluster.start_timeout_s)") from error
    return {"address": address, "workers": wanted}


def _close(cluster: Any, name: str, closing: Mapping[str, Any]) -> None:
    with _one_line_errors(name, ".close()"):
        cluster.close(**closing)


@contextlib.contextmanager
def _one_line_errors(name: str, call: str, kwargs: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Convert an exception of the cluster class to a ClusterError with one line; the traceback goes to the log.

    It is a wrong configuration if the class, or the scheduler or a worker that it creates, refuses one of `kwargs`.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        words = _one_line(error)
        for each in kwargs or ():
            if (refusal := f"unexpected keyword argument '{each}'") in words:
                raise UsageError(f"cluster.kwargs: {name} got an {refusal}") from error
        raise ClusterError(f"{name}{call} failed: {words}") from error


def _imported(name: str) -> Any:
    """Import the class. Raises UsageError, with the package to install."""
    module_name, _, attribute = name.rpartition(".")
    if not module_name:
        raise UsageError(f"cluster.class {name} contains no module: write it as package.Cluster")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        traceback.print_exc()
        missing = error.name.partition(".")[0] if isinstance(error, ImportError) and error.name else ""
        hint = f" (pip install {missing.replace('_', '-')}, if that is its package)" if missing else ""
        raise UsageError(f"cluster.class {name} can't be imported: {_one_line(error)}{hint}") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        hint = did_you_mean(attribute, [each for each in dir(module) if each.endswith("Cluster")])
        raise UsageError(f"cluster.class {name}: the module {module_name} has no {attribute}{hint and f' ({hint})'}")
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
