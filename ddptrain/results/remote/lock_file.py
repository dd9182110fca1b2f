"""The file of a lock in an object store: written only if nobody else has written it since it was read.

S3, Google Cloud Storage and Azure promise that (If-None-Match, If-Match); of a store that does not, LookedAtFile
compares the file before it is written, which leaves a gap.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ddptrain.results.remote.store import Store

_BUCKETS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az"}
_PROBE = b"this file tells what the store can do\n"
_TIMEOUTS = {"timeout": timedelta(seconds=20), "connect_timeout": timedelta(seconds=5), "allow_http": True}
_RETRY = {"max_retries": 2, "retry_timeout": timedelta(seconds=10)}

T = TypeVar("T")


class Changed(Exception):
    """Somebody else has written the file meanwhile."""


class Unconditional(Exception):
    """The store has no conditional writes, or they can't be used; says why."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The file as it was read or written: `mark` names this state of it, `written_s` is when, by the lock's clock."""

    data: bytes
    mark: Mapping[str, str] = field(default_factory=dict)
    written_s: float | None = None


class LockFile(Protocol):
    """The file of a lock, and the clock by which its age is told."""

    def read(self) -> Seen | None:
        """The file; None where there is none. Raises StoreError."""

    def write(self, data: bytes, before: Seen | None) -> Seen:
        """Write it if it is still as it was `before`; None: if there is none. Raises Changed, StoreError."""

    def now(self) -> float:
        """The time in seconds, of the same clock as `written_s`."""


class LookedAtFile:
    """A file in a store without conditional writes; its age is told by the clocks of the hosts."""

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name = store, name

    def read(self) -> Seen | None:
        """See LockFile."""
        data = self._store.read(self._name)
        return None if data is None else Seen(data)

    def write(self, data: bytes, before: Seen | None) -> Seen:
        """See LockFile."""
        if self.read() != (before and Seen(before.data)):
            raise Changed
        self._store.write(self._name, data)
        return Seen(data)

    def now(self) -> float:
        """See LockFile."""
        return time.time()


class ConditionalFile:
    """A file in a store with conditional writes; its age is told by the store's clock."""

    def __init__(self, store: Store, name: str, probe: str) -> None:
        """`probe` is the name of another file, for this process alone. Raises Unconditional."""
        self._store, self._name, self._objects = store, name, _opened(store)
        try:
            self._now = _probed(self._objects, probe)
        except Unconditional:
            raise
        except Exception as error:  # obstore has its own kinds
            raise Unconditional(" ".join(str(error).split())[:200]) from error
        self._asked_s = time.monotonic()

    def now(self) -> float:
        """See LockFile."""
        return self._now + time.monotonic() - self._asked_s

    def read(self) -> Seen | None:
        """See LockFile."""
        return self._store.call("read", self._name, lambda: _read(self._objects, self._name))

    def write(self, data: bytes, before: Seen | None) -> Seen:
        """See LockFile."""
        mark = None if before is None else before.mark
        seen = self._store.call("write", self._name, lambda: _written(self._objects, self._name, data, mark))
        if seen is None:
            raise Changed
        return seen


def open_lock_file(store: Store, name: str, probe: str) -> tuple[LockFile, str]:
    """The best that the store can do, and why that is not a conditional write, or ""."""
    try:
        return ConditionalFile(store, name, probe), ""
    except Unconditional as error:
        return LookedAtFile(store, name), str(error)


def _probed(objects: Any, name: str) -> float:
    """The time that it is in the store, which has been seen to keep conditions. Raises Unconditional, and others."""
    import obstore

    try:
        kept = (
            _written(objects, name, _PROBE, None) is not None
            and _written(objects, name, _PROBE, None) is None
            and _written(objects, name, _PROBE, {"e_tag": '"0"', "version": "0"}) is None
        )
        if not kept:
            raise Unconditional("the store does not keep their conditions")
        return float(obstore.head(objects, name)["last_modified"].timestamp())
    finally:
        with suppress(Exception):  # one that is left is in nobody's way
            obstore.delete(objects, name)


def _read(objects: Any, name: str) -> Seen | None:
    import obstore

    try:
        found = obstore.get(objects, name)
        return Seen(bytes(found.bytes()), _mark(found.meta), found.meta["last_modified"].timestamp())
    except FileNotFoundError:
        return None


def _written(objects: Any, name: str, data: bytes, mark: Mapping[str, str] | None) -> Seen | None:
    """The file once it is written; None if its condition was not met."""
    import obstore
    from obstore.exceptions import AlreadyExistsError, PreconditionError

    try:
        mode: Any = "create" if mark is None else dict(mark)
        return Seen(data, _mark(obstore.put(objects, name, data, mode=mode)))
    except (AlreadyExistsError, PreconditionError, FileNotFoundError):
        return None


def _mark(about: Any) -> dict[str, str]:
    return {name: about[name] for name in ("e_tag", "version") if about.get(name)}


def _opened(store: Store) -> Any:
    """The folder for obstore, with the address and the credentials of its file system. Raises Unconditional."""
    kind = _BUCKETS.get(store.url.partition("://")[0].lower())
    if kind is None:
        raise Unconditional(f"{store.url.partition(':')[0]} has none")
    # Here, not above: it starts threads, which no process may have that is forked afterwards.
    from obstore.store import AzureStore, GCSStore, S3Store

    bucket, _, prefix = store.root.lstrip("/").partition("/")
    options: dict[str, Any] = {"prefix": prefix or None, "retry_config": _RETRY, "client_options": _TIMEOUTS}
    try:
        if kind == "s3":
            return S3Store(bucket, **(options | _of_s3fs(store.fs)))
        return (GCSStore if kind == "gs" else AzureStore)(bucket, **options)
    except Exception as error:  # of obstore, or of whatever finds credentials
        raise Unconditional(" ".join(str(error).split())[:200]) from error


def _of_s3fs(fs: Any) -> dict[str, Any]:
    """What s3fs has found out from its options, the environment and the profiles of AWS."""
    about = fs.s3.meta
    options = {"endpoint": about.endpoint_url, "region": about.region_name or "us-east-1"}
    verify = fs.client_kwargs.get("verify", fs.session.get_config_variable("ca_bundle"))
    client: dict[str, Any] = dict(_TIMEOUTS)
    if verify is False:
        client["allow_invalid_certificates"] = True
    elif isinstance(verify, str):
        client["root_certificate"] = Path(verify).expanduser().read_bytes()
    who = {"skip_signature": True} if fs.anon else {"credential_provider": _credentials(fs)}
    return {**options, "client_options": client, **who}


def _credentials(fs: Any) -> Callable[[], dict[str, Any]]:
    """What obstore asks for the credentials of s3fs."""
    from datetime import UTC, datetime

    from fsspec.asyn import sync

    async def current() -> Any:
        found = await fs.session.get_credentials()
        return await found.get_frozen_credentials()

    def found() -> dict[str, Any]:
        if fs.key and fs.secret:
            who = (fs.key, fs.secret, fs.token)
        else:
            frozen = sync(fs.loop, current)
            who = (frozen.access_key, frozen.secret_key, frozen.token)
        expires_at = datetime.now(UTC) + timedelta(minutes=10)
        return dict(zip(("access_key_id", "secret_access_key", "token"), who, strict=True)) | {"expires_at": expires_at}

    return found
