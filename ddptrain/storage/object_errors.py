"""What an error of obstore means. obstore has few kinds of errors, so the text of the message decides."""

from __future__ import annotations

import os
import re

from ddptrain.config.wording import shorten
from ddptrain.errors import one_line
from ddptrain.redact import hide_credentials
from ddptrain.storage.store import (
    OBJECT_STORES,
    Location,
    NotFound,
    StoreError,
    StoreForbidden,
    StoreMissing,
    StoreUnreachable,
    Transient,
)

CREDENTIAL_VARIABLE = {
    "s3": "AWS_ACCESS_KEY_ID",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_KEY",
}
_METADATA_HOSTS = ("169.254.169.254", "169.254.170.2", "metadata.google.internal")  # asked if no credentials are given
_REFUSED_NAMES = {"PermissionDeniedError", "UnauthenticatedError"}
_TRANSIENT_CODES = {"RequestTimeout", "SlowDown", "InternalError"}  # S3 sends the first one with status 400
_TRANSIENT_STATUS = {408, 425, 429}
_STATUS = re.compile(r"status code: (\d{3})\b ?([^\n:]*)")
_CODE = re.compile(r"<Code>([^<]{1,80})</Code>")
_MESSAGE = re.compile(r"<Message>([^<]{1,300})</Message>")
_OS_MESSAGE = re.compile(r'(?:message|error): "((?:[^"\\]|\\.){1,200})"')
_KIND = re.compile(r"\bkind: (Connect|Timeout|Interrupted|Request|Decode)\b|\b(TimedOut)\b")
_TRIES = re.compile(r"after (\d+) retries")


def store_error(location: Location, action: str, key: str, error: Exception, timeout_s: float) -> StoreError:
    """Return the StoreError for a failed request: one line that names the place, without secrets.

    action: "listed", "read", "written" or "deleted". key: "" for a request that concerns the whole location.
    """
    text = str(error)
    status, why = _status(text), _why(text, timeout_s)
    where = f"{location.words}/{key}" if key else location.words
    if any(host in text for host in _METADATA_HOSTS) and status != 200:
        return StoreForbidden(f"{where} can't be {action}: there are no credentials; {_credentials_advice(location)}")
    if status == 404 or isinstance(error, FileNotFoundError):
        if key and "NoSuchBucket" not in text:
            return NotFound(key)
        return StoreMissing(f"{location.words} does not exist ({why}): see {location.setting} and its endpoint")
    if status in {301, 307, 308} or "redirect" in text:
        region = f"{location.options_setting}.region" if location.options_setting else "AWS_REGION"
        answer = f" ({why})" if status else ""
        return StoreForbidden(f"{where} is in another region than {_region(location)}{answer}: set {region}")
    if _is_refused(status, text, error):
        return StoreForbidden(f"{where} can't be {action}: the store refuses it ({why}): {location.advice}")
    if key:
        return Transient(f"{where} can't be {action}: {why}")
    return StoreUnreachable(
        f"{where} can't be {action}: {why}: is its endpoint{_endpoint(location)} right, and the server up?"
    )


def _region(location: Location) -> str:
    """The region that was asked, for messages."""
    named = location.options.get("region") or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    return shorten(str(named), 40) if named else "us-east-1, the default"


def _endpoint(location: Location) -> str:
    """The endpoint that the options or the environment name, for messages."""
    named = location.options.get("endpoint_url") or os.environ.get("AWS_ENDPOINT_URL")
    return f", {shorten(hide_credentials(one_line(str(named))), 100)}," if named else ""


def first_line(text: str) -> str:
    """Return the first line of a message without addresses, whose query may hold a signature."""
    line = one_line(text)
    return re.sub(r"\b[a-z]+://\S+", "...", line)[:200]


def _credentials_advice(location: Location) -> str:
    variable = CREDENTIAL_VARIABLE[OBJECT_STORES.get(location.protocol, "s3")]
    setting = location.options_setting
    options = f"set {setting} to {{anon: true}} for a public one, or to your own, or " if setting else ""
    return f"{options}set the store's variables in the environment ({variable}, ...)"


def _is_refused(status: int, text: str, error: Exception) -> bool:
    code = _CODE.search(text)
    if code and code[1] in _TRANSIENT_CODES:
        return False
    return type(error).__name__ in _REFUSED_NAMES or (400 <= status < 500 and status not in _TRANSIENT_STATUS)


def _status(text: str) -> int:
    found = _STATUS.search(text)
    return int(found[1]) if found else 0


def _why(text: str, timeout_s: float) -> str:
    """Describe what happened; the request's address is left out, because its query may hold a signature."""
    if found := _STATUS.search(text):
        code, message = _CODE.search(text), _MESSAGE.search(text)
        details = ": ".join(part[1] for part in (code, message) if part) or found[2].strip()
        return f"{found[1]} {details}".strip()
    kinds = {part for match in _KIND.findall(text) for part in match if part}
    retries = _TRIES.search(text)
    tried = f", tried {int(retries[1]) + 1} times" if retries and retries[1] != "0" else ""
    if kinds & {"Timeout", "TimedOut"}:
        return f"it did not answer within {timeout_s:g} s{tried}"
    detail = _OS_MESSAGE.search(text)
    words = "no connection" if "Connect" in kinds else "the connection broke" if kinds else first_line(text)
    return (f"{words} ({detail[1]})" if detail and kinds else words) + tried
