"""Where W&B's key and address come from, as wandb itself looks for them; wandb is not imported for that."""

from __future__ import annotations

import configparser
import netrc
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

KEY = "WANDB_API_KEY"
TOKEN_FILE = "WANDB_IDENTITY_TOKEN_FILE"  # noqa: S105  # a name; it stands for a key
BASE_URL = "WANDB_BASE_URL"
# The addresses of the public service, which are one; wandb's own default is among them.
_PUBLIC = ("api.forge.coreweave.com", "forge.coreweave.com", "api.wandb.ai")


@dataclass(frozen=True, slots=True)
class Access:
    """How to reach W&B: `key` is "" where there is none, `base_url` "" for wandb's own default.

    `by_token` says that a file with a token takes the place of the key.
    """

    key: str = field(default="", repr=False)
    base_url: str = ""
    by_token: bool = False
    mode: str = ""  # of wandb's settings file: online, offline, ...

    @property
    def is_there(self) -> bool:
        """Whether somebody is known to the server."""
        return bool(self.key) or self.by_token


def find_access(environ: Mapping[str, str]) -> Access:
    """The environment says it, or else ~/.netrc, or else wandb's settings file."""
    settings = _settings(environ)
    base_url = environ.get(BASE_URL) or settings.get("base_url", "")
    by_token = bool(environ.get(TOKEN_FILE))
    key = environ.get(KEY, "")
    if not key and not by_token:
        key = _from_netrc(environ, base_url) or settings.get("api_key", "")
    return Access(key.strip(), base_url.strip(), by_token, settings.get("mode", ""))


def _home(environ: Mapping[str, str]) -> Path:
    return Path(environ["HOME"]) if environ.get("HOME") else Path.home()


def _from_netrc(environ: Mapping[str, str], base_url: str) -> str:
    home = _home(environ)
    files = [Path(environ["NETRC"]).expanduser()] if environ.get("NETRC") else [home / ".netrc", home / "_netrc"]
    host = urlsplit(base_url).netloc
    hosts = _PUBLIC if not host or host in _PUBLIC else (host,)
    for file in files:
        try:
            if not file.exists():
                continue
            known = netrc.netrc(str(file))
        except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
            return ""
        found = (known.authenticators(host) for host in hosts)
        return next((entry[2] for entry in found if entry and entry[2]), "")
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
