"""Checks, before anything is started, that the files of `cluster.tls` can be used."""

from __future__ import annotations

import ssl
from pathlib import Path

from ddptrain.config.load import place_in_file
from ddptrain.config.resolved import ResolvedConfig
from ddptrain.config.sections.clusters import TlsSettings
from ddptrain.errors import ConfigError, Problem

_NO_PASSWORD = ""  # without one OpenSSL asks for it on the terminal


def check_tls(resolved: ResolvedConfig) -> None:
    """Raise ConfigError if a file of `cluster.tls` is missing, is no certificate or key, or they are no pair."""
    tls = resolved.config.cluster.tls
    if tls is not None and (problem := _problem(tls)) is not None:
        field, message, hint = problem
        path = getattr(tls, field)
        key = ("cluster", "tls", field)
        where = place_in_file(resolved.path, key, path)
        raise ConfigError([Problem(where, ".".join(key), f"the file {path} {message}", hint)])


def _problem(tls: TlsSettings) -> tuple[str, str, str] | None:
    """Return the field that is wrong, the message and the hint."""
    paths = {field: Path(getattr(tls, field)).expanduser() for field in ("ca_file", "cert_file", "key_file")}
    for field, path in paths.items():
        try:
            path.open("rb").close()
        except OSError as error:
            return field, f"can't be read: {error.strerror}", "copy it from the cluster, or correct the path"
    context = ssl.create_default_context()
    for field in ("ca_file", "cert_file"):
        try:
            context.load_verify_locations(paths[field])
        except ssl.SSLError:
            return field, "contains no certificate", "it is a PEM file with the line -----BEGIN CERTIFICATE-----"
    try:
        context.load_cert_chain(paths["cert_file"], paths["key_file"], password=_NO_PASSWORD)
    except ssl.SSLError:
        hint = "it is a PEM file without a password that belongs to cert_file"
        return "key_file", "is not the key of that certificate", hint
    return None
