"""Options of object stores: from the names that fsspec's packages have for them to obstore's."""

from __future__ import annotations

import http.client
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from ddptrain.config.wording import did_you_mean, shown
from ddptrain.errors import UsageError
from ddptrain.secret_rules import is_secret_name
from ddptrain.storage.aws_profile import Credentials, Profile, read_profile, static
from ddptrain.storage.base import Location, StoreUnreachable

# Ours -> obstore's, where a value is simply handed on; the others have a line of their own below.
_PLAIN = {
    "s3": {"anon": "skip_signature", "region": "region", "requester_pays": "request_payer", "endpoint_url": "endpoint"},
    "gs": {"anon": "skip_signature", "endpoint_url": "base_url"},
    "az": {
        "anon": "skip_signature",
        "endpoint_url": "endpoint",
        "account_name": "account_name",
        "account_key": "account_key",
        "sas_token": "sas_key",
        "tenant_id": "tenant_id",
        "client_id": "client_id",
        "client_secret": "client_secret",
    },
}
_OTHERS = {"s3": {"key", "secret", "token", "profile", "verify"}, "gs": {"token", "verify"}, "az": {"verify"}}
_NESTED = {"endpoint_url": "endpoint_url", "region_name": "region", "verify": "verify"}  # of s3fs's client_kwargs
_FLAGS = {"anon", "requester_pays"}
_REGION_HEADER = "x-amz-bucket-region"


@dataclass(frozen=True, slots=True)
class Settings:
    """What a store is opened with."""

    bucket: str
    store: Mapping[str, Any]
    client: Mapping[str, Any] = field(default_factory=dict)
    credentials: Callable[[], Credentials] | None = None


def settings_for(location: Location, kind: str, bucket: str, timeout_s: float) -> Settings:
    """What a location of that kind is opened with: its options, over what the environment says.

    Raises: UsageError for an option that is unknown, or a value that is no such thing; StoreUnreachable.
    """
    options = _checked(location, kind)
    client = _client(location, options.pop("verify", True))
    if kind == "s3":
        return _s3(bucket, options, client, timeout_s)
    if kind == "gs":
        return Settings(bucket, _gs(options), client)
    bucket, _, host = bucket.partition("@")  # abfs://container@account.dfs.core.windows.net
    if host:
        options.setdefault("account_name", host.partition(".")[0])
    return Settings(bucket, _plain("az", options), client)


def _checked(location: Location, kind: str) -> dict[str, Any]:
    """The options, those within client_kwargs brought out, every name known and every value of its type."""
    options = dict(location.options)
    nested = options.pop("client_kwargs", None) if kind == "s3" else None
    if nested is not None and not isinstance(nested, Mapping):
        raise _wrong("client_kwargs", "must be a mapping, such as {region_name: us-west-2}")
    for name, value in (nested or {}).items():
        if name not in _NESTED:
            raise _unknown(f"client_kwargs.{name}", str(name), [*_NESTED], location)
        options.setdefault(_NESTED[name], value)
    known = {*_PLAIN[kind], *_OTHERS[kind]}
    for name, value in options.items():
        if name not in known:
            raise _unknown(str(name), str(name), sorted(known), location)
        _check_value(name, value)
    return {name: value for name, value in options.items() if value is not None}


def _check_value(name: str, value: object) -> None:
    if value is None:
        return
    if name in _FLAGS and not isinstance(value, bool):
        raise _wrong(name, "must be true or false")
    if name == "verify" and not isinstance(value, bool | str):
        raise _wrong(name, "must be true, false, or the path of a file of certificates")
    if name not in {*_FLAGS, "verify"} and not isinstance(value, str):
        kept = "" if is_secret_name(name) else f", not {shown(repr(value), 40)}"
        raise _wrong(name, f"must be text{kept}; put it in quotes")


def _wrong(name: str, what: str) -> UsageError:
    return UsageError(f"params.source_options.{name} {what}")


def _unknown(key: str, name: str, known: list[str], location: Location) -> UsageError:
    said = f"params.source_options.{shown(key)} is no option of {location.protocol}://"
    hint = did_you_mean(name, known)
    return UsageError(f"{said}: {hint}" if hint else f"{said}; known are {', '.join(known)}")


def _plain(kind: str, options: Mapping[str, Any]) -> dict[str, Any]:
    return {_PLAIN[kind][name]: value for name, value in options.items() if name in _PLAIN[kind]}


def _client(location: Location, verify: bool | str) -> dict[str, Any]:
    """How certificates are checked: as usual, not at all, or against those of a file as well."""
    if verify is False:
        return {"allow_invalid_certificates": True}
    bundle = verify if isinstance(verify, str) else os.environ.get("AWS_CA_BUNDLE", "")
    if not bundle or (isinstance(verify, bool) and not location.protocol.startswith("s3")):
        return {}
    try:
        return {"root_certificate": Path(bundle).expanduser().read_bytes()}
    except OSError as error:
        raise UsageError(f"the certificates for {location.words} can't be read: {error}") from error


def _gs(options: dict[str, Any]) -> dict[str, Any]:
    """gcsfs's token is a word, or the path of a file with credentials."""
    token = options.pop("token", None)
    settings = _plain("gs", options)
    if token == "anon":  # noqa: S105 (a word of gcsfs's)
        settings["skip_signature"] = True
    elif token not in {None, "google_default", "cloud"}:
        settings["application_credentials"] = os.path.expanduser(token)
    return settings


def _s3(bucket: str, options: dict[str, Any], client: dict[str, Any], timeout_s: float) -> Settings:
    settings = _plain("s3", options)
    profile = _profile(options)
    credentials = _credentials(options, profile)
    endpoint = settings.get("endpoint") or _env("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    endpoint = endpoint or (profile.endpoint_url if profile else "")
    if endpoint:
        settings["endpoint"] = endpoint
        if _env("AWS_ENDPOINT_URL_S3"):
            settings["aws_endpoint_url_s3"] = endpoint  # it would win over what was asked for
    region = settings.get("region") or _env("AWS_REGION", "AWS_DEFAULT_REGION") or (profile.region if profile else "")
    if not region and not endpoint:
        region = region_of(bucket, timeout_s)
    settings["region"] = region or "us-east-1"
    return Settings(bucket, settings, client, credentials)


def _profile(options: Mapping[str, Any]) -> Profile | None:
    """The profile that is asked for, or the default one where nothing else says who we are."""
    if options.get("profile"):
        return read_profile(options["profile"])
    known = options.get("anon") or options.get("key") or _env("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE")
    return None if known else read_profile(None)


def _credentials(options: Mapping[str, Any], profile: Profile | None) -> Callable[[], Credentials] | None:
    """Who we are, where the options or a profile say it; None leaves it to the environment, and to the host's role."""
    if options.get("anon"):
        return None
    key, secret = options.get("key"), options.get("secret")
    if key and secret:
        return static(key, secret, options.get("token"))  # a token of the environment belongs to another key
    if key or secret or options.get("token"):
        raise UsageError("params.source_options needs both key and secret (a token goes with them), or none of them")
    return profile.credentials if profile else None


def _env(*names: str) -> str:
    return next((value for name in names if (value := os.environ.get(name))), "")


@lru_cache(maxsize=64)
def region_of(bucket: str, timeout_s: float) -> str:
    """Where a bucket of AWS is, which it tells everybody; "" where that can't be found out.

    Raises: StoreUnreachable where AWS does not answer in time.
    """
    answers: list[str] = []
    # The deadline of a request is one for each address that the name stands for: this is one for all of it.
    asking = threading.Thread(target=lambda: answers.append(_asked_region(bucket, timeout_s)), daemon=True)
    asking.start()
    asking.join(timeout_s)
    if not answers and asking.is_alive():
        raise StoreUnreachable(f"s3://{bucket} can't be listed: AWS did not answer within {timeout_s:g} s")
    return answers[0] if answers else ""


def _asked_region(bucket: str, timeout_s: float) -> str:
    host = "s3.amazonaws.com"
    url = f"https://{host}/{bucket}" if "." in bucket else f"https://{bucket}.{host}/"  # a certificate covers one name
    try:
        request = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return str(answer.headers.get(_REGION_HEADER, ""))
    except urllib.error.HTTPError as error:
        with error:
            return str(error.headers.get(_REGION_HEADER, ""))
    except (OSError, ValueError, http.client.HTTPException):  # the listing will say what is wrong
        return ""
