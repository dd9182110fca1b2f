"""Reports the start and the end of a retraining to a check server, by the protocol of healthchecks.io.

    POST URL/start?rid=ID     start
    POST URL/log?rid=ID       an end after which the next start continues; does not change the state of the check
    POST URL?rid=ID           success
    POST URL/7?rid=ID         end with exit status 7
    POST URL/fail?rid=ID      failure without an exit status

The server reports a check that fails, or that is silent for longer than its period and grace time.
"""

from __future__ import annotations

import base64
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterable
from http.client import HTTPException
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from ddptrain.config.sections.retraining import FROM_ENV
from ddptrain.errors import one_line
from ddptrain.log import Log
from ddptrain.notify.sender import from_environment, problem_of_variable, secret_parts
from ddptrain.redact import hide_credentials, hide_known
from ddptrain.sanitize import sanitized

_log = Log(__name__)
BODY_BYTES = 10_000  # what healthchecks.io stored at first, and other servers still do
_PAUSES_S = (1.0, 2.0, 4.0, 8.0)
_ATTEMPT_S = 5.0  # for one request
_PASSING = (408, 425, 429)  # besides 5xx: the server may take the request later
_SILENT = "the server does not answer"
_REFUSED = ("OK (not found)", "OK (rate limited)")  # healthchecks.io answers so with the status 200
_SHORTEST_TOKEN = 8  # shorter parts of the URL may occur in any text


class Heartbeat:
    """The check of one retraining. Raises nothing.

    Threads send, so that no server delays anything. They are daemons: a process that ends does not wait for a server.
    """

    def __init__(self, url: str | None, *, timeout_s: float = 20.0, secrets: Iterable[str] = ()) -> None:
        """`url` may be env:NAME; with None nothing is sent.

        timeout_s: how long one message may take with all repetitions. secrets: texts that no message may contain.
        """
        self._url = from_environment(url) if url else ""
        unusable = _problem_of(self._url)
        parts = urlsplit("" if unusable else self._url)
        host = parts.netloc.rpartition("@")[2]
        tokens = {part for part in secret_parts(self._url) if len(part) >= _SHORTEST_TOKEN}
        self._secrets = sorted({*secrets, *tokens} - {host, str(parts.hostname)}, key=len, reverse=True)
        self._timeout_s, self._rid = timeout_s, str(uuid.uuid4())
        self._last: threading.Thread | None = None  # it sends the latest message
        self._ending = threading.Event()
        self.problems: list[str] = []  # which messages were not delivered and why, one line each, without secrets
        name = url if url and url.startswith(FROM_ENV) else "notify.heartbeat"
        self.target = f"{name} ({parts.scheme}://{host})" if host else name
        if problem := (problem_of_variable(url) or unusable) if url else "":
            self._url = ""
            self._warn(problem)

    @property
    def warnings(self) -> list[str]:
        """The problems as lines for users."""
        return [f"heartbeat not delivered to {self.target}: {problem}" for problem in self.problems]

    def begin(self) -> None:
        """Send the start message; return at once."""
        if self._url:
            self._last = self._sending("start", "")

    def log(self, text: str) -> list[str]:
        """Like `end`, but the last message does not change the state of the check."""
        return self._finish("log", text)

    def end(self, exit_code: int | None, text: str = "") -> list[str]:
        """Send the end, wait until it is sent, at most `timeout_s`, and return the warnings.

        exit_code: 0 for success, None for a failure without an exit code. text: the body, as the reason.
        """
        is_status = exit_code is not None and 0 <= exit_code <= 255
        return self._finish(str(exit_code or "") if is_status else "fail", text)

    def _finish(self, suffix: str, text: str) -> list[str]:
        if self._url and not self._ending.is_set():
            self._ending.set()
            sending = self._sending(suffix, text)
            sending.join(self._timeout_s + 1)
            if sending.is_alive():
                self._warn(_SILENT)
        return self.warnings

    def _sending(self, suffix: str, text: str) -> threading.Thread:
        """Return a thread that sends a message after the one before."""
        before, is_last, body = self._last, self._ending.is_set(), _newest(self._safe(text))

        def send() -> None:
            if before is not None:
                before.join()
            try:
                problem = self._send(suffix, body, is_last=is_last)
            except Exception as error:  # no error here may end the retraining
                problem = f"{type(error).__name__}: {error}"
            if problem:
                self._warn(f"{suffix or 'success'}: {problem}")
            else:
                _log.info("heartbeat sent", target=self.target, kind=suffix or "success")

        thread = threading.Thread(target=send, name="ddptrain-heartbeat", daemon=True)
        thread.start()
        return thread

    def _send(self, suffix: str, body: str, *, is_last: bool) -> str:
        """Send one message, and repeat it after temporary failures. Return why it was not delivered, or "".

        Once the last message waits, the first one is not repeated.
        """
        url, deadline = ping_url(self._url, suffix, self._rid), time.monotonic() + self._timeout_s
        for pause_s in (*_PAUSES_S, None):
            problem, may_pass = _post(url, body, min(_ATTEMPT_S, max(0.1, deadline - time.monotonic())))
            if not problem or not may_pass or pause_s is None or pause_s >= deadline - time.monotonic():
                return problem
            if is_last:
                time.sleep(pause_s)
            elif self._ending.wait(pause_s):
                return problem
        return ""

    def _safe(self, text: str) -> str:
        return hide_credentials(hide_known(sanitized(text), self._secrets))

    def _warn(self, problem: str) -> None:
        line = " ".join(self._safe(problem).split())
        self.problems.append(line)
        _log.warning("heartbeat not delivered", target=self.target, problem=line)


def ping_url(url: str, suffix: str, run_id: str) -> str:
    """Return the URL of one message: `suffix` follows the path, the id of the run joins the query."""
    parts = urlsplit(url)
    path = parts.path.rstrip("/") + (f"/{suffix}" if suffix else "")
    query = urlencode([*parse_qsl(parts.query, keep_blank_values=True), ("rid", run_id)])
    return parts._replace(path=path, query=query, fragment="").geturl()


def _post(url: str, body: str, timeout_s: float) -> tuple[str, bool]:
    """Send a request. Returns why it failed, "" if it did not, and whether another attempt may succeed."""
    parts = urlsplit(url)
    address = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    headers = {"User-Agent": "ddptrain", "Content-Type": "text/plain; charset=utf-8"}
    request = urllib.request.Request(address, body.encode(), headers)
    if parts.username is not None:  # urllib would send other headers to any server it is redirected to
        user = base64.b64encode(f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()).decode()
        request.unredirected_hdrs["Authorization"] = f"Basic {user}"
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            answer = response.read(100).decode("utf-8", "replace").strip()
        return f"the server answered {answer}" if answer in _REFUSED else "", answer == _REFUSED[1]
    except urllib.error.HTTPError as error:
        error.close()
        return f"the server answered {error.code} {error.reason}", error.code >= 500 or error.code in _PASSING
    except (OSError, HTTPException, ValueError) as error:
        cause = getattr(error, "reason", error)  # of a URLError
        if isinstance(cause, TimeoutError):
            return _SILENT, True
        return getattr(cause, "strerror", None) or one_line(cause), not isinstance(error, ValueError)


def _problem_of(url: str) -> str:
    """Return what is wrong with a URL, "" for nothing; it does not show the URL."""
    try:
        parts = urlsplit(url)
        is_web = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_web = False
    return "" if is_web else "it is not a URL that begins with https:// or http://"


def _newest(text: str) -> str:
    """Return the last 10 kB of the text, from the start of a line if there is one."""
    data = text.encode("utf-8", "replace")
    if len(data) <= BODY_BYTES:
        return text
    cut = data[-BODY_BYTES:].decode("utf-8", "ignore")
    return cut.partition("\n")[2] or cut
