"""The process that sends a message with Apprise; it ends at the deadline, also if a thread hangs."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import apprise

_TIMEOUT = apprise.AppriseResultStatus.TIMEOUT
_PAUSE_S = 3.0
_END_GRACE_S = 0.5
# Apprise logs the cause of a failure for developers only.
_CAUSE = re.compile(
    r"\[Errno -?\d+\] ([^'\"()<>\\]+)|(timed out|certificate verify failed[^'\"()]*|Remote end closed[^'\"()]*)"
    r"|\((\d{3}), b?['\"]([^'\"]+)['\"]\)"  # an answer of an SMTP server
)
_NO_TIME_LEFT = re.compile(r"^Service '.*' did not finish within ")


def send(request: dict[str, Any], answer: Callable[[object], None]) -> None:
    """Send a message to all URLs; answer the index of the URL, the service, and why it was not delivered, or ""."""
    logging.getLogger("apprise").setLevel(logging.DEBUG)  # read from the results; there is no other handler
    logging.getLogger("apprise").propagate = False
    timeout_s = request["timeout_s"]
    asset = apprise.AppriseAsset(
        app_id="ddptrain", app_desc="ddptrain", default_service_retry=request["retries"], default_service_wait=_PAUSE_S
    )
    found = [(index, target) for index, url in enumerate(request["urls"]) for target in targets(url, asset)]
    started = time.monotonic()
    threads = []
    for index, target in found:
        if isinstance(target, str):
            answer([index, "", target])
            continue
        thread = threading.Thread(target=_send, args=(target, request, index, answer), daemon=True)
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join(max(0.0, started + timeout_s + _END_GRACE_S - time.monotonic()))


def targets(url: str, asset: apprise.AppriseAsset) -> list[apprise.NotifyBase | str]:
    """Return the services that the text names, or why there are none."""
    with apprise.LogCapture(level=logging.WARNING, fmt="%(message)s") as log:  # type: ignore[no-untyped-call]
        services = apprise.Apprise(asset=asset)
        is_added = services.add(url)
        lines = log.getvalue().strip().splitlines()
    bad = [] if is_added else [f"Apprise does not accept the URL{f': {lines[0]}' if lines else ''}"]
    return [*services, *bad]


def _send(service: Any, request: dict[str, Any], index: int, answer: Any) -> None:
    """Send to one service. Its server may use half of the time, unless the URL says otherwise (rto, cto)."""
    scheme = service.url(privacy=True).partition("://")[0]
    try:
        half = request["timeout_s"] / 2
        service.socket_read_timeout = max(service.socket_read_timeout, half)
        service.socket_connect_timeout = max(service.socket_connect_timeout, half)
        result = apprise.Apprise(service, asset=service.asset).notify(
            title=request["title"],
            body=request["body"],
            body_format=apprise.NotifyFormat.MARKDOWN,
            notify_type=request["kind"],
            timeout=request["timeout_s"],
            log_level=logging.DEBUG,
        )
        answer([index, scheme, "" if result else problem_of(result, request["timeout_s"])])
    except Exception as error:  # a plugin may raise anything; the other targets get their message
        answer([index, scheme, f"{type(error).__name__}: {error}"])


def problem_of(result: apprise.AppriseResult, timeout_s: float) -> str:
    """Return why a message was not delivered: what Apprise says, and the cause that it logs for developers."""
    if any(each.status == _TIMEOUT for each in result.results):
        return f"no answer within {timeout_s:g} s"
    logs = [entry for each in result.results for entry in each.logs()]
    problems = [entry.message for entry in logs if entry.level in ("WARNING", "ERROR")]
    problems = [text for text in problems if not _NO_TIME_LEFT.search(text)] or problems  # of a repetition
    causes = [found for entry in logs if entry.level == "DEBUG" and (found := _CAUSE.search(entry.message))]
    cause = " ".join(filter(None, causes[-1].groups())).strip() if causes else ""
    last = problems[-1].rstrip(".") if problems else ""
    text = f"{last} ({cause})" if last and cause and cause not in last else last or cause
    return text or "the service gave no reason"
