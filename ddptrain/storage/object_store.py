"""S3, Google Cloud Storage and Azure through obstore, with options named as fsspec names them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ddptrain.errors import UsageError
from ddptrain.storage.base import (
    OBJECT_STORES,
    Listed,
    Location,
    NotFound,
    Patience,
    Store,
    StoreError,
    StoreForbidden,
    StoreMissing,
    StoreUnreachable,
    Transient,
)
from ddptrain.storage.options import settings_for

if TYPE_CHECKING:
    from obstore.store import AzureStore, GCSStore, S3Store

_PAGE = 1000  # what S3 sends at once

_STATUS = re.compile(r"status code: (\d{3})\b ?([^\n:]*)")
_CODE = re.compile(r"<Code>([^<]{1,80})</Code>")
_MESSAGE = re.compile(r"<Message>([^<]{1,300})</Message>")
_OS_MESSAGE = re.compile(r'(?:message|error): "((?:[^"\\]|\\.){1,200})"')
_KIND = re.compile(r"\bkind: (Connect|Timeout|Interrupted|Request|Decode)\b|\b(TimedOut)\b")
_KEPT_WAITING = {"RequestTimeout", "SlowDown", "InternalError"}  # S3 says the first with 400
_TRIES = re.compile(r"after (\d+) retries")
_VARIABLE = {"s3": "AWS_ACCESS_KEY_ID", "gs": "GOOGLE_APPLICATION_CREDENTIALS", "az": "AZURE_STORAGE_ACCOUNT_KEY"}
_METADATA = ("169.254.169.254", "169.254.170.2", "metadata.google.internal")  # asked where no credentials are given


def open_object_store(location: Location, patience: Patience) -> Store:
    """Raises: UsageError for options that do not do; StoreMissing for a URL without a bucket."""
    return _ObjectStore(location, _opened(location, patience), patience)


def _opened(location: Location, patience: Patience) -> S3Store | GCSStore | AzureStore:
    # Here, not above: it starts threads, which no process may have that is forked afterwards.
    from obstore.store import AzureStore, GCSStore, S3Store

    kind = OBJECT_STORES[location.protocol]
    bucket, _, prefix = location.url.partition("://")[2].partition("/")
    if not bucket:
        raise StoreMissing(f"{location.words} names no bucket; give one like {kind}://bucket/folder")
    user, is_given, _ = bucket.rpartition("@")
    if is_given and (kind != "az" or ":" in user):  # abfs://container@account is none
        raise UsageError(
            f"{location.words} has credentials in it, which no address of {kind}:// can: give them by "
            f"params.source_options, or by the environment ({_VARIABLE[kind]}, ...)"
        )
    settings = settings_for(location, kind, bucket, patience.connect_timeout_s)
    client = {
        "allow_http": True,
        "timeout": timedelta(seconds=patience.timeout_s),
        "connect_timeout": timedelta(seconds=patience.connect_timeout_s),
        **settings.client,
    }
    retry = {"max_retries": patience.retries, "retry_timeout": timedelta(seconds=patience.patience_s)}
    store: Any = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}[kind]
    try:
        opened: S3Store | GCSStore | AzureStore = store(
            settings.bucket,
            prefix=prefix or None,
            client_options=client,
            retry_config=retry,
            credential_provider=settings.credentials,
            **settings.store,
        )
    except Exception as error:  # obstore's own errors, or a ValueError
        raise UsageError(f"{location.words} can't be opened: {_brief(str(error))}; see params.source_options") from None
    return opened


class _ObjectStore:
    """A bucket's folder."""

    def __init__(self, location: Location, store: S3Store | GCSStore | AzureStore, patience: Patience) -> None:
        self._location = location
        self._store = store
        self._patience = patience

    def listing(self) -> Iterator[Listed]:
        """Every object below the folder. Raises StoreMissing, StoreForbidden, StoreUnreachable, StoreError."""
        last: str | None = None
        broken = 0
        while True:
            try:
                for page in self._store.list(chunk_size=_PAGE, offset=last):
                    yield from (Listed(item["path"], item["size"], _version(item)) for item in page)
                    last = page[-1]["path"] if page else last
            except Exception as error:  # of its own kinds, or of Python's
                broken += 1
                # obstore repeats a request that fails, but not one whose answer breaks off.
                if broken > self._patience.retries or "response body error" not in str(error):
                    raise listing_error(self._location, error, self._patience.timeout_s) from None
            else:
                return

    def get(self, key: str) -> bytes:
        """An object as a whole. Raises NotFound, Transient, StoreForbidden, StoreError."""
        try:
            return bytes(self._store.get(key).bytes())
        except FileNotFoundError:
            raise NotFound(key) from None
        except Exception as error:  # as above
            raise get_error(self._location, key, error, self._patience.timeout_s) from None


def _version(item: Mapping[str, Any]) -> str:
    return str(item.get("version") or item.get("e_tag") or "").strip('"')


# --- what an error of obstore means ---


def listing_error(location: Location, error: Exception, timeout_s: float) -> StoreError:
    """The error of a listing in one line that names the location, and nothing secret."""
    text, where = str(error), location.words
    status, why = _status(text), _why(text, timeout_s)
    kind = OBJECT_STORES.get(location.protocol, "s3")
    if any(host in text for host in _METADATA) and status != 200:
        return StoreForbidden(
            f"{where} can't be listed: there are no credentials; set params.source_options to {{anon: true}} for a "
            f"public one, or to your own, or set the store's variables in the environment ({_VARIABLE[kind]}, ...)"
        )
    if status == 404 or isinstance(error, FileNotFoundError):
        return StoreMissing(f"{where} does not exist ({why}): see params.source and its endpoint")
    if status in {301, 307, 308} or "redirect" in text:
        return StoreForbidden(f"{where} is in another region ({why}): set params.source_options.region")
    if _is_refused(status, text, error):
        return StoreForbidden(f"{where} can't be listed: the store refuses it ({why}): see params.source_options")
    return StoreUnreachable(f"{where} can't be listed: {why}: is its endpoint right, and up?")


def get_error(location: Location, key: str, error: Exception, timeout_s: float) -> StoreError:
    """The error of one object, and whether another try may help."""
    text = str(error)
    status, why = _status(text), _why(text, timeout_s)
    if status == 404:
        return NotFound(key)
    if _is_refused(status, text, error):
        return StoreForbidden(f"{location.words}/{key} can't be read: the store refuses it ({why})")
    return Transient(f"{location.words}/{key}: {why}")


def _is_refused(status: int, text: str, error: Exception) -> bool:
    code = _CODE.search(text)
    if code and code[1] in _KEPT_WAITING:
        return False
    named = type(error).__name__ in {"PermissionDeniedError", "UnauthenticatedError"}
    return named or (400 <= status < 500 and status not in {408, 425, 429})


def _status(text: str) -> int:
    found = _STATUS.search(text)
    return int(found[1]) if found else 0


def _why(text: str, timeout_s: float) -> str:
    """What happened in a few words; never the request's address, whose query may hold a signature."""
    if found := _STATUS.search(text):
        code, message = _CODE.search(text), _MESSAGE.search(text)
        said = ": ".join(part[1] for part in (code, message) if part) or found[2].strip()
        return f"{found[1]} {said}".strip()
    kinds = {part for match in _KIND.findall(text) for part in match if part}
    retries = _TRIES.search(text)
    tried = f", tried {int(retries[1]) + 1} times" if retries and retries[1] != "0" else ""
    if kinds & {"Timeout", "TimedOut"}:
        return f"it did not answer within {timeout_s:g} s{tried}"
    detail = _OS_MESSAGE.search(text)
    words = "no connection" if "Connect" in kinds else "the connection broke" if kinds else _brief(text)
    return (f"{words} ({detail[1]})" if detail and kinds else words) + tried


def _brief(text: str) -> str:
    """The first line of a message, without addresses."""
    line = text.strip().partition("\n")[0]
    return re.sub(r"\b[a-z]+://\S+", "...", line)[:200]
