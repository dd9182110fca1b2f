"""Finds W&B's API key and server where wandb looks for them, without importing wandb, which takes seconds."""

from __future__ import annotations

import configparser
import netrc
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from ddptrain.redact import hide_credentials

KEY = "WANDB_API_KEY"
TOKEN_FILE = "WANDB_IDENTITY_TOKEN_FILE"  # noqa: S105  # the name of a variable, not a password
BASE_URL = "WANDB_BASE_URL"
_MAX_REASON = 300  # characters of an error message
# The addresses of the public service; one of them is wandb's default.
_PUBLIC = ("api.forge.coreweave.com", "forge.coreweave.com", "api.wandb.ai")


@dataclass(frozen=True, slots=True)
class Access:
    """How to reach W&B. `key` is "" if there is none; `base_url` is "" for wandb's default.

    `by_token`: a file with an identity token replaces the key.
    """

    key: str = field(default="", repr=False)
    base_url: str = ""
    by_token: bool = False
    mode: str = ""  # from wandb's settings file: online, offline, ...

    @property
    def has_credentials(self) -> bool:
        """Whether there is a key or a token file."""
        return bool(self.key) or self.by_token


def find_access(environ: Mapping[str, str]) -> Access:
    """Search the environment, then ~/.netrc, then wandb's settings file."""
    settings = _settings(environ)
    base_url = environ.get(BASE_URL) or settings.get("base_url", "")
    by_token = bool(environ.get(TOKEN_FILE))
    key = environ.get(KEY, "")
    if not key and not by_token:
        key = _from_netrc(environ, base_url) or settings.get("api_key", "")
    return Access(key.strip(), base_url.strip(), by_token, settings.get("mode", ""))


def access_to(named: str, environ: Mapping[str, str]) -> Access | None:
    """Return the credentials for the server `named` in a run's record (or ""); None if the user has not chosen it.

    A run directory or a store may belong to another user, so `named` must not decide where credentials go. They go to
    the server of the environment or of wandb's settings file, or to a named server that ~/.netrc has a key for.
    """
    chosen = find_access(environ)
    if not named or environ.get(BASE_URL) or _origin(named) == _origin(chosen.base_url):
        return chosen
    in_environment = environ.get(KEY) or environ.get(TOKEN_FILE)
    if not in_environment and _is_private(named) and (key := _from_netrc(environ, named, or_default=False)):
        return Access(key.strip(), named)
    return None if chosen.has_credentials else chosen


def without_credentials(message: str, environ: Mapping[str, str] = {}) -> str:
    """Return an error message of wandb or its server on one line, without credentials."""
    text = " ".join(message.split())
    if key := environ.get(KEY):
        text = text.replace(key, "<left out>")
    return hide_credentials(text)[:_MAX_REASON]


def _origin(url: str) -> tuple[object, ...]:
    """Return a value that is equal for two addresses of one server; "" is wandb's default server."""
    try:
        parts = urlsplit(url.strip())
        if not url or parts.hostname in _PUBLIC:
            return _PUBLIC
        return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        return (url,)


def _is_private(url: str) -> bool:
    """Return whether the connection is encrypted, or stays on this host."""
    scheme, hostname, *_ = (*_origin(url), "")
    return scheme == "https" or hostname in ("127.0.0.1", "::1", "localhost")


def _home(environ: Mapping[str, str]) -> Path:
    return Path(environ["HOME"]) if environ.get("HOME") else Path.home()


def _from_netrc(environ: Mapping[str, str], base_url: str, *, or_default: bool = True) -> str:
    """Return the key for a server; "" if there is none. `or_default` also accepts the entry `default`."""
    home = _home(environ)
    files = [Path(environ["NETRC"]).expanduser()] if environ.get("NETRC") else [home / ".netrc", home / "_netrc"]
    host = urlsplit(base_url).netloc
    hosts = _PUBLIC if not host or host in _PUBLIC else (host,)
    for file in files:
        try:
            if not file.exists():
                continue
            parsed = netrc.netrc(str(file))
        except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
            return ""
        find = parsed.authenticators if or_default else parsed.hosts.get
        logins = (find(host) for host in hosts)
        return next((entry[2] for entry in logins if entry and entry[2]), "")
    return ""


def _settings(environ: Mapping[str, str]) -> dict[str, str]:
    folder = environ.get("WANDB_CONFIG_DIR")
    file = (Path(folder).expanduser() if folder else _home(environ) / ".config" / "wandb") / "settings"
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(file, encoding="utf-8")
        return dict(parser["default"])
    except (OSError, configparser.Error, KeyError, UnicodeDecodeError):
        return {}
