"""Stopping a run from another shell or host: a request in its directory, which its driver takes for a signal."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddptrain.errors import ClusterError, ConfigError
from ddptrain.results.errors import ResultsError
from ddptrain.results.files import read_bytes, require_own_folder, write_whole
from ddptrain.results.layout import RunLayout
from ddptrain.results.lookup import RunView
from ddptrain.results.ownership import lock
from ddptrain.results.record import DriverRecord, RunStatus

if TYPE_CHECKING:
    from ddptrain.driver.control.signals import Signals
    from ddptrain.results.writer import RunWriter

_LOOK_EVERY_S = 0.2
_AGAIN_S = 0.1
_SEEN_WITHIN_S = 2.0  # while a cluster starts, the first may be kept waiting until the second comes
_ENOUGH = 2  # a second signal stops at once; a third would end the driver before it has written how the run ended
_MARGIN_S = 30.0
_DEFAULT_GRACE_S = 30.0


@dataclass(frozen=True, slots=True)
class StopRequest:
    """What somebody asks of the driver `pid` on `host`; another driver of the same run is not meant."""

    pid: int
    host: str
    now: bool
    by: str

    @classmethod
    def from_json(cls, text: str | bytes) -> StopRequest:
        """Raises ValueError for anything else."""
        try:
            raw = json.loads(text)
            return cls(int(raw["pid"]), str(raw["host"]), bool(raw["now"]), str(raw["by"]))
        except (LookupError, TypeError, RecursionError) as error:
            raise ValueError(f"no stop request: {error}") from error

    def to_json(self) -> str:
        """The text of the file."""
        return json.dumps(dataclasses.asdict(self)) + "\n"


# --- the driver's side ---


@contextmanager
def stop_requests(writer: RunWriter, signals: Signals) -> Iterator[None]:
    """Until the block ends, a request in the run directory is a signal to this process.

    Without `now` it is SIGTERM, once: asking again does not cut short what the ranks save. With it, it is as Ctrl-C
    pressed twice.
    """
    over = threading.Event()
    watch = threading.Thread(target=_watch, args=(writer, signals, over), name="ddptrain-stop", daemon=True)
    watch.start()
    try:
        yield
    finally:
        over.set()
        watch.join()


def _watch(writer: RunWriter, signals: Signals, over: threading.Event) -> None:
    sent = 0
    while not over.is_set():
        request = _taken(writer.layout)
        if request is not None:
            with suppress(ResultsError):  # a full disk is a reason to stop, not one to go on
                writer.event({"event": "stop_requested", "now": request.now, "by": request.by})
            sent += _obey(request, signals, sent, over)
        over.wait(_LOOK_EVERY_S)


def _taken(layout: RunLayout) -> StopRequest | None:
    """The request that is there for this process; it, or one that is not for us, is gone afterwards."""
    try:
        # Opening the folder makes a network file system look again; asking for the file alone does not.
        if layout.stop_json.name not in os.listdir(layout.root):
            return None
        text = read_bytes(layout.stop_json)
        layout.stop_json.unlink()
        request = StopRequest.from_json(text)
    except (OSError, ValueError):
        return None
    return request if (request.pid, request.host) == (os.getpid(), socket.gethostname()) else None


def _obey(request: StopRequest, signals: Signals, sent: int, over: threading.Event) -> int:
    """Send this process what is still to be sent, and return how many signals that was; `sent` were before."""
    missing = (_ENOUGH if request.now else 1) - max(sent, len(signals.taken))
    signals.asked = signals.asked or (missing > 0 and not signals.taken)
    # A shell's background job has SIGINT ignored.
    can_interrupt = signal.getsignal(signal.SIGINT) != signal.SIG_IGN
    for _ in range(missing):
        before = len(signals.taken)
        os.kill(os.getpid(), signal.SIGINT if request.now and can_interrupt else signal.SIGTERM)
        seen_by = time.monotonic() + _SEEN_WITHIN_S
        while len(signals.taken) == before and time.monotonic() < seen_by and not over.wait(_AGAIN_S):
            continue  # two at once would count as one
    return max(0, missing)


# --- the other side ---


@dataclass(frozen=True, slots=True)
class Going:
    """A run to stop: `look` tells how it stands, and `desk` is the folder that its driver writes, and looks into."""

    desk: RunLayout
    look: Callable[[], RunView]
    look_every_s: float = _LOOK_EVERY_S


def stop_run(going: Going, *, now: bool, by: str, tell: Callable[[str], None], margin_s: float = _MARGIN_S) -> RunView:
    """Ask the run to end, wait until it has, and return it as it then stands; one that has ended is returned as it is.

    Raises:
        ResultsError: the request can't be written.
        ClusterError: the run goes on although its time is over.
    """
    view = going.look()
    if not is_going(view):
        return view
    driver = view.record.driver
    _ask(going.desk, StopRequest(driver.pid, driver.host, now, by))
    within_s = margin_s + (0.0 if now else _grace_s(going.desk))
    tell(f"waiting up to {within_s:g} s for run {view.run_id} to end: {driver.words}")
    deadline = time.monotonic() + within_s
    while is_going(view := going.look()) or _is_leaving(view):
        if time.monotonic() > deadline:
            raise ClusterError(_not_in_time(going.desk, driver, within_s, now=now))
        time.sleep(going.look_every_s)
    with suppress(OSError):  # the run may have ended by itself, and nobody has taken the request
        going.desk.stop_json.unlink(missing_ok=True)
    return view


def is_going(view: RunView) -> bool:
    """Whether its driver is, or may be, at work: one elsewhere that has long written nothing may be in a long epoch."""
    return view.status in (RunStatus.RUNNING, RunStatus.UNKNOWN)


def _is_leaving(view: RunView) -> bool:
    return view.record.driver.host == socket.gethostname() and lock.is_held(view.layout.lock_file)


def _ask(desk: RunLayout, request: StopRequest) -> None:
    try:
        require_own_folder(desk.root)
        write_whole(desk.stop_json, request.to_json().encode())
    except ResultsError as error:
        instead = "SIGINT twice" if request.now else "SIGTERM"
        driver = DriverRecord(request.pid, request.host)
        raise ResultsError(f"{error}; or send {instead} to {driver.words}") from error


def _not_in_time(desk: RunLayout, driver: DriverRecord, within_s: float, *, now: bool) -> str:
    if desk.stop_json.exists():
        why = f"{driver.words} has not taken the request: is it stopped, or its host down?"
    else:
        why = "it may still be bringing results home"
    advice = (
        f"look at {driver.words}, and kill it" if now else f"wait, or end it with ddptrain stop {desk.root.name} --now"
    )
    return f"run {desk.root.name} has not ended after {within_s:g} s ({why}); {advice}"


def _grace_s(layout: RunLayout) -> float:
    """failure.grace_s as the run was given it."""
    from ddptrain.config.load import load_data

    try:
        text = read_bytes(layout.config_yaml)
        return float(load_data(text, str(layout.config_yaml))["failure"]["grace_s"])
    except (OSError, ConfigError, ValueError, LookupError, TypeError):
        return _DEFAULT_GRACE_S
