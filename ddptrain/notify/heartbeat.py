"""Reports the start, progress and end of a retraining to a check server, by the protocol of healthchecks.io.

    POST URL/start?rid=ID     start
    POST URL/log?rid=ID       progress; the body contains the newest lines
    POST URL?rid=ID           success
    POST URL/7?rid=ID         end with exit status 7
    POST URL/fail?rid=ID      failure without an exit status

The server reports a check that fails, or that is silent for longer than its period and grace time.
"""

from __future__ import annotations

import base64
import os
import queue
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

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
_MAX_STATUS = 255
_PASSING = (408, 425, 429)  # besides 5xx: the server may take the request later
_SILENT = "the server does not answer"
_REFUSED = (b"OK (not found)", b"OK (rate limited)")  # healthchecks.io answers so with the status 200
_SHORTEST_TOKEN = 12  # shorter parts of the URL, as the host, may occur in any text


@dataclass(frozen=True, slots=True)
class _Ping:
    suffix: str  # "start", "log", "fail", an exit status, or "" for success
    body: str
    deadline: float  # by time.monotonic()
    is_last: bool


class Heartbeat:
    """The check of one retraining; a thread of its own sends, so that no server delays anything. Raises nothing.

    The thread is a daemon: a process that ends does not wait for a silent server.
    """

    def __init__(
        self,
        url: str | None,
        *,
        timeout_s: float = 20.0,
        interval_s: float = 300.0,
        secrets: Iterable[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """`url` may be env:NAME; with None nothing is sent.

        timeout_s: how long one message may take with all repetitions. interval_s: the time between two messages about
        progress. secrets: texts that no message may contain.
        """
        present = os.environ if environ is None else environ
        self._url = from_environment(url, present) if url else ""
        self._name = url if url and url.startswith(FROM_ENV) else "notify.heartbeat"
        self._timeout_s, self._interval_s = timeout_s, interval_s
        self._secrets = _longest_first(secrets)
        self._run_id = str(uuid.uuid4())
        self._pings: queue.SimpleQueue[_Ping] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._progress = ""
        self._ending = threading.Event()
        self._ended = threading.Event()
        self._problems: list[str] = []
        problem = (problem_of_variable(url, present) or _problem_of(self._url)) if url else ""
        if problem:
            self._url = ""
            self._warn(problem)

    @property
    def target(self) -> str:
        """The entry of the configuration with scheme and host, without secrets."""
        return f"{self._name} ({_origin(urlsplit(self._url))})" if self._url else self._name

    @property
    def problems(self) -> list[str]:
        """Which messages were not delivered and why, one line each, without secrets."""
        with self._lock:
            return list(self._problems)

    @property
    def warnings(self) -> list[str]:
        """The problems as lines for users."""
        return [f"heartbeat not delivered to {self.target}: {problem}" for problem in self.problems]

    def begin(self) -> None:
        """Send the start message in the thread; return at once."""
        self._put("start", "")

    def progress(self, text: str) -> None:
        """Add lines about the progress of the training; return at once.

        Every `interval_s`, the newest 10 kB of what was added since are sent.
        """
        if self._url and not self._ending.is_set():
            with self._lock:
                self._progress = _newest(f"{self._progress}\n{text}" if self._progress else text)

    def log(self, text: str) -> list[str]:
        """Like `end`, but the last message does not change the state of the check."""
        return self._finish("log", text)

    def end(self, exit_code: int | None, text: str = "") -> list[str]:
        """Send the end, wait until it is sent, at most `timeout_s`, and return the warnings.

        exit_code: 0 for success, None for a failure without an exit code. text: the body, as the reason.
        """
        if exit_code is not None and not 0 <= exit_code <= _MAX_STATUS:
            exit_code = None
        suffix = "fail" if exit_code is None else str(exit_code) if exit_code else ""
        return self._finish(suffix, text)

    def _finish(self, suffix: str, text: str) -> list[str]:
        if self._url and not self._ending.is_set():
            self._ending.set()
            self._put(suffix, text, is_last=True)
            if not self._ended.wait(self._timeout_s + 1):
                self._warn(_SILENT)
        return self.warnings

    def _put(self, suffix: str, text: str, *, is_last: bool = False) -> None:
        if not self._url:
            return
        self._pings.put(_Ping(suffix, self._body(text), time.monotonic() + self._timeout_s, is_last))
        if self._thread is None:
            self._thread = threading.Thread(target=self._send_all, name="ddptrain-heartbeat", daemon=True)
            self._thread.start()

    def _body(self, text: str) -> str:
        tokens = [
            part for part in secret_parts(self._url) if len(part) >= _SHORTEST_TOKEN and part not in self._hosts()
        ]
        return _newest(hide_credentials(hide_known(sanitized(text), _longest_first([*self._secrets, *tokens]))))

    def _hosts(self) -> tuple[str, str]:
        parts = urlsplit(self._url)
        return parts.hostname or "", parts.netloc.rpartition("@")[2]

    def _send_all(self) -> None:
        """Send messages in their order, and progress once in an interval, until the last message is sent."""
        next_progress = time.monotonic() + self._interval_s
        ping = None
        while ping is None or not ping.is_last:
            try:
                ping = self._pings.get(timeout=max(0.0, next_progress - time.monotonic()))
            except queue.Empty:
                next_progress = time.monotonic() + self._interval_s
                with self._lock:
                    text, self._progress = self._progress, ""
                if text:
                    self._put("log", text)
                continue
            try:
                problem = self._send(ping)
            except Exception as error:  # no error here may end the retraining
                problem = f"{type(error).__name__}: {error}"
            what = ping.suffix or "success"
            if problem:
                self._warn(f"{what}: {problem}")
            else:
                _log.info("heartbeat sent", target=self.target, kind=what)
        self._ended.set()

    def _send(self, ping: _Ping) -> str:
        """Send one message, and repeat it after temporary failures. Return why it was not delivered, or "".

        Once the last message waits, the others are not repeated.
        """
        url = ping_url(self._url, ping.suffix, self._run_id)
        for pause_s in (*_PAUSES_S, None):
            problem, may_pass = _post(url, ping.body, min(_ATTEMPT_S, max(0.1, ping.deadline - time.monotonic())))
            left_s = ping.deadline - time.monotonic()
            if not problem or not may_pass or pause_s is None or pause_s >= left_s:
                return problem
            if ping.is_last:
                time.sleep(pause_s)
            elif self._ending.wait(pause_s):
                return problem
        return ""

    def _warn(self, problem: str) -> None:
        secrets = _longest_first([*self._secrets, *secret_parts(self._url)])
        hidden = hide_known(problem, [secret for secret in secrets if secret not in self._hosts()])
        line = " ".join(sanitized(hide_credentials(hidden)).split())
        with self._lock:
            self._problems.append(line)
        _log.warning("heartbeat not delivered", target=self.target, problem=line)


def ping_url(url: str, suffix: str, run_id: str) -> str:
    """Return the URL of one message: `suffix` follows the path, the id of the run joins the query."""
    parts = urlsplit(url)
    path = parts.path.rstrip("/") + (f"/{suffix}" if suffix else "")
    query = urlencode([*parse_qsl(parts.query, keep_blank_values=True), ("rid", run_id)])
    return parts._replace(path=path, query=query, fragment="").geturl()


def _post(url: str, body: str, timeout_s: float) -> tuple[str, bool]:
    """Send a request. Returns why it failed, "" if it did not, and whether another attempt may succeed."""
    address, authorization = _split_user(urlsplit(url))
    headers = {"User-Agent": "ddptrain", "Content-Type": "text/plain; charset=utf-8"}
    request = urllib.request.Request(address, body.encode(), headers)
    request.unredirected_hdrs.update(authorization)  # urllib would send other headers to any server it is redirected to
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            answer = response.read(100).strip()
        return f"the server answered {answer.decode()}" if answer in _REFUSED else "", answer == _REFUSED[1]
    except urllib.error.HTTPError as error:
        error.close()
        return f"the server answered {error.code} {error.reason}", error.code >= 500 or error.code in _PASSING
    except TimeoutError:
        return _SILENT, True
    except urllib.error.URLError as error:
        is_timeout = isinstance(error.reason, TimeoutError)
        return _SILENT if is_timeout else _describe(error.reason), True
    except (OSError, HTTPException, ValueError) as error:
        return _describe(error), not isinstance(error, ValueError)


def _split_user(parts: SplitResult) -> tuple[str, dict[str, str]]:
    """Return the URL without user and password, and the header that contains them: urllib takes them only so."""
    if parts.username is None:
        return parts.geturl(), {}
    user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    header = {"Authorization": f"Basic {base64.b64encode(user.encode()).decode()}"}
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl(), header


def _describe(error: BaseException | str) -> str:
    return getattr(error, "strerror", None) or one_line(error)


def _problem_of(url: str) -> str:
    """Return what is wrong with a URL, "" for nothing; it does not show the URL."""
    try:
        parts = urlsplit(url)
        is_web = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_web = False
    return "" if is_web else "it is not a URL that begins with https:// or http://"


def _origin(parts: SplitResult) -> str:
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _longest_first(texts: Iterable[str]) -> list[str]:
    return sorted(set(texts), key=len, reverse=True)


def _newest(text: str) -> str:
    """Return the last 10 kB of the text, from the start of a line if there is one."""
    data = text.encode("utf-8", "replace")
    if len(data) <= BODY_BYTES:
        return text
    cut = data[-BODY_BYTES:].decode("utf-8", "ignore")
    return cut.partition("\n")[2] or cut
