"""Downloads one large file, weights of torchvision, to this host's disk, once for all of its ranks and runs."""

from __future__ import annotations

import glob
import http.client
import os
import re
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ddptrain import file_ops
from ddptrain.errors import UsageError
from ddptrain.log import Log

_log = Log(__name__)
_TRIES = 3
_TIMEOUT_S = 30.0  # without a byte
_PAUSE_S = 1.0  # after the first failure; more after the next
_POLL_S = 0.2
_ABANDONED_S = 3600.0  # without a byte: no process writes to the file any more
_CHUNK_BYTES = 1 << 20
_MOST_BYTES = 32 << 30  # weights of image classifiers are smaller: a larger file is another one, or never ends
_DEADLINE_S = 4 * 3600.0  # for all attempts together; a server that sends single bytes would never time out
_TRANSIENT_STATUS = {407, 408, 425, 429}  # of a proxy, or a busy server
_HASH_IN_NAME = re.compile(r"-([0-9a-f]{8,64})\.")

Progress = Callable[[float, float | None], None]  # megabytes done, and the total if it is known


class DownloadFailed(UsageError):
    """A file can't be downloaded from its URL."""


def fetch_file(url: str, path: Path, *, progress: Progress, tell: Callable[[str], None]) -> Path:
    """Download an http or https URL to `path`, unless it exists; return `path`. At most 32 GiB, within 4 hours.

    If several processes of this host call this, one downloads and the others wait; `progress` is called meanwhile.
    The content's SHA-256 must begin as the name says, as in resnet50-11ad3fa6.pth.

    Raises DownloadFailed.
    """
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_name(f".{path.name}.lock"), progress):
            if not path.exists():
                _delete_abandoned(path)
                tell(f"fetching {url} to {path}")
                digest = _HASH_IN_NAME.search(path.name)
                _download(url, path, progress, digest[1] if digest else "")
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise DownloadFailed(f"can't fetch {url} to {path}: {_reason(error)}") from None
    return path


@contextmanager
def _locked(lock: Path, progress: Progress) -> Iterator[None]:
    """Hold a lock file for the block; a process that waits reports progress, so that it does not count as hung."""
    descriptor = file_ops.open_regular(lock, file_ops.CREATE)  # others must not hold it, for which reading is enough
    try:
        while not file_ops.try_lock(descriptor):
            progress(0, None)
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _download(url: str, path: Path, progress: Progress, digest: str) -> None:
    """Write a temporary file, check its hash, and rename it."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    deadline = time.monotonic() + _DEADLINE_S
    try:
        for attempt in range(1, _TRIES + 1):
            try:
                digest_found = _write(url, beside, progress, deadline)
                break
            except (OSError, ValueError, http.client.HTTPException) as error:
                if isinstance(error, urllib.error.HTTPError):
                    error.close()  # it is an answer, with a connection
                if attempt == _TRIES or _is_final(error):
                    raise
                beside.unlink(missing_ok=True)
                _log.info("download failed, trying again", url=url, attempt=attempt, error=error)
                time.sleep(attempt * _PAUSE_S)
        if not digest_found.startswith(digest):
            raise DownloadFailed(f"{url} is damaged: its SHA-256 is {digest_found[:16]}..., not {digest}...")
        file_ops.publish(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _delete_abandoned(path: Path) -> None:
    """Delete temporary files of processes that were killed; those of another host that still writes are newer."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _ABANDONED_S:
                left.unlink()


def _write(url: str, beside: Path, progress: Progress, deadline: float) -> str:
    """Write the URL's content into a file; return its SHA-256 in hex."""
    digest, done = file_ops.sha256(), 0
    with os.fdopen(file_ops.open_regular(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "wb") as file:
        for chunk, total in _http_chunks(url):
            digest.update(chunk)
            file.write(chunk)
            done += len(chunk)
            _refuse_too_large(url, done)
            progress(done / 1e6, total / 1e6 if total else None)
            if time.monotonic() > deadline:
                raise DownloadFailed(
                    f"can't fetch {url}: after {_DEADLINE_S:g} s there are {done:,} bytes of "
                    f"{f'{total:,}' if total else 'an unknown number'}: is the server too slow?"
                )
    return digest.hexdigest()


def _http_chunks(url: str) -> Iterator[tuple[bytes, int]]:
    """Yield pieces of the content, each with the total size in bytes, or 0 if it is not known."""
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
        total, done = answer.length or 0, 0
        _refuse_too_large(url, total)
        while chunk := answer.read1(_CHUNK_BYTES):  # read() would wait for the complete chunk
            yield chunk, total
            done += len(chunk)
    if total and done != total:
        raise ConnectionError(f"it ended after {done:,} of {total:,} bytes")


def _refuse_too_large(url: str, size_bytes: int) -> None:
    if size_bytes > _MOST_BYTES:
        raise DownloadFailed(f"can't fetch {url}: it has more than {_MOST_BYTES:,} bytes; is it the right file?")


def _is_final(error: Exception) -> bool:
    """Return whether a server has refused the request, or has no such file, or it is not a URL."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code < 500 and error.code not in _TRANSIENT_STATUS
    return isinstance(error, ValueError | http.client.InvalidURL)  # it is not a URL


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answers {error.code} {' '.join(str(error.reason).split())}"
    return str(getattr(error, "reason", "") or error)
