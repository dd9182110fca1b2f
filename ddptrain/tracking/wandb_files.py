"""Credentials and files of W&B, for the driver and results; without importing wandb, which takes seconds."""

from __future__ import annotations

import configparser
import json
import netrc
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from ddptrain.file_ops import entries
from ddptrain.redact import hide_credentials

KEY = "WANDB_API_KEY"
TOKEN_FILE = "WANDB_IDENTITY_TOKEN_FILE"  # noqa: S105  # the name of a variable, not a password
BASE_URL = "WANDB_BASE_URL"
_MAX_REASON = 300  # characters of an error message
# The addresses of the public service; one of them is wandb's default.
_PUBLIC = ("api.forge.coreweave.com", "forge.coreweave.com", "api.wandb.ai")
LINKS = "links.json"  # a file beside the parts: the URLs of the runs that `results sync` has sent, by their ids
UNSENT = "unsent"  # a file in the folder of a part; its text is OPEN, SENT or ""
OPEN = "open"  # the run has not ended, or was killed
SENT = "sent"  # the server has everything
SYNCED = ".wandb.synced"  # suffix of a file that wandb creates beside a log that `wandb sync` has sent
SYNC_STATE = ".wandb.syncstate"  # suffix of a file with the step numbers of a log that was sent partly
STATE_FILES = (f"/{UNSENT}", SYNCED, SYNC_STATE)  # suffixes of the paths of files that show whether a part was sent
SENDING = "sending-rank-"  # prefix of a folder beside the parts: checkpoints that are being sent
_NAME = re.compile(r"(?P<offline>offline-)?run-(?P<time>\d{8}_\d{6})-(?P<id>.+)")
_EMPTY_BYTES = 7  # the header of a log
_SHARED = re.compile(r"-(?P<rank>rank_\d+)")


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


# --- the parts of a run on the disk: wandb creates a new folder, a part of the run, each time it opens the run ---


@dataclass(frozen=True, slots=True)
class RunPart:
    """A part of a run: its folder, and the transaction log with everything that was logged."""

    folder: Path
    log: Path
    run_id: str  # in W&B; several parts may continue one run
    began: str
    offline: bool
    rank: str = ""  # the rank that wrote the part, such as rank_1, if ranks share the run

    @property
    def target(self) -> str:
        """The id of the W&B run that the part is sent to.

        A rank's part of a shared run becomes a run of its own: the rows of all ranks have the same step numbers, and
        the server would mix them up.
        """
        return f"{self.run_id}-{self.rank}" if self.rank else self.run_id

    @property
    def sent(self) -> bool:
        """Whether the server has everything."""
        mark = self.mark
        return self.log.with_suffix(SYNCED).exists() or mark == SENT or (mark is None and not self.offline)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to send: the process was killed before anything was written."""
        return self.log.stat().st_size <= _EMPTY_BYTES

    @property
    def mark(self) -> str | None:
        """The text of the file UNSENT; None if it does not exist."""
        try:
            return (self.folder / UNSENT).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return None
        except OSError:
            return ""


def unsent_parts(parts: Sequence[RunPart]) -> list[RunPart]:
    """Return the parts to send.

    A killed online part that a later online part has continued is left out: its rows would be sent twice.
    """
    unsent = (part for part in parts if not part.sent)
    return [part for part in unsent if part.offline or part.mark != OPEN or not _was_continued(part, parts)]


def _was_continued(part: RunPart, parts: Sequence[RunPart]) -> bool:
    of_run = [each for each in parts if each.target == part.target]
    return any(each.sent for each in of_run[of_run.index(part) + 1 :])


def parts_below(folder: Path) -> list[RunPart]:
    """Return the parts in `folder` and in its subfolders, oldest first."""
    outer = entries(folder)
    return _parts([*outer, *(inner for each in outer for inner in entries(each))])


def parts_in(folder: Path) -> list[RunPart]:
    """Return the parts that are direct subfolders of `folder`, oldest first; [] if it cannot be read."""
    return _parts(entries(folder))


def _parts(folders: Sequence[Path]) -> list[RunPart]:
    parts = []
    named = [(folder, match) for folder in folders if (match := _NAME.fullmatch(folder.name))]
    for log, match in ((path, match) for folder, match in named for path in entries(folder)):
        if log.match("run-*.wandb") and log.is_file() and not log.is_symlink():
            run_id = log.stem.removeprefix("run-")
            shared = _SHARED.fullmatch(match["id"].removeprefix(run_id))
            rank = shared["rank"] if shared else ""
            parts.append(RunPart(log.parent, log, run_id, match["time"], match["offline"] is not None, rank))
    return sorted(parts, key=lambda part: (part.began, part.folder.name))


def links_in(folder: Path) -> dict[str, str]:
    """Return the content of the file LINKS in a folder; {} if there is none."""
    try:
        return links_of((folder / LINKS).read_bytes())
    except OSError:
        return {}


def links_of(data: bytes) -> dict[str, str]:
    """Return the content of a file LINKS; {} for other data."""
    try:
        return {str(run_id): str(url) for run_id, url in json.loads(data).items()}
    except (ValueError, AttributeError):
        return {}
