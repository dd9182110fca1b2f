"""The settings with which obstore opens a bucket: its own names, and what AWS's files and the environment add."""

from __future__ import annotations

import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

from ddptrain.config.wording import shorten
from ddptrain.errors import UsageError
from ddptrain.optional_packages import install_command
from ddptrain.storage.store import Location

# Names of fsspec's packages -> what to use. A client_options is a mapping of options of the HTTP client.
_OF_FSSPEC = {
    "anon": "skip_signature",
    "key": "access_key_id",
    "secret": "secret_access_key",
    "endpoint_url": "endpoint",
    "requester_pays": "request_payer",
    "sas_token": "sas_key",
    "client_kwargs": "endpoint, region or client_options",
    "verify": "client_options: {allow_invalid_certificates: true}, or the variable AWS_CA_BUNDLE",
}
_REGION_HEADER = "x-amz-bucket-region"
_FRESH = timedelta(minutes=5)  # credentials of botocore are used for so long before botocore is asked again
Credentials = dict[str, Any]  # as obstore's S3Credential


def settings_for(location: Location, kind: str, bucket: str, timeout_s: float) -> tuple[str, dict[str, Any]]:
    """Return the bucket, and obstore's arguments; options override the environment. Raises UsageError."""
    options = dict(location.options)
    for name in options:
        if name in _OF_FSSPEC:
            setting = location.options_setting
            raise UsageError(f"{setting}.{name} is not an option of {location.protocol}://: use {_OF_FSSPEC[name]}")
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
