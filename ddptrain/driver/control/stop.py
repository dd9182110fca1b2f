"""Stops a run from another shell or host, with a file in its directory that its driver handles like a signal."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from ddptrain.driver.control.signals import MOST
from ddptrain.errors import ClusterError, UsageError
from ddptrain.results import ownership
from ddptrain.results.errors import ResultsError
from ddptrain.results.layout import valid_run_id
from ddptrain.results.recorded_config import parsed_config
from ddptrain.results.run import Run, is_sweep
from ddptrain.results.run_record import RunStatus
from ddptrain.results.runs import open_runs_dir, split_run
from ddptrain.results.secure_files import read_bytes, require_own_folder, write_file

if TYPE_CHECKING:
    from ddptrain.driver.control.signals import Signals
    from ddptrain.results.run_writer import RunWriter

_LOOK_EVERY_S = 0.2
_AGAIN_S = 0.1
_HANDLED_WITHIN_S = 2.0  # a starting cluster may block the first signal until the second arrives
_MARGIN_S = 30.0
_DEFAULT_GRACE_S = 30.0
_STORE_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class StopRequest:
    """A request to the driver `pid` on `host`; any other driver of the run ignores it."""

    pid: int
    host: str
    now: bool
    by: str


REQUEST = TypeAdapter(StopRequest)  # the codec of the file


# --- in the driver ---


@contextmanager
def stop_requests(writer: RunWriter, signals: Signals) -> Iterator[None]:
    """Convert stop requests in the run directory to signals to this process until the block ends.

    Requests without `now` send one SIGTERM altogether, so that the ranks can save. One with `now` kills the ranks.
    """
    ended = threading.Event()
    watch = threading.Thread(target=_watch, args=(writer, signals, ended), name="ddptrain-stop", daemon=True)
    watch.start()
    try:
        yield
    finally:
        ended.set()
        watch.join()


def _watch(writer: RunWriter, signals: Signals, ended: threading.Event) -> None:
    while not ended.is_set():
        request = _take_request(writer.layout)
        if request is not None:
            with suppress(ResultsError):  # stop even if the disk is full
                writer.event({"event": "stop_requested", "now": request.now, "by": request.by})
            _send_signal(request, signals, ended)
        ended.wait(_LOOK_EVERY_S)


def _take_request(layout: Run) -> StopRequest | None:
    """Read and delete the request file; return the request if it is for this process."""
    try:
        # Listing the folder makes a network file system refresh it; opening the file alone does not.
        if layout.stop_json.name not in os.listdir(layout.root):
            return None
        text = read_bytes(layout.stop_json)
        layout.stop_json.unlink()
        request = REQUEST.validate_json(text)
    except (OSError, ValueError):
        return None
    return request if (request.pid, request.host) == (os.getpid(), socket.gethostname()) else None


def _send_signal(request: StopRequest, signals: Signals, ended: threading.Event) -> None:
    """Send the run a signal, unless it has it already."""
    is_new = not signals.now if request.now else not (signals.taken or signals.asked)
    if not is_new or len(signals.taken) >= MOST:  # one more would end the driver before it writes run.json
        return
    signals.now = request.now
    signals.asked = signals.asked or not signals.taken
    # Background jobs of a shell ignore SIGINT.
    can_interrupt = signal.getsignal(signal.SIGINT) != signal.SIG_IGN
    before = len(signals.taken)
    for _ in range(2 if request.now else 1):
        signals.send(signal.SIGINT if request.now and can_interrupt else signal.SIGTERM)
        handled_by = time.monotonic() + _HANDLED_WITHIN_S
        while len(signals.taken) == before and time.monotonic() < handled_by and not ended.wait(_AGAIN_S):
            continue
        if len(signals.taken) > before:
            return


# --- in the command that stops the run ---


@dataclass(frozen=True, slots=True)
class StopTarget:
    """A run to stop: `look` returns its state; in the folder `desk` its driver looks for requests."""

    desk: Run
    look: Callable[[], Run]
    look_every_s: float = _LOOK_EVERY_S


def find_target(runs_dir: str, run: str) -> StopTarget:
    """Return the run to stop, and the folder where its driver looks for requests.

    Raises:
        RunNotFound: there is no such run.
        UsageError: run.json can't be read, or the folder exists only on the driver's host.
    """
    folders = [folder for folder in (Path(runs_dir, run), Path(run)) if "\0" not in run and is_sweep(folder)]
    if folders:
        sweep = Run(folders[0].absolute())
        require_own_folder(sweep.root)
        return StopTarget(sweep, lambda: Run(sweep.root))
    place, name = split_run(run, runs_dir)
    runs = open_runs_dir(place)
    view = (runs.get(name) if valid_run_id(name) else None) or runs.find(name)  # get() also finds a sweep
    run_id, driver = view.run_id, view.record.driver
    if view.status == RunStatus.UNREADABLE:
        raise UsageError(f"run {run_id} can't be stopped: {view.problem}")
    if view.is_original:
        return StopTarget(view, lambda: Run(view.root))
    if view.is_running and driver.host != socket.gethostname():
        raise UsageError(
            f"run {run_id} can only be stopped on {driver.host}, where its driver is process {driver.pid}: "
            "it has no directory that other hosts see"
        )
    return StopTarget(
        Run(runs.folder / run_id), lambda: runs.get(run_id) or runs.find(run_id), look_every_s=_STORE_EVERY_S
    )


def stop_run(
    target: StopTarget, *, now: bool, by: str, tell: Callable[[str], None], margin_s: float = _MARGIN_S
) -> Run:
    """Ask the run to end, wait until it has ended, and return its final state.

    Raises:
        ResultsError: the request can't be written.
        ClusterError: the run has not ended within the grace period and `margin_s` seconds.
    """
    view = target.look()
    while view.status == RunStatus.QUEUED:  # also while a driver has the lock, and has not written that it runs
        from ddptrain.driver.submit import cancel

        view = cancel(view)
    if not view.is_running:
        return view
    desk, driver = target.desk, view.record.driver
    try:
        require_own_folder(desk.root)
        write_file(desk.stop_json, REQUEST.dump_json(StopRequest(driver.pid, driver.host, now, by)))
    except ResultsError as error:
        instead = "SIGINT three times" if now else "SIGTERM"
        raise ResultsError(f"{error}; or send {instead} to {driver.description}") from error
    within_s = margin_s + (0.0 if now else _grace_s(desk))
    tell(f"waiting up to {within_s:g} s for run {view.run_id} to end: {driver.description}")
    deadline = time.monotonic() + within_s
    while (view := target.look()).is_running or _is_leaving(view):
        if time.monotonic() > deadline:
            why, advice = "it may still be copying results", f"look at {driver.description}, and kill it"
            if desk.stop_json.exists():
                why = f"{driver.description} has not taken the request: is it stopped, or its host down?"
            if not now:
                advice = f"wait, or end it with ddptrain stop {desk.root.name} --now"
            raise ClusterError(f"run {desk.root.name} has not ended after {within_s:g} s ({why}); {advice}")
        time.sleep(target.look_every_s)
    with suppress(OSError):  # the run may have ended by itself without reading the request
        desk.stop_json.unlink()
    return view


def _is_leaving(view: Run) -> bool:
    return view.record.driver.host == socket.gethostname() and bool(ownership.is_held(view.lock_file))


def _grace_s(layout: Run) -> float:
    try:
        return float(parsed_config(read_bytes(layout.config_yaml))["failure"]["grace_s"])
    except (OSError, ValueError, LookupError, TypeError):
        return _DEFAULT_GRACE_S
