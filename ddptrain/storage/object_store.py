"""S3, Google Cloud Storage and Azure through obstore."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddptrain.config.wording import shorten
from ddptrain.errors import UsageError, one_line
from ddptrain.optional_packages import install_command
from ddptrain.redact import hide_credentials
from ddptrain.storage.store import (
    OBJECT_STORES,
    Limits,
    Listed,
    Location,
    NoConditionalWrites,
    NotFound,
    Store,
    StoreError,
    StoreForbidden,
    StoreMissing,
    StoreUnreachable,
    T,
    Transient,
    Versioned,
    WriteConflict,
)

if TYPE_CHECKING:
    from obstore.store import AzureStore, GCSStore, S3Store

    AnyStore = S3Store | GCSStore | AzureStore

_PAGE = 1000  # keys; S3 lists as many in one answer
_PART_BYTES = 8 << 20  # of a large object: each part is a request with its own timeout
_MOST_PARTS = 9000  # S3 allows 10,000
_UPLOADS = 4  # parts that are uploaded at a time: they share the bandwidth, and each must end in time
CREDENTIAL_VARIABLE = {
    "s3": "AWS_ACCESS_KEY_ID",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_KEY",
}
_METADATA_HOSTS = ("169.254.169.254", "169.254.170.2", "metadata.google.internal")  # asked if no credentials are given
# Of a request that another attempt would not help, but for those that S3 answers so when it is busy.
_REFUSED = re.compile(
    r"status code: 4(?!08|25|29)\d\d\b(?!.*<Code>(?:RequestTimeout|SlowDown|InternalError)<)", re.DOTALL
)
_STATUS = re.compile(
    r"status code: (\d{3})\b ?([^\n:]*)(?:.*<Code>([^<]{1,80})</Code>)?(?:.*<Message>([^<]{1,300})</Message>)?",
    re.DOTALL,
)
_OS_MESSAGE = re.compile(r'(?:message|error): "((?:[^"\\]|\\.){1,200})"')
_ADDRESS = re.compile(r"\b[a-z]+://\S+")
_REGION_HEADER = "x-amz-bucket-region"
_FRESH = timedelta(minutes=5)  # credentials of botocore are used for so long before botocore is asked again
Credentials = dict[str, Any]  # as obstore's S3Credential


LIMITS = Limits(timeout_s=120.0)  # of a folder that is written: four parts of 8 MiB at a time need 280 kB/s
_PAUSES_S = (0.5, 1.0, 2.0, 4.0)


def open_object_store(location: Location, limits: Limits) -> ObjectStore:
    """Open a bucket's folder for reading. Raises UsageError for wrong options; StoreMissing for no bucket."""
    return ObjectStore(location, _open(location, limits), limits)


def open_folder(url: str, limits: Limits = LIMITS) -> ObjectStore:
    """Open the folder of runs or models at that URL; no request is sent yet. Raises UsageError for a wrong URL."""
    scheme, _, rest = url.rstrip("/").partition("://")
    if not rest.strip("/"):
        raise UsageError(f"cannot keep runs in {url}: give a bucket or a folder, as s3://bucket/runs")
    location = Location(f"{scheme.lower()}://{rest}", {}, "results.dir")
    if location.protocol not in OBJECT_STORES:
        raise UsageError(
            f"cannot keep runs or models in {location.description}: give a path, or a bucket of S3, Google Cloud "
            "Storage or Azure, as s3://bucket/runs"
        )
    return ObjectStore(location, _open(location, limits), limits, pauses_s=_PAUSES_S)


def _open(location: Location, limits: Limits) -> AnyStore:
    # Imported here: obstore starts threads, which a process must not have if it forks.
    from obstore.store import AzureStore, GCSStore, S3Store

    kind = OBJECT_STORES[location.protocol]
    bucket, _, prefix = location.url.partition("://")[2].partition("/")
    if not bucket:
        raise StoreMissing(f"{location.description} contains no bucket; use one like {kind}://bucket/folder")
    user, is_given, _ = bucket.rpartition("@")
    if is_given and (kind != "az" or ":" in user):  # abfs://container@account has no credentials
        by_options = f"{location.options_setting} or " if location.options_setting else ""
        raise UsageError(
            f"{location.description} contains credentials, which {kind}:// does not support: set them in "
            f"{by_options}the environment ({CREDENTIAL_VARIABLE[kind]}, ...)"
        )
    bucket, options = settings_for(location, kind, bucket, limits.connect_timeout_s)
    options["client_options"] = {
        "allow_http": True,
        "timeout": timedelta(seconds=limits.timeout_s),
        "connect_timeout": timedelta(seconds=limits.connect_timeout_s),
        **options["client_options"],
    }
    retry = {"max_retries": limits.retries, "retry_timeout": timedelta(seconds=limits.patience_s)}
    store: Any = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}[kind]
    try:
        opened: AnyStore = store(bucket, prefix=prefix or None, retry_config=retry, **options)
    except Exception as error:  # obstore's own errors, or a ValueError
        raise UsageError(
            f"{location.description} can't be opened: {first_line(str(error))}; {location.advice}"
        ) from None
    return opened


@dataclass(frozen=True)
class ObjectStore(Store):
    """A folder of a bucket. `path` is below the location; all of its folders share the connections of `store`.

    guard: is called before each change; raises if this process must not change the store any more.
    """

    location: Location
    store: AnyStore
    limits: Limits
    path: str = ""
    pauses_s: Sequence[float] = ()
    guard: Callable[[], None] = lambda: None

    def with_limits(self, limits: Limits) -> ObjectStore:
        """Return the same folder with other time limits."""
        return replace(self, store=_open(self.location, limits), limits=limits)

    @property
    def url(self) -> str:
        """See Store."""
        return f"{self.location.description}/{self.path}" if self.path else self.location.description

    def below(self, name: str) -> ObjectStore:
        """See Store."""
        return replace(self, path=self._key(name))

    def check(self) -> None:
        """Check access with one request. Raises UsageError for a missing bucket; StoreForbidden, StoreUnreachable."""
        try:
            with self._errors("listed", ""):
                self._list_folders()
        except StoreMissing as error:
            bucket = self.url.partition("://")[2].partition("/")[0]
            raise UsageError(f"cannot keep runs in {self.url}: there is no bucket {bucket}; create it first") from error

    def _list_folders(self) -> list[str]:
        found = self.store.list_with_delimiter(f"{self.path}/" if self.path else None)["common_prefixes"]
        return sorted(path.rstrip("/").rpartition("/")[2] for path in found)

    # --- Reading, without another attempt: readers of images have their own ---

    def listing(self, folder: str = "") -> Iterator[Listed]:
        """See Source."""
        skip = len(self.path) + 1 if self.path else 0
        start = self._key(folder) if folder else self.path
        last: str | None = None
        broken = 0
        while True:
            try:
                for page in self.store.list(f"{start}/" if start else None, chunk_size=_PAGE, offset=last):
                    for item in page:
                        modified_s = item["last_modified"].timestamp()
                        yield Listed(item["path"][skip:], item["size"], _version(item), modified_s)
                    last = page[-1]["path"] if page else last
            except Exception as error:  # obstore has its own kinds of errors
                broken += 1
                # obstore repeats a request that fails, but not one whose answer breaks off.
                if broken > self.limits.retries or "response body error" not in str(error):
                    raise self._error("listed", "", error) from None
            else:
                return

    def get(self, key: str, *, start: int = 0, limit_bytes: int | None = None) -> bytes:
        """See Source."""
        with self._errors("read", key):
            result = self.store.get(self._key(key), options={"range": {"offset": start}} if start else None)
            if limit_bytes is not None and result.meta["size"] - start > limit_bytes:
                raise self._too_large(self._key(key), limit_bytes)
            return bytes(result.bytes())

    def chunks(self, key: str) -> Iterator[bytes]:
        """See Source. Parts of an object that is replaced meanwhile are not mixed: that raises Transient."""
        with self._errors("read", key):
            result = self.store.get(self._key(key))
            size, e_tag = result.meta["size"], result.meta.get("e_tag")
            if size <= _PART_BYTES:
                yield bytes(result.bytes())
                return
            del result  # ends the request for the whole object
            for start in range(0, size, _PART_BYTES):
                part: Any = {"range": (start, min(start + _PART_BYTES, size)), **({"if_match": e_tag} if e_tag else {})}
                yield bytes(self.store.get(self._key(key), options=part).bytes())

    # --- A folder of runs or models ---

    def folders(self) -> list[str]:
        """See Store."""
        return self._request("listed", "", self._list_folders)

    def write(self, path: str, data: bytes | Path) -> None:
        """See Store. A large file is uploaded in parts."""

        def put() -> None:
            size_bytes = data.stat().st_size if isinstance(data, Path) else len(data)
            part_bytes = max(_PART_BYTES, size_bytes // _MOST_PARTS + 1)
            self.store.put(self._key(path), data, chunk_size=part_bytes, max_concurrency=_UPLOADS)

        self.guard()
        self._request("written", path, put)

    def remove(self, path: str) -> None:
        """See Store."""
        self.guard()
        with suppress(NotFound):
            self._request("deleted", path, lambda: self.store.delete(self._key(path)))

    def read_versioned(self, path: str) -> Versioned | None:
        """See Store."""

        def get() -> Versioned:
            result = self.store.get(self._key(path))
            written_s = result.meta["last_modified"].timestamp()
            return Versioned(bytes(result.bytes()), _condition(result.meta), written_s)

        with suppress(NotFound):
            return self._request("read", path, get)
        return None

    def write_versioned(self, path: str, data: bytes, before: Versioned | None) -> Versioned:
        """See Store: If-None-Match and If-Match for S3, the equivalent for the others."""
        from obstore.exceptions import AlreadyExistsError, NotSupportedError, PreconditionError

        def put() -> Versioned:
            try:
                return Versioned(data, _condition(self.store.put(self._key(path), data, mode=mode)))
            except (AlreadyExistsError, PreconditionError, FileNotFoundError) as error:
                raise WriteConflict(f"{self.url}/{path} was written by another process") from error
            except (NotSupportedError, NotImplementedError) as error:
                raise NoConditionalWrites(first_line(str(error))) from error

        self.guard()
        mode: Any = "create" if before is None else dict(before.version)
        return self._request("written", path, put)

    def test_conditions(self, probe: str) -> float:
        """Return the store's time in seconds since 1970, after a test that it keeps the conditions of writes.

        probe: an object that no other process uses; it is written and deleted. Raises NoConditionalWrites.
        """
        try:
            with suppress(WriteConflict):  # the answer to the first attempt was lost
                self.write_versioned(probe, b"a test of conditional writes\n", None)
            for before in (None, Versioned(b"", {"e_tag": '"0"', "version": "0"})):
                with suppress(WriteConflict):
                    self.write_versioned(probe, b"", before)
                    raise NoConditionalWrites("the store ignores the conditions of writes")
            written = self.read_versioned(probe)
            if written is None or written.written_s is None:
                raise NoConditionalWrites("the store reports no modification times")
            return written.written_s
        finally:
            with suppress(Exception):  # an object that stays disturbs nothing
                self.store.delete(self._key(probe))

    def _key(self, path: str) -> str:
        return f"{self.path}/{path}" if self.path else path

    def _request(self, action: str, path: str, work: Callable[[], T]) -> T:
        """Call `work` until it succeeds, or fails in a way that does not pass. Raises StoreError."""

        def attempt() -> T:
            with self._errors(action, path):
                return work()

        return self._again(attempt)

    @contextmanager
    def _errors(self, action: str, path: str) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except Exception as error:  # as above
            raise self._error(action, path, error) from None

    def _error(self, action: str, path: str, error: Exception) -> StoreError:
        return store_error(self.location, action, path and self._key(path), error, self.limits.timeout_s)


def _version(item: Mapping[str, Any]) -> str:
    return str(item.get("version") or item.get("e_tag") or "").strip('"')


def _condition(about: Mapping[str, Any]) -> dict[str, str]:
    return {name: about[name] for name in ("e_tag", "version") if about.get(name)}


# --- Errors: obstore's class says what kind it is, its text why ---


def store_error(location: Location, action: str, key: str, error: Exception, timeout_s: float) -> StoreError:
    """Return the StoreError for a failed request: one line that names the place, without secrets.

    action: "listed", "read", "written" or "deleted". key: "" for a request that concerns the whole location.
    """
    text, why = str(error), _why(str(error), timeout_s)
    where = f"{location.description}/{key}" if key else location.description
    if any(host in text for host in _METADATA_HOSTS) and "status code: 200" not in text:
        return StoreForbidden(f"{where} can't be {action}: there are no credentials; {_credentials_advice(location)}")
    if isinstance(error, FileNotFoundError) or "status code: 404" in text:
        if key and "NoSuchBucket" not in text:
            return NotFound(key)
        return StoreMissing(f"{location.description} does not exist ({why}): see {location.setting} and its endpoint")
    if "redirect" in text or "status code: 301" in text:
        region = f"{location.options_setting}.region" if location.options_setting else "AWS_REGION"
        asked = location.options.get("region") or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        named = shorten(str(asked), 40) if asked else "us-east-1, the default"
        return StoreForbidden(f"{where} is in another region than {named}: set {region}")
    if type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError") or _REFUSED.search(text):
        return StoreForbidden(f"{where} can't be {action}: the store refuses it ({why}): {location.advice}")
    if type(error).__name__ == "PreconditionError":
        return Transient(f"{where} can't be {action}: it was replaced meanwhile")
    if key:
        return Transient(f"{where} can't be {action}: {why}")
    endpoint = location.options.get("endpoint") or os.environ.get("AWS_ENDPOINT_URL")
    named = f", {shorten(hide_credentials(one_line(str(endpoint))), 100)}," if endpoint else ""
    return StoreUnreachable(f"{where} can't be {action}: {why}: is its endpoint{named} right, and the server up?")


def first_line(text: str) -> str:
    """Return the first line of a message without addresses, whose query may hold a signature."""
    return _ADDRESS.sub("...", one_line(text))[:200]


def _credentials_advice(location: Location) -> str:
    variable = CREDENTIAL_VARIABLE[OBJECT_STORES.get(location.protocol, "s3")]
    setting = location.options_setting
    options = f"set {setting} to {{skip_signature: true}} for a public one, or to your own, or " if setting else ""
    return f"{options}set the store's variables in the environment ({variable}, ...)"


def _why(text: str, timeout_s: float) -> str:
    """Describe what happened; the request's address is left out, because its query may hold a signature."""
    if found := _STATUS.search(text):
        return ": ".join(part for part in (f"{found[1]} {found[3] or found[2].strip()}", found[4]) if part)
    if "kind: Timeout" in text or "TimedOut" in text:
        return f"it did not answer within {timeout_s:g} s"
    detail = _OS_MESSAGE.search(text)
    return f"no connection ({detail[1]})" if detail and "kind: Connect" in text else first_line(text)


def settings_for(location: Location, kind: str, bucket: str, timeout_s: float) -> tuple[str, dict[str, Any]]:
    """Return the bucket, and obstore's arguments; options override the environment. Raises UsageError."""
    options = dict(location.options)
    client = dict(options.pop("client_options", None) or {})
    if kind == "s3":
        _add_aws(options, bucket, timeout_s)
        if bundle := os.environ.get("AWS_CA_BUNDLE"):
            try:
                client.setdefault("root_certificate", Path(bundle).read_bytes())
            except OSError as error:
                raise UsageError(f"the certificates of AWS_CA_BUNDLE can't be read: {error}") from error
    if kind == "az":
        bucket, _, host = bucket.partition("@")  # abfs://container@account.dfs.core.windows.net
        if host:
            options.setdefault("account_name", host.partition(".")[0])
    return bucket, {**options, "client_options": client}


def _add_aws(options: dict[str, Any], bucket: str, timeout_s: float) -> None:
    """Add the endpoint, the region and the credentials that the options do not have."""
    profile = options.pop("profile", None)
    known = options.get("skip_signature") or options.get("access_key_id")
    if profile or not (known or os.environ.get("AWS_ACCESS_KEY_ID") or os.environ.get("AWS_WEB_IDENTITY_TOKEN_FILE")):
        _add_profile(options, profile)
    if options.get("endpoint") and os.environ.get("AWS_ENDPOINT_URL_S3"):
        options["aws_endpoint_url_s3"] = options["endpoint"]  # obstore would prefer the environment's
    variables = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    has_endpoint = options.get("endpoint") or any(map(os.environ.get, variables))
    if not (options.get("region") or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")):
        options["region"] = ("" if has_endpoint else region_of(bucket, timeout_s)) or "us-east-1"


def _add_profile(options: dict[str, Any], name: str | None) -> None:
    """Add what a profile in ~/.aws says: obstore does not read these files. Raises UsageError."""
    asked = name or os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE")
    files = (
        os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials",
        os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config",
    )
    if not asked and not any(Path(file).expanduser().is_file() for file in files):
        return
    try:
        import botocore.exceptions  # type: ignore[import-untyped]
        import botocore.session  # type: ignore[import-untyped]
    except ImportError:
        raise UsageError(
            f"AWS profiles are read with botocore: {install_command('s3')}, or set AWS_ACCESS_KEY_ID"
        ) from None
    session = botocore.session.Session(profile=asked)
    try:
        scoped, source = session.get_scoped_config(), session.get_credentials()
    except botocore.exceptions.BotoCoreError as error:  # its texts quote no secrets
        raise UsageError(f"the AWS profile {shorten(asked or 'default')} can't be used: {error}") from None
    for setting, key in (("endpoint", "endpoint_url"), ("region", "region")):
        if scoped.get(key):
            options.setdefault(setting, scoped[key])
    if source is not None:
        options["credential_provider"] = _renewed(source)


def _renewed(source: Any) -> Callable[[], Credentials]:
    """Return credentials that botocore gets and renews: of a file, a role, single sign-on, a program."""

    def renew() -> Credentials:
        now = source.get_frozen_credentials()
        keys = {"access_key_id": now.access_key, "secret_access_key": now.secret_key, "token": now.token}
        return keys | {"expires_at": datetime.now(UTC) + _FRESH}

    return renew


@lru_cache(maxsize=64)
def region_of(bucket: str, timeout_s: float) -> str:
    """Ask AWS for a bucket's region, without credentials; "" if it does not say, or does not answer."""
    import http.client
    import urllib.error
    import urllib.request

    host = "s3.amazonaws.com"
    # A wildcard certificate covers one label of the host name.
    url = f"https://{host}/{bucket}" if "." in bucket else f"https://{bucket}.{host}/"
    with suppress(OSError, ValueError, http.client.HTTPException):  # the first request will report the problem
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=timeout_s) as answer:
                return str(answer.headers.get(_REGION_HEADER, ""))
        except urllib.error.HTTPError as error:
            with error:
                return str(error.headers.get(_REGION_HEADER, ""))
    return ""
