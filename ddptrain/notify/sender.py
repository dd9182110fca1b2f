"""Sends messages with Apprise, in a process of its own.

A process, because Apprise and the services' code block, log and start threads as they like: the process is killed at
the deadline, so that a silent server holds up neither this process nor its end, and what it logs reaches no log of this
process. It gets the URLs on stdin, so that no list of processes shows them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal
from urllib.parse import parse_qsl, unquote, urlsplit

from ddptrain.config.sections.retraining import FROM_ENV
from ddptrain.config.wording import shorten
from ddptrain.errors import one_line
from ddptrain.log import Log
from ddptrain.optional_packages import install_command
from ddptrain.protocol.exec_env import without_working_directory
from ddptrain.redact import hide_credentials, hide_known
from ddptrain.sanitize import sanitized
from ddptrain.text_tables import clean_line

_log = Log(__name__)

TIMEOUT_S = 20.0  # for all messages together
_START_S = 30.0  # for the start of the process and for loading Apprise, about 1 s on an idle machine
_SHORTEST_SECRET = 4
_PROBLEM_CHARS = 300


Kind = Literal["info", "success", "warning", "failure"]


@dataclass(frozen=True, slots=True)
class Message:
    """A title, and a body in Markdown: only bold, code and lists. Apprise converts it to what each service shows."""

    title: str
    body: str
    kind: Kind = "info"


def code(text: str) -> str:
    """Return the text as inline code, so that underscores and stars stay as they are."""
    return "`" + clean_line(text).replace("`", "'") + "`"


@dataclass(frozen=True, slots=True)
class Delivery:
    """What became of a message for one target. No field contains a URL, a token or a password.

    target: the entry of the configuration, with scheme and host, as "env:SLACK_URL (slack)" or
    "notify.urls[0] (json://10.0.0.5:8080)". problem: why it was not delivered, in one line; "" if it was.
    """

    target: str
    problem: str = ""

    @property
    def delivered(self) -> bool:
        """Whether the server has accepted the message."""
        return not self.problem

    @property
    def warning(self) -> str:
        """One line for users; "" if the message was delivered."""
        return f"message not delivered to {self.target}: {self.problem}" if self.problem else ""


def send(
    message: Message,
    urls: Sequence[str],
    *,
    timeout_s: float = TIMEOUT_S,
    retries: int = 3,
    secrets: Iterable[str] = (),
    environ: Mapping[str, str] | None = None,
) -> list[Delivery]:
    """Send the message to all URLs at the same time, and return what became of each. Raises nothing.

    urls: Apprise URLs; env:NAME takes one, or several with commas between them, from a variable of `environ`.
    timeout_s: how long the servers may take in all. retries: for each target; the pause between two is 3 s.
    secrets: texts that the message must not contain, as those of the configuration.
    """
    present = os.environ if environ is None else environ
    names = [url if url.startswith(FROM_ENV) else f"notify.urls[{index}]" for index, url in enumerate(urls)]
    problems = [problem_of_variable(url, present) for url in urls]
    named = [
        (name, from_environment(url, present))
        for name, url, problem in zip(names, urls, problems, strict=True)
        if not problem
    ]
    sent = iter(_send_named(_without(message, secrets), named, timeout_s, retries) if named else ())
    deliveries = [
        delivery
        for name, problem in zip(names, problems, strict=True)
        for delivery in ([Delivery(name, problem)] if problem else next(sent))
    ]
    for delivery in deliveries:
        if delivery.problem:
            _log.warning("message not delivered", target=delivery.target, problem=delivery.problem)
        else:
            _log.info("message delivered", target=delivery.target, title=message.title)
    return deliveries


def missing_variables(urls: Iterable[str | None], environ: Mapping[str, str] | None = None) -> list[str]:
    """Return one line for each URL whose variable is not set: a check before a long training."""
    present = os.environ if environ is None else environ
    found = (problem_of_variable(url, present) for url in urls if url)
    return list(dict.fromkeys(problem for problem in found if problem))


def problem_of_variable(url: str, environ: Mapping[str, str]) -> str:
    """Return what is wrong with the variable that env:NAME means; "" for nothing, and for a URL itself."""
    name = url.removeprefix(FROM_ENV)
    if name == url or environ.get(name, "").strip():
        return ""
    state = "is empty" if name in environ else "is not set"
    return f"the environment variable {name} {state}; it should contain a URL"


def from_environment(url: str, environ: Mapping[str, str]) -> str:
    """Return the URL itself; "" if its variable is missing."""
    return environ.get(url.removeprefix(FROM_ENV), "").strip() if url.startswith(FROM_ENV) else url


def secret_parts(url: str) -> list[str]:
    """Return the parts of a URL that no message may contain, the longest first: all parts except the scheme.

    In the URLs of many services the host is a token as well.
    """
    parts = urlsplit(re.sub(r"^[\w+.-]+://", "x://", url))
    pieces = re.split(r"[/?#@:&=,;\s]+", url.partition("://")[2])
    values = [value for pair in parse_qsl(parts.query) for value in pair]
    found = {url, parts.netloc, parts.path, parts.query, *pieces, *values}
    found |= {unquote(piece) for piece in found}
    return sorted((piece for piece in found if len(piece) >= _SHORTEST_SECRET), key=len, reverse=True)


def _without(message: Message, secrets: Iterable[str]) -> Message:
    known = sorted(secrets, key=len, reverse=True)
    title, body = (hide_credentials(hide_known(each, known)) for each in (message.title, message.body))
    return Message(title, body, message.kind)


def _send_named(message: Message, named: list[tuple[str, str]], timeout_s: float, retries: int) -> list[list[Delivery]]:
    if find_spec("apprise") is None:
        problem = f"the package apprise is not installed: {install_command('notify')}"
        return [[Delivery(name, problem)] for name, _ in named]
    request = {**dataclasses.asdict(message), "urls": named, "timeout_s": timeout_s, "retries": retries}
    command = [sys.executable, "-P", "-W", "ignore", "-m", "ddptrain.notify.sender_process"]
    output, trouble = b"", ""
    try:
        done = subprocess.run(
            command,
            input=json.dumps(request).encode(),
            capture_output=True,
            timeout=timeout_s + _START_S,
            env=without_working_directory(os.environ),
            start_new_session=True,  # Ctrl-C at a terminal would end it before it has answered
            check=False,
        )
        output = done.stdout
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()
        trouble = f"the process that sends it ended with {done.returncode}" + (f": {last[-1]}" if last else "")
    except subprocess.TimeoutExpired as expired:
        output, trouble = (
            expired.stdout or b"",
            f"the process that sends it did not end within {timeout_s + _START_S:g} s",
        )
    except (OSError, ValueError) as error:
        trouble = f"the process that sends it could not be started: {one_line(error)}"
    return _deliveries(output, named, trouble)


def _deliveries(output: bytes, named: list[tuple[str, str]], trouble: str) -> list[list[Delivery]]:
    """Read the lines of the process; an entry without any has failed because of `trouble`."""
    found: dict[int, list[Delivery]] = {}
    for line in output.splitlines():
        try:
            answer = json.loads(line)
            index, delivery = int(answer["index"]), _delivery(answer, named)
        except (ValueError, TypeError, LookupError):
            continue
        found.setdefault(index, []).append(delivery)
    return [found.get(index) or [Delivery(name, _safe(trouble, url))] for index, (name, url) in enumerate(named)]


def _delivery(answer: Mapping[str, Any], named: list[tuple[str, str]]) -> Delivery:
    name, url = named[answer["index"]]
    service, host = str(answer["service"]), str(answer["host"])
    target = f"{name} ({service}{f'://{host}' if host else ''})" if service else name
    problem = "" if answer["delivered"] else _safe(str(answer["problem"]), url, host) or "the service gave no reason"
    return Delivery(sanitized(target), problem)


def _safe(problem: str, url: str, host: str = "") -> str:
    """Return the problem on one line, without any part of the URL except its host."""
    secrets = [part for part in secret_parts(url) if not host or part not in (host, host.rpartition(":")[0])]
    line = " ".join(sanitized(problem).split())
    return shorten(hide_credentials(hide_known(line, secrets)), _PROBLEM_CHARS)
