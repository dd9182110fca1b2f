"""S3, Google Cloud Storage and Azure through obstore, with options named as fsspec names them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddptrain.errors import UsageError
from ddptrain.storage.object_errors import CREDENTIAL_VARIABLE, first_line, store_error
from ddptrain.storage.options import settings_for
from ddptrain.storage.store import (
    OBJECT_STORES,
    Limits,
    Listed,
    Location,
    NoConditionalWrites,
    NotFound,
    Store,
    StoreMissing,
    TooLarge,
    Transient,
    Versioned,
    WriteConflict,
)

if TYPE_CHECKING:
    from obstore.store import AzureStore, GCSStore, S3Store

_PAGE = 1000  # keys; S3 lists as many in one answer
_PART_BYTES = 8 << 20  # of a large object: each part is a request with its own timeout
_MOST_PARTS = 9000  # S3 allows 10,000
_UPLOADS = 4  # parts that are uploaded at a time: they share the bandwidth, and each must end in time


def open_object_store(location: Location, limits: Limits) -> Store:
    """Open a bucket's folder. Raises UsageError for wrong options; StoreMissing for a URL without a bucket."""
    # Imported here: obstore starts threads, which a process must not have if it forks.
    from obstore.store import AzureStore, GCSStore, S3Store

    kind = OBJECT_STORES[location.protocol]
    bucket, _, prefix = location.url.partition("://")[2].partition("/")
    if not bucket:
        raise StoreMissing(f"{location.words} names no bucket; give one like {kind}://bucket/folder")
    user, is_given, _ = bucket.rpartition("@")
    if is_given and (kind != "az" or ":" in user):  # abfs://container@account has no credentials
        by_options = f"{location.options_setting} or " if location.options_setting else ""
        raise UsageError(
            f"{location.words} contains credentials, which {kind}:// does not support: set them in "
            f"{by_options}the environment ({CREDENTIAL_VARIABLE[kind]}, ...)"
        )
    settings = settings_for(location, kind, bucket, limits.connect_timeout_s)
    client = {
        "allow_http": True,
        "timeout": timedelta(seconds=limits.timeout_s),
        "connect_timeout": timedelta(seconds=limits.connect_timeout_s),
        **settings.client,
    }
    retry = {"max_retries": limits.retries, "retry_timeout": timedelta(seconds=limits.patience_s)}
    store: Any = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}[kind]
    try:
        opened = store(
            settings.bucket,
            prefix=prefix or None,
            client_options=client,
            retry_config=retry,
            credential_provider=settings.credentials,
            **settings.store,
        )
    except Exception as error:  # obstore's own errors, or a ValueError
        raise UsageError(f"{location.words} can't be opened: {first_line(str(error))}; {location.advice}") from None
    return ObjectStore(location, opened, limits)


class ObjectStore(Store):
    """A folder of a bucket."""

    def __init__(self, location: Location, store: S3Store | GCSStore | AzureStore, limits: Limits) -> None:
        super().__init__(location)
        self._store = store
        self._limits = limits

    def listing(self, folder: str = "") -> Iterator[Listed]:
        """See Store."""
        last: str | None = None
        broken = 0
        while True:
            try:
                for page in self._store.list(f"{folder}/" if folder else None, chunk_size=_PAGE, offset=last):
                    yield from (Listed(item["path"], item["size"], _version(item)) for item in page)
                    last = page[-1]["path"] if page else last
            except Exception as error:  # obstore has its own kinds of errors
                broken += 1
                # obstore repeats a request that fails, but not one whose answer breaks off.
                if broken > self._limits.retries or "response body error" not in str(error):
                    raise self._error("listed", "", error) from None
            else:
                return

    def folders(self, folder: str = "") -> list[str]:
        """See Store."""
        try:
            found = self._store.list_with_delimiter(f"{folder}/" if folder else None)["common_prefixes"]
            return sorted(path.rstrip("/").rpartition("/")[2] for path in found)
        except Exception as error:  # as above
            raise self._error("listed", "", error) from None

    def get(self, key: str, *, start: int = 0, limit_bytes: int | None = None) -> bytes:
        """See Store."""
        try:
            found = self._store.get(key, options={"range": {"offset": start}} if start else None)
            if limit_bytes is not None and found.meta["size"] - start > limit_bytes:
                raise self._too_large(key, limit_bytes)
            return bytes(found.bytes())
        except TooLarge:
            raise
        except Exception as error:  # as above
            raise self._error("read", key, error) from None

    def chunks(self, key: str) -> Iterator[bytes]:
        """See Store. Parts of an object that is replaced meanwhile are not mixed: that raises Transient."""
        try:
            found = self._store.get(key)
            size, e_tag = found.meta["size"], found.meta.get("e_tag")
            if size <= _PART_BYTES:
                yield bytes(found.bytes())
                return
            del found  # ends the request for the whole object
            for start in range(0, size, _PART_BYTES):
                part: Any = {"range": (start, min(start + _PART_BYTES, size)), **({"if_match": e_tag} if e_tag else {})}
                yield bytes(self._store.get(key, options=part).bytes())
        except Exception as error:  # as above
            raise self._error("read", key, error) from None

    def put(self, key: str, data: bytes | Path) -> None:
        """See Store. A large file is uploaded in parts."""
        try:
            size_bytes = data.stat().st_size if isinstance(data, Path) else len(data)
            part_bytes = max(_PART_BYTES, size_bytes // _MOST_PARTS + 1)
            self._store.put(key, data, chunk_size=part_bytes, max_concurrency=_UPLOADS)
        except Exception as error:  # as above
            raise self._error("written", key, error) from None

    def delete(self, key: str) -> None:
        """See Store."""
        try:
            self._store.delete(key)
        except Exception as error:  # as above
            raise self._error("deleted", key, error) from None

    def get_versioned(self, key: str) -> Versioned | None:
        """See Store."""
        try:
            found = self._store.get(key)
            written_s = found.meta["last_modified"].timestamp()
            return Versioned(bytes(found.bytes()), _condition(found.meta), written_s)
        except FileNotFoundError:
            return None
        except Exception as error:  # as above
            raise self._error("read", key, error) from None

    def put_versioned(self, key: str, data: bytes, before: Versioned | None) -> Versioned:
        """See Store: If-None-Match and If-Match for S3, the equivalent for the others."""
        from obstore.exceptions import AlreadyExistsError, NotSupportedError, PreconditionError

        mode: Any = "create" if before is None else dict(before.version)
        try:
            return Versioned(data, _condition(self._store.put(key, data, mode=mode)))
        except (AlreadyExistsError, PreconditionError, FileNotFoundError) as error:
            raise WriteConflict(f"{self.location.words}/{key} was written by another process") from error
        except (NotSupportedError, NotImplementedError) as error:
            raise NoConditionalWrites(first_line(str(error))) from error
        except Exception as error:  # as above
            raise self._error("written", key, error) from None

    def test_conditions(self, probe: str) -> float:
        """See Store."""
        try:
            self.put_versioned(probe, b"a test of conditional writes\n", None)
            for before in (None, Versioned(b"", {"e_tag": '"0"', "version": "0"})):
                with suppress(WriteConflict):
                    self.put_versioned(probe, b"", before)
                    raise NoConditionalWrites("the store does not keep their conditions")
            found = self.get_versioned(probe)
            if found is None or found.written_s is None:
                raise NoConditionalWrites("the store does not tell the time")
            return found.written_s
        finally:
            with suppress(Exception):  # an object that stays disturbs nothing
                self._store.delete(probe)

    def _too_large(self, key: str, limit_bytes: int) -> TooLarge:
        return TooLarge(f"{self.location.words}/{key} can't be read: it has more than {limit_bytes:,} bytes")

    def _error(self, action: str, key: str, error: Exception) -> Exception:
        """Return the StoreError for an error of obstore; one that is already a StoreError is kept."""
        if isinstance(error, FileNotFoundError) and key:
            return NotFound(key)
        if type(error).__name__ == "PreconditionError":
            return Transient(f"{self.location.words}/{key} can't be {action}: it was replaced meanwhile")
        return store_error(self.location, action, key, error, self._limits.timeout_s)


def _version(item: Mapping[str, Any]) -> str:
    return str(item.get("version") or item.get("e_tag") or "").strip('"')


def _condition(about: Mapping[str, Any]) -> dict[str, str]:
    return {name: about[name] for name in ("e_tag", "version") if about.get(name)}
