"""Which CI service runs this process, and the annotations that GitHub's log shows."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from ddptrain.errors import UsageError
from ddptrain.sanitize import sanitized

SWITCH = "DDPTRAIN_CI"
_OFF, _AUTO = ("off", "0", "false", "no"), ("", "auto", "on", "1", "true", "yes")


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


def annotation(level: str, message: str, *, title: str = "", file: str = "", line: int = 0) -> str:
    """Return GitHub's command for an annotation; level is error, warning or notice, `line` counts from 1."""
    values = {"file": file, "line": str(line) if file and line > 0 else "", "title": title}
    properties = ",".join(f"{name}={_property(value)}" for name, value in values.items() if value)
    return f"::{level}{' ' if properties else ''}{properties}::{_data(message)}"


def _data(text: str) -> str:
    escaped = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return sanitized(escaped)


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
