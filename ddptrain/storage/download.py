"""One file from a URL to this host's disk, once for all of its ranks and runs."""

from __future__ import annotations

import fcntl
import glob
import hashlib
import http.client
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ddptrain.errors import UsageError
from ddptrain.redact import hide_credentials
from ddptrain.storage.base import Location, StoreError, StoreUnreachable, Transient, open_store

_TRIES = 3
_TIMEOUT_S = 30.0  # without a byte
_PAUSE_S = 1.0  # after the first failure; more after the next
_POLL_S = 0.2
_LEFT_S = 3600.0  # without a byte: nobody writes to it any more
_CHUNK_BYTES = 1 << 20
_MOST_BYTES = 32 << 30  # no weights of an image classifier are larger: it is another file, or never ends
_DEADLINE_S = 4 * 3600.0  # for all tries together; a server that sends a byte now and then never times out
_PASSES = {407, 408, 425, 429}  # a proxy's word, or one of a server that is busy
_HASH_IN_NAME = re.compile(r"-([0-9a-f]{8,64})\.")

Progress = Callable[[float, float | None], None]  # megabytes done, and of how many


class CannotFetch(UsageError):
    """A file can't be had from its URL."""


class NotReached(CannotFetch):
    """Nobody has said that there is no such file: from another host, or later, it may be had."""


def is_url(where: str) -> bool:
    """Whether it is a URL, not a path."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", where) is not None


def fetch_file(
    url: str,
    path: Path,
    options: Mapping[str, Any],
    *,
    progress: Progress,
    tell: Callable[[str], None],
    check_name: bool = False,
) -> Path:
    """`path`, which holds what the URL does: downloaded, unless it is there.

    Whoever else wants it waits. At most 32 GiB are fetched, within 4 hours. With `check_name` the content's SHA-256
    must begin as the name says, as in resnet50-11ad3fa6.pth. `progress` is called all the while.

    Raises: CannotFetch; NotReached.
    """
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path.with_name(f".{path.name}.lock"), progress):
            if not path.exists():
                _sweep(path)
                tell(f"fetching {hide_credentials(url)} to {path}")
                _download(url, path, options, progress, _digest_of(path.name) if check_name else "")
    except (OSError, http.client.HTTPException) as error:
        kind = CannotFetch if _is_final(error) else NotReached
        raise kind(f"can't fetch {hide_credentials(url)} to {path}: {_reason(error)}") from None
    return path


@contextmanager
def _alone(lock: Path, progress: Progress) -> Iterator[None]:
    """For a block that one process of the host runs at a time; the others say that they are alive."""
    with lock.open("w") as file:
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            progress(0, None)
            time.sleep(_POLL_S)
        yield


def _download(url: str, path: Path, options: Mapping[str, Any], progress: Progress, digest: str) -> None:
    """Writes it beside, then renames: nobody sees a part of it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    deadline = time.monotonic() + _DEADLINE_S
    try:
        for attempt in range(1, _TRIES + 1):
            try:
                found = _write(url, beside, options, progress, deadline)
                break
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, urllib.error.HTTPError):
                    error.close()  # it is an answer, with a connection
                if attempt == _TRIES or _is_final(error):
                    raise
                time.sleep(attempt * _PAUSE_S)
        if not found.startswith(digest):
            raise CannotFetch(f"{hide_credentials(url)} is damaged: its SHA-256 is {found[:16]}..., not {digest}...")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _sweep(path: Path) -> None:
    """Delete what processes that were killed have left of it; another host's would be newer."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _LEFT_S:
                left.unlink()


def _write(url: str, beside: Path, options: Mapping[str, Any], progress: Progress, deadline: float) -> str:
    """What the URL holds, into a file; returns its SHA-256 in hex."""
    digest = hashlib.sha256()
    with beside.open("wb") as file:
        for chunk in _chunks(url, options, progress, deadline):
            digest.update(chunk)
            file.write(chunk)
    return digest.hexdigest()


def _chunks(url: str, options: Mapping[str, Any], progress: Progress, deadline: float) -> Iterator[bytes]:
    if urlsplit(url).scheme.lower() not in ("http", "https"):
        yield _whole(url, options)
        return
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
        total, done = _announced(answer.headers.get("Content-Length")), 0
        _refuse_too_large(url, total)
        while chunk := answer.read1(_CHUNK_BYTES):  # one read of the socket: read() waits until it has them all
            yield chunk
            done += len(chunk)
            _refuse_too_large(url, done)
            progress(done / 1e6, total / 1e6 if total else None)
            if time.monotonic() > deadline:
                raise NotReached(
                    f"can't fetch {hide_credentials(url)}: after {_DEADLINE_S:g} s there are {done:,} bytes of "
                    f"{f'{total:,}' if total else 'an unknown number'}: is the server too slow?"
                )
    if total and done != total:
        raise ConnectionError(f"it ended after {done:,} of {total:,} bytes")


def _announced(length: str | None) -> int:
    """The Content-Length; 0 where there is none, or where it is no number."""
    text = (length or "").strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0


def _refuse_too_large(url: str, size_bytes: int) -> None:
    if size_bytes > _MOST_BYTES:
        raise CannotFetch(
            f"can't fetch {hide_credentials(url)}: it has more than {_MOST_BYTES:,} bytes; is it the right file?"
        )


def _whole(url: str, options: Mapping[str, Any]) -> bytes:
    parent, _, name = url.rpartition("/")
    try:
        return open_store(Location(parent, options), timeout_s=600.0).get(name)
    except (Transient, StoreUnreachable) as error:
        raise ConnectionError(str(error)) from None
    except (StoreError, UsageError) as error:
        why = str(error).removeprefix("params.source ")  # it is not the images' store
        raise CannotFetch(f"can't fetch {hide_credentials(url)}: {why}") from None


def _digest_of(name: str) -> str:
    found = _HASH_IN_NAME.search(name)
    return found[1] if found else ""


def _is_final(error: Exception) -> bool:
    """Whether a server has said that it has no such file, or not for us."""
    return isinstance(error, urllib.error.HTTPError) and error.code < 500 and error.code not in _PASSES


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answers {error.code} {error.reason}"
    return str(getattr(error, "reason", "") or error)
