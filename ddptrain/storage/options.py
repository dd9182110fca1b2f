"""Translates the options of object stores from the names of fsspec's packages to those of obstore."""

from __future__ import annotations

import configparser
import http.client
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

from ddptrain.config.wording import did_you_mean, shorten
from ddptrain.errors import UsageError
from ddptrain.optional_packages import install_command
from ddptrain.secret_rules import is_secret_name
from ddptrain.storage.store import Location, StoreUnreachable

# fsspec's name -> obstore's, for values that are passed on unchanged; code below handles the others.
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
Credentials = dict[str, Any]  # as obstore's S3Credential
_FRESH = timedelta(minutes=5)  # credentials of botocore are used for so long before botocore is asked again
_ELSEWHERE = ("role_arn", "sso_session", "sso_start_url", "credential_process", "web_identity_token_file")


@dataclass(frozen=True, slots=True)
class Settings:
    """The arguments for obstore."""

    bucket: str
    store: Mapping[str, Any]
    client: Mapping[str, Any] = field(default_factory=dict)
    credentials: Callable[[], Credentials] | None = None


def settings_for(location: Location, kind: str, bucket: str, timeout_s: float) -> Settings:
    """Return the arguments; options override the environment. Raises UsageError for wrong ones; StoreUnreachable."""
    options = _checked(location, kind)
    client = _client(location, options.pop("verify", True))
    if kind == "s3":
        return _s3(location, bucket, options, client, timeout_s)
    if kind == "gs":
        return Settings(bucket, _gs(options), client)
    bucket, _, host = bucket.partition("@")  # abfs://container@account.dfs.core.windows.net
    if host:
        options.setdefault("account_name", host.partition(".")[0])
    return Settings(bucket, _plain("az", options), client)


def _checked(location: Location, kind: str) -> dict[str, Any]:
    """Return the options, with those in client_kwargs at the top. Every name and type has been checked."""
    options = dict(location.options)
    nested = options.pop("client_kwargs", None) if kind == "s3" else None
    if nested is not None and not isinstance(nested, Mapping):
        raise _wrong(location, "client_kwargs", "must be a mapping, such as {region_name: us-west-2}")
    for name, value in (nested or {}).items():
        if name not in _NESTED:
            raise _unknown(f"client_kwargs.{name}", str(name), [*_NESTED], location)
        options.setdefault(_NESTED[name], value)
    known = {*_PLAIN[kind], *_OTHERS[kind]}
    for name, value in options.items():
        if name not in known:
            raise _unknown(str(name), str(name), sorted(known), location)
        _check_value(location, name, value)
    return {name: value for name, value in options.items() if value is not None}


def _check_value(location: Location, name: str, value: object) -> None:
    if value is None:
        return
    if name in _FLAGS and not isinstance(value, bool):
        raise _wrong(location, name, "must be true or false")
    if name == "verify" and not isinstance(value, bool | str):
        raise _wrong(location, name, "must be true, false, or the path of a file of certificates")
    if name not in {*_FLAGS, "verify"} and not isinstance(value, str):
        kept = "" if is_secret_name(name) else f", not {shorten(repr(value), 40)}"
        raise _wrong(location, name, f"must be text{kept}; put it in quotes")


def _wrong(location: Location, name: str, what: str) -> UsageError:
    return UsageError(f"{location.options_setting}.{name} {what}")


def _unknown(key: str, name: str, known: list[str], location: Location) -> UsageError:
    problem = f"{location.options_setting}.{shorten(key)} is not an option of {location.protocol}://"
    hint = did_you_mean(name, known)
    return UsageError(f"{problem}: {hint}" if hint else f"{problem}; known are {', '.join(known)}")


def _plain(kind: str, options: Mapping[str, Any]) -> dict[str, Any]:
    return {_PLAIN[kind][name]: value for name, value in options.items() if name in _PLAIN[kind]}


def _client(location: Location, verify: bool | str) -> dict[str, Any]:
    """Return how certificates are checked: as usual, not at all, or with additional ones from a file."""
    if verify is False:
        return {"allow_invalid_certificates": True}
    bundle = verify if isinstance(verify, str) else os.environ.get("AWS_CA_BUNDLE", "")
    if not bundle or (isinstance(verify, bool) and not location.protocol.startswith("s3")):
        return {}
    try:
        return {"root_certificate": Path(bundle).expanduser().read_bytes()}
    except OSError as error:
        raise UsageError(f"the certificates for {location.description} can't be read: {error}") from error


def _gs(options: dict[str, Any]) -> dict[str, Any]:
    """Translate gcsfs's token, which is a keyword, or the path of a file with credentials."""
    token = options.pop("token", None)
    settings = _plain("gs", options)
    if token == "anon":  # noqa: S105 (a keyword of gcsfs)
        settings["skip_signature"] = True
    elif token not in {None, "google_default", "cloud"}:
        settings["application_credentials"] = os.path.expanduser(token)
    return settings


def _s3(location: Location, bucket: str, options: dict[str, Any], client: dict[str, Any], timeout_s: float) -> Settings:
    settings = _plain("s3", options)
    profile = _profile(options)
    credentials = _credentials(location, options, profile)
    endpoint = settings.get("endpoint") or _env("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    endpoint = endpoint or (profile.endpoint_url if profile else "")
    if endpoint:
        settings["endpoint"] = endpoint
        if _env("AWS_ENDPOINT_URL_S3"):
            settings["aws_endpoint_url_s3"] = endpoint  # obstore would prefer the environment's
    region = settings.get("region") or _env("AWS_REGION", "AWS_DEFAULT_REGION") or (profile.region if profile else "")
    if not region and not endpoint:
        region = region_of(bucket, timeout_s)
    settings["region"] = region or "us-east-1"
    return Settings(bucket, settings, client, credentials)


def _profile(options: Mapping[str, Any]) -> Profile | None:
    """Return the profile of the options; the default one if there are no other credentials."""
    if options.get("profile"):
        return read_profile(options["profile"])
    known = options.get("anon") or options.get("key") or _env("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE")
    return None if known else read_profile(None)


def _credentials(
    location: Location, options: Mapping[str, Any], profile: Profile | None
) -> Callable[[], Credentials] | None:
    """Return credentials of the options or a profile; None leaves it to the environment and the host's role."""
    if options.get("anon"):
        return None
    key, secret = options.get("key"), options.get("secret")
    if key and secret:
        return static(key, secret, options.get("token"))  # the environment's token belongs to another key
    if key or secret or options.get("token"):
        named = location.options_setting
        raise UsageError(f"{named} needs both key and secret (a token goes with them), or none of them")
    return profile.credentials if profile else None


def _env(*names: str) -> str:
    return next((value for name in names if (value := os.environ.get(name))), "")


@lru_cache(maxsize=64)
def region_of(bucket: str, timeout_s: float) -> str:
    """Ask AWS for a bucket's region, without credentials; "" if unknown. Raises StoreUnreachable at the time-out."""
    answers: list[str] = []
    # urllib applies its timeout to each IP address of the name; the thread gives one deadline for all of them.
    asking = threading.Thread(target=lambda: answers.append(_asked_region(bucket, timeout_s)), daemon=True)
    asking.start()
    asking.join(timeout_s)
    if not answers and asking.is_alive():
        raise StoreUnreachable(f"s3://{bucket} can't be listed: AWS did not answer within {timeout_s:g} s")
    return answers[0] if answers else ""


def _asked_region(bucket: str, timeout_s: float) -> str:
    host = "s3.amazonaws.com"
    # A wildcard certificate covers one label of the host name.
    url = f"https://{host}/{bucket}" if "." in bucket else f"https://{bucket}.{host}/"
    try:
        request = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return str(answer.headers.get(_REGION_HEADER, ""))
    except urllib.error.HTTPError as error:
        with error:
            return str(error.headers.get(_REGION_HEADER, ""))
    except (OSError, ValueError, http.client.HTTPException):  # the first request will report the problem
        return ""


# --- profiles in ~/.aws/credentials and ~/.aws/config, which obstore does not read ---


@dataclass(frozen=True, slots=True)
class Profile:
    """A profile; `credentials` is None if it has none."""

    name: str
    region: str = ""
    endpoint_url: str = ""
    credentials: Callable[[], Credentials] | None = field(default=None, repr=False)


def static(key: str, secret: str, token: str | None) -> Callable[[], Credentials]:
    """Return a provider of credentials that never change."""
    return lambda: {"access_key_id": key, "secret_access_key": secret, "token": token, "expires_at": None}


def read_profile(name: str | None) -> Profile | None:
    """Return the named or default profile, None if there is none. Raises UsageError for an unknown name."""
    sections = _sections()
    asked = name or os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE")
    profile = sections.get(asked or "default")
    if profile is None and asked:
        hint = did_you_mean(asked, list(sections))
        raise UsageError(
            f'AWS has no profile "{shorten(asked)}" in ~/.aws/credentials or ~/.aws/config{": " if hint else ""}{hint}'
        )
    if profile is None:
        return None
    endpoint_url = profile.get("endpoint_url", "")
    return Profile(asked or "default", profile.get("region", ""), endpoint_url, _provider(asked or "default", profile))


def _sections() -> dict[str, dict[str, str]]:
    """Return the settings of each profile, from both files; those in credentials win."""
    files = [
        os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config",
        os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials",
    ]
    sections: dict[str, dict[str, str]] = {}
    for file in files:
        parser = configparser.RawConfigParser(strict=False, default_section="")
        try:
            parser.read_string(Path(file).expanduser().read_text(encoding="utf-8"), file)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, configparser.Error):  # the error's text may quote a secret
            raise UsageError(f"{file} can't be read as AWS profiles: correct it, or set the store's options") from None
        for section in parser.sections():
            sections.setdefault(section.removeprefix("profile ").strip(), {}).update(parser.items(section))
    return sections


def _provider(name: str, settings: Mapping[str, str]) -> Callable[[], Credentials] | None:
    key, secret = settings.get("aws_access_key_id"), settings.get("aws_secret_access_key")
    if key and secret:
        return static(key, secret, settings.get("aws_session_token"))
    return _renewed(name) if any(word in settings for word in _ELSEWHERE) else None


def _renewed(name: str) -> Callable[[], Credentials]:
    """Return credentials that botocore gets and renews: of a role, of single sign-on, of a program."""
    try:
        import botocore.session  # type: ignore[import-untyped]
    except ImportError:
        raise UsageError(
            f'the AWS profile "{shorten(name)}" needs botocore to get its credentials: {install_command("s3")}'
        ) from None
    source = botocore.session.Session(profile=name).get_credentials()
    if source is None:
        raise UsageError(f'botocore finds no credentials for the AWS profile "{shorten(name)}"')

    def renew() -> Credentials:
        now = source.get_frozen_credentials()
        known = static(now.access_key, now.secret_key, now.token)()
        return known | {"expires_at": datetime.now(UTC) + _FRESH}

    return renew
