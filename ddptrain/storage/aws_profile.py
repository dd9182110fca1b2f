"""Reads profiles from ~/.aws/credentials and ~/.aws/config, which obstore does not read."""

from __future__ import annotations

import configparser
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from ddptrain.config.wording import did_you_mean, shorten
from ddptrain.errors import UsageError
from ddptrain.optional_packages import install_command

Credentials = dict[str, Any]  # as obstore's S3Credential
_FRESH = timedelta(minutes=5)  # credentials of botocore are used for so long before botocore is asked again
_ELSEWHERE = ("role_arn", "sso_session", "sso_start_url", "credential_process", "web_identity_token_file")


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
    """Return the profile of that name, or the default one; None if there is no default.

    Raises UsageError if a named profile does not exist, or a file can't be read.
    """
    sections = _sections()
    asked = name or os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE")
    found = sections.get(asked or "default")
    if found is None and asked:
        hint = did_you_mean(asked, list(sections))
        raise UsageError(
            f'AWS has no profile "{shorten(asked)}" in ~/.aws/credentials or ~/.aws/config{": " if hint else ""}{hint}'
        )
    if found is None:
        return None
    endpoint_url = found.get("endpoint_url", "")
    return Profile(asked or "default", found.get("region", ""), endpoint_url, _provider(asked or "default", found))


def _sections() -> dict[str, dict[str, str]]:
    """Return the settings of each profile, from both files; those in credentials win."""
    files = [
        os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config",
        os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials",
    ]
    found: dict[str, dict[str, str]] = {}
    for file in files:
        parser = configparser.RawConfigParser(strict=False, default_section="")
        try:
            parser.read_string(Path(file).expanduser().read_text(encoding="utf-8"), file)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, configparser.Error):  # the error's text may quote a secret
            raise UsageError(f"{file} can't be read as AWS profiles: correct it, or set the store's options") from None
        for section in parser.sections():
            found.setdefault(section.removeprefix("profile ").strip(), {}).update(parser.items(section))
    return found


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
