"""Notifies users of a run: of its failure, and of what its ranks send with ctx.alert."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddptrain.config.wording import counted, shorten
from ddptrain.notify.sender import Kind, Message, code, send
from ddptrain.results.run_record import RunStatus, root_cause
from ddptrain.sanitize import sanitized
from ddptrain.text_tables import clean_line, duration

if TYPE_CHECKING:
    from ddptrain.config.resolved import ResolvedConfig
    from ddptrain.results.lookup import RunView

_ALERTS_EVERY_S = 60.0  # alerts in this time after a message are sent together
_MOST_ALERTS = 20  # in one message


class RunMessages:
    """A run observer that sends messages to notify.urls. `tells_end`: also about the end of the run, as notify.on says.

    A thread sends alerts, so that no server delays the run. What could not be sent is printed at the end of the run:
    until then the terminal belongs to the display.
    """

    def __init__(self, resolved: ResolvedConfig, *, tells_end: bool) -> None:
        self._name, self._settings, self._secrets = resolved.config.name, resolved.config.notify, resolved.secrets
        self._tells_end = tells_end
        self._alerts: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._warnings: list[str] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._send_alerts, name="ddptrain-alerts", daemon=True)

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Send an alert."""
        if event["event"] == "alert":
            self._alerts.put(f"- rank {event['rank']}: {code(event['message'])}")
            if self._thread.ident is None:
                self._thread.start()

    def on_end(self, run: RunView) -> None:
        """Send what is left, and the end of the run."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
        status, on = run.status, self._settings.on
        if self._tells_end and ("always" in on or ("failed" in on and status == RunStatus.FAILED)):
            failure, cause = run.record.failure, root_cause(run.record.failure)
            title = f"run {run.status_text}" + (f": {clean_line(cause)}" if cause else "")
            facts = [
                ("root cause", cause),
                ("run", run.run_id),
                ("duration", duration(run.duration_s)),
                ("log", failure.log if failure is not None else ""),
                ("directory", run.layout.where),
            ]
            lines = [f"- {name}: {code(value)}" for name, value in facts if value]
            kind: Kind = "failure" if status == RunStatus.FAILED else "info"
            self._send(title, [f"**{clean_line(self._name)}**: run {run.status_text}", "\n".join(lines)], kind)
        for warning in self._warnings:
            print(f"ddptrain: warning: {sanitized(warning)}", file=sys.stderr, flush=True)

    def _send_alerts(self) -> None:
        while not (self._ended.is_set() and self._alerts.empty()):
            lines: list[str] = []
            while len(lines) < _MOST_ALERTS and not self._alerts.empty():
                lines.append(self._alerts.get())
            if lines:
                what = counted(len(lines), "alert")
                self._send(what, [f"**{clean_line(self._name)}**: {what} of the ranks", "\n".join(lines)], "warning")
            self._wait_for_more()

    def _wait_for_more(self) -> None:
        until = time.monotonic() + _ALERTS_EVERY_S
        while not self._ended.wait(0.5) and (self._alerts.empty() or time.monotonic() < until):
            continue

    def _send(self, title: str, blocks: Sequence[str], kind: Kind) -> None:
        message = Message(shorten(f"{clean_line(self._name)}: {title}", 120), "\n\n".join(blocks), kind)
        deliveries = send(message, self._settings.urls, secrets=self._secrets)
        self._warnings += [delivery.warning for delivery in deliveries if delivery.warning]
