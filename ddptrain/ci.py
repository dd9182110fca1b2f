"""Which CI service runs this process, and the commands that its log understands.

GitHub's runner executes lines of a step's output: `::error::text` at the start of a line, and the older `##[error]text`
anywhere in a line. `guard` and `json_guard` change such text in the output of ranks and libraries, so that the runner
does not execute it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from enum import StrEnum

from ddptrain.errors import UsageError
from ddptrain.sanitize import sanitized

SWITCH = "DDPTRAIN_CI"
_MARKER = re.compile(r"(?:^|(?<=[\r\n]))([^\S\r\n]*):(?=:)|##(?=\[)")
_OFF, _AUTO = ("off", "0", "false", "no"), ("", "auto", "on", "1", "true", "yes")
_CONTROL = re.compile(r"[\r\n\x1b]+")


class CiService(StrEnum):
    """The CI services whose log commands are known."""

    NONE = ""
    GITHUB = "github"
    GITLAB = "gitlab"


def ci_service(environ: Mapping[str, str]) -> CiService:
    """Return the service that runs this process; NONE if DDPTRAIN_CI=off. Raises UsageError for an unknown value."""
    switch = environ.get(SWITCH, "").strip().lower()
    if switch in _OFF:
        return CiService.NONE
    if switch not in _AUTO:
        raise UsageError(f'{SWITCH} is "{sanitized(switch[:40])}": set it to off or auto, or unset it')
    if is_github(environ):
        return CiService.GITHUB
    return CiService.GITLAB if environ.get("GITLAB_CI") == "true" else CiService.NONE


def is_github(environ: Mapping[str, str]) -> bool:
    """Return whether GitHub's runner, or one that is compatible, reads the output; DDPTRAIN_CI is ignored."""
    return environ.get("GITHUB_ACTIONS") == "true"


# --- Output that is not ours ---


def guard(environ: Mapping[str, str]) -> Callable[[str], str]:
    """Return a function that makes text safe for GitHub's runner; without such a runner it returns the text unchanged.

    DDPTRAIN_CI=off does not turn this off: the runner executes commands all the same.
    """
    return without_commands if is_github(environ) else _unchanged


def json_guard(environ: Mapping[str, str]) -> Callable[[str], str]:
    """Return a function like that of `guard` for JSON text, which keeps its meaning."""
    return json_without_commands if is_github(environ) else _unchanged


def without_commands(text: str) -> str:
    """Return complete lines in which a space breaks every text that GitHub's runner would execute as a command."""
    if "::" not in text and "##[" not in text:
        return text
    return _MARKER.sub(lambda match: f"{match[0]} ", text)


def json_without_commands(text: str) -> str:
    """Return JSON text in which no string contains `##[` literally."""
    return text.replace("##[", "##\\u005b")


def _unchanged(text: str) -> str:
    return text


# --- Commands ---


def annotation(level: str, message: str, *, title: str = "", file: str = "", line: int = 0) -> str:
    """Return GitHub's command for an annotation; level is error, warning or notice, `line` counts from 1."""
    values = {"file": file, "line": str(line) if file and line > 0 else "", "title": title}
    properties = ",".join(f"{name}={_property(value)}" for name, value in values.items() if value)
    return f"::{level}{' ' if properties else ''}{properties}::{_data(message)}"


def fold_start(service: CiService, title: str, name: str) -> str:
    """Return the line that starts a folded section of the log; `name` is unique in the job: letters, digits and _."""
    if service is CiService.GITHUB:
        return f"::group::{_data(_CONTROL.sub(' ', title))}\n"
    if service is CiService.GITLAB:
        header = sanitized(_CONTROL.sub(" ", title))
        return f"\x1b[0Ksection_start:{time.time():.0f}:{name}[collapsed=true]\r\x1b[0K{header}\n"
    return ""


def fold_end(service: CiService, name: str) -> str:
    """Return the line that ends the section."""
    if service is CiService.GITHUB:
        return "::endgroup::\n"
    return f"\x1b[0Ksection_end:{time.time():.0f}:{name}\r\x1b[0K\n" if service is CiService.GITLAB else ""


def _data(text: str) -> str:
    escaped = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return sanitized(escaped)


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
