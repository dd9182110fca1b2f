"""Sends messages with Apprise, in a process of its own (sender_process.py).

So a silent server holds up neither this process nor its end, and what Apprise logs reaches no log of this process.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal, Self
from urllib.parse import parse_qsl, unquote, urlsplit

from ddptrain.config.sections.retraining import FROM_ENV
from ddptrain.config.wording import shorten
from ddptrain.isolated import Isolated
from ddptrain.log import Log
from ddptrain.optional_packages import install_command
from ddptrain.redact import hide_credentials, hide_known
from ddptrain.sanitize import sanitized
from ddptrain.text_tables import clean_line

_log = Log(__name__)

TIMEOUT_S = 20.0  # for all messages together
_START_S = 30.0  # for the start of the process and for loading Apprise, about 1 s on an idle machine
_SHORTEST_SECRET = 4
_PROBLEM_CHARS = 300
_TITLE_CHARS = 120
Kind = Literal["info", "success", "warning", "failure"]


@dataclass(frozen=True, slots=True)
class Message:
    """A title, and a body in Markdown: only bold, code and lists. Apprise converts it to what each service shows."""

    title: str
    body: str
    kind: Kind = "info"

    @classmethod
    def of(
        cls,
        name: str,
        title: str,
        first: str,
        lines: Iterable[str],
        lists: Mapping[str, Iterable[str]] | None = None,
        kind: Kind = "info",
    ) -> Self:
        """Return a message about a run or a model: its name with `first`, lines, and lists with titles.

        The lines, in Markdown, become the items of lists; a list without lines is left out.
        """
        blocks = [f"**{clean_line(name)}**: {first}", "\n".join(f"- {line}" for line in lines)]
        for heading, items in (lists or {}).items():
            if listed := [f"- {item}" for item in items]:
                blocks.append("\n".join([f"**{heading}**", "", *listed]))
        return cls(clean_line(f"{name}: {title}"), "\n\n".join(filter(None, blocks)), kind)


def code(text: str) -> str:
    """Return the text as inline code, so that underscores and stars stay as they are."""
    return "`" + clean_line(text).replace("`", "'") + "`"


def facts(about: Mapping[str, str]) -> list[str]:
    """Return lines as "run: `names-1`" for a message; empty values are left out."""
    return [f"{name}: {code(value)}" for name, value in about.items() if value]


@dataclass(frozen=True, slots=True)
class Delivery:
    """What became of a message for one target. No field contains a URL, a token or a password.

    target: the entry of the configuration, with the scheme, as "env:SLACK_URL (slack)" or "notify.urls[0] (json)".
    problem: why it was not delivered, in one line; "" if it was.
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
) -> list[Delivery]:
    """Send the message to all URLs at the same time, and return what became of each. Raises nothing.

    urls: Apprise URLs; env:NAME takes one, or several with commas between them, from a variable.
    timeout_s: how long the servers may take in all. retries: for each target; the pause between two is 3 s.
    secrets: texts that the message must not contain, as those of the configuration.
    """
    known = sorted(secrets, key=len, reverse=True)
    title, body = (hide_credentials(hide_known(each, known)) for each in (message.title, message.body))
    title = shorten(title, _TITLE_CHARS)  # last: half of a secret would not be known
    named: list[tuple[str, str]] = []
    deliveries: dict[str, list[Delivery]] = {}
    for index, url in enumerate(urls):
        name = url if url.startswith(FROM_ENV) else f"notify.urls[{index}]"
        problem = problem_of_variable(url)
        if not problem and find_spec("apprise") is None:
            problem = f"the package apprise is not installed: {install_command('notify')}"
        deliveries[name] = [Delivery(name, problem)] if problem else []
        if not problem:
            named.append((name, from_environment(url)))
    if named:
        hidden = dataclasses.asdict(Message(title, body, message.kind))
        for delivery_name, delivery in _send_named(hidden, named, timeout_s, retries):
            deliveries[delivery_name].append(delivery)
    found = [delivery for each in deliveries.values() for delivery in each]
    for delivery in found:
        if delivery.problem:
            _log.warning("message not delivered", target=delivery.target, problem=delivery.problem)
        else:
            _log.info("message delivered", target=delivery.target, title=title)
    return found


def missing_variables(urls: Iterable[str]) -> list[str]:
    """Return one line for each URL whose variable is not set: a check before a long training."""
    return list(dict.fromkeys(filter(None, map(problem_of_variable, urls))))


def problem_of_variable(url: str) -> str:
    """Return what is wrong with the variable that env:NAME means; "" for nothing, and for a URL itself."""
    if from_environment(url):
        return ""
    name = url.removeprefix(FROM_ENV)
    state = "is empty" if name in os.environ else "is not set"
    return f"the environment variable {name} {state}; it should contain a URL"


def from_environment(url: str) -> str:
    """Return the URL itself; "" if its variable is missing."""
    return os.environ.get(url.removeprefix(FROM_ENV), "").strip() if url.startswith(FROM_ENV) else url


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


def _send_named(
    message: Mapping[str, Any], named: list[tuple[str, str]], timeout_s: float, retries: int
) -> Iterable[tuple[str, Delivery]]:
    """Yield the name of each entry with what became of a target; an entry may have several targets."""
    request = {**message, "urls": [url for _, url in named], "timeout_s": timeout_s, "retries": retries}
    silent, trouble = dict(named), "there was no answer"
    try:
        with Isolated("ddptrain.notify.sender_process:send", request) as process:
            for index, service, problem in process.answers(timeout_s + _START_S):
                name, url = named[index]
                silent.pop(name, None)
                target = sanitized(f"{name} ({service})" if service else name)
                yield name, Delivery(target, problem and _safe(problem, url))
    except Exception as error:  # of the process or of Apprise; the training goes on
        trouble = str(error).strip().splitlines()[-1] if str(error).strip() else repr(error)
    for name, url in silent.items():
        yield name, Delivery(name, _safe(trouble, url))


def _safe(problem: str, url: str) -> str:
    """Return the problem on one line, without any part of the URL."""
    line = " ".join(sanitized(problem).split())
    return shorten(hide_credentials(hide_known(line, secret_parts(url))), _PROBLEM_CHARS)
