"""Notifies users of a run or a sweep: alerts of ranks, a suspected hang, a restart that trains again, the end."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ddptrain.config.wording import counted
from ddptrain.notify.sender import Kind, Message, code, facts, send
from ddptrain.results.run_record import RunStatus, root_cause
from ddptrain.sanitize import sanitized
from ddptrain.text_tables import clean_line, duration

if TYPE_CHECKING:
    from ddptrain.config.resolved import ResolvedConfig
    from ddptrain.results.run import Run

_EVERY_S = 60.0  # what happens in this time after a message is sent together
_MOST = 20  # in one message


class RunMessages:
    """A run observer that sends messages to notify.urls. `tells_end`: also about the end of the run, as notify.on says.

    A thread sends what happens during the run, so that no server delays the run. What could not be sent is printed at
    the end of the run: until then the terminal belongs to the display.
    """

    def __init__(self, resolved: ResolvedConfig, *, tells_end: bool) -> None:
        self._name, self._settings, self._secrets = resolved.config.name, resolved.config.notify, resolved.secrets
        self._tells_end = tells_end
        self._attempts = 0
        self._news: queue.Queue[tuple[str, str]] = queue.Queue(_MOST)  # what it is, and a line
        self._dropped = 0
        self._lock = threading.Lock()
        self._warnings: list[str] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._send_news, name="ddptrain-messages", daemon=True)

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Send what users want to know at once."""
        match event:
            case {"event": "alert", "rank": rank, "message": text}:
                self._put("alert", f"rank {rank}: {code(text)}")
            case {"event": "hang_suspected", "message": text} if "hang" in self._settings.on:
                self._put("suspected hang", code(text))
            case {"event": "run_started", "resumed_from": step}:
                self._attempts += 1
                self._from = "the beginning" if step is None else f"step {step}"
            case {"event": "entered"} if self._attempts > 1 and "recovered" in self._settings.on:
                self._attempts = 1
                self._put("recovery", f"after a failure the run trains again, from {self._from}")

    def on_end(self, run: Run) -> None:
        """Send what is left, and the end of the run."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
        ends: dict[str, str] = {RunStatus.FAILED: "failed", RunStatus.SUCCEEDED: "finished"}
        event = ends.get(run.status, "always")
        if self._tells_end and {event, "always"} & {*self._settings.on}:
            failure, cause = run.record.failure, root_cause(run.record.failure)
            noun = run.record.kind or "run"
            what = f"{noun} {run.status_text}"
            about = {
                "root cause": cause,
                noun: run.run_id,
                "duration": duration(run.duration_s),
                "log": failure.log if failure is not None else "",
                "directory": run.where,
            }
            kinds: dict[str, Kind] = {"failed": "failure", "finished": "success"}
            title = what + (f": {clean_line(cause)}" if cause else "")
            self._send(title, what, facts(about), kinds.get(event, "info"))
        for warning in self._warnings:
            print(f"ddptrain: warning: {sanitized(warning)}", file=sys.stderr, flush=True)

    def _put(self, what: str, line: str) -> None:
        with self._lock:  # trials of a sweep are threads
            try:
                self._news.put_nowait((what, line))
            except queue.Full:
                self._dropped += 1
            if self._thread.ident is None:
                self._thread.start()

    def _send_news(self) -> None:
        while not (self._ended.is_set() and self._news.empty()):
            news: list[tuple[str, str]] = []
            while len(news) < _MOST and not self._news.empty():
                news.append(self._news.get())
            if news:
                title = ", ".join(counted(n, what) for what, n in Counter(what for what, _ in news).items())
                more, self._dropped = self._dropped, 0
                rest = [f"and {more:,} more, which are in the log of the run"] if more else []
                self._send(title, title, [*(line for _, line in news), *rest], "warning")
            until = time.monotonic() + _EVERY_S
            while not self._ended.wait(0.5) and (self._news.empty() or time.monotonic() < until):
                continue

    def _send(self, title: str, first: str, lines: Iterable[str], kind: Kind) -> None:
        message = Message.of(self._name, title, first, lines, kind=kind)
        deliveries = send(message, self._settings.urls, secrets=self._secrets)
        self._warnings += [delivery.warning for delivery in deliveries if delivery.warning]
