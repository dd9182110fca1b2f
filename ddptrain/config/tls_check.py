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
    for field in ("ca_file", "cert_file", "key_file"):
        try:
            Path(getattr(tls, field)).expanduser().open("rb").close()
        except OSError as error:
            return field, f"can't be read: {error.strerror}", "copy it from the cluster, or correct the path"
    authority, certificate, key = (Path(name).expanduser() for name in (tls.ca_file, tls.cert_file, tls.key_file))
    try:
        context = ssl.create_default_context(cafile=authority)
    except ssl.SSLError:
        return "ca_file", "contains no certificate", "it is a PEM file with the line -----BEGIN CERTIFICATE-----"
    try:
        context.load_verify_locations(certificate)
    except ssl.SSLError:
        return "cert_file", "contains no certificate", "it is a PEM file with the line -----BEGIN CERTIFICATE-----"
    try:
        context.load_cert_chain(certificate, key, password=_NO_PASSWORD)
    except ssl.SSLError:
        hint = "it is a PEM file without a password that belongs to cert_file"
        return "key_file", "is not the key of that certificate", hint
    return None
