"""TLS for clusters: a Dask scheduler runs the code of everyone who can connect to it."""

from __future__ import annotations

import datetime as dt
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ddptrain.errors import ClusterError
from ddptrain.file_ops import write_atomic

if TYPE_CHECKING:
    from distributed import Security

CERT_FILE = "cert.pem"
KEY_FILE = "key.pem"
_VALID_DAYS = 3650
_CLOCK_SKEW = dt.timedelta(days=1)


def make_tls(folder: Path) -> None:
    """Write a new key, without which nobody can use the cluster, and a self-signed certificate; both private."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ddptrain cluster")])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + dt.timedelta(days=_VALID_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    write_private(folder / KEY_FILE, private)
    write_private(folder / CERT_FILE, certificate.public_bytes(pem))


def write_private(path: Path, data: bytes) -> None:
    """Write a file that is never readable by other users."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, 0o600)
        file.write(data)


def write_private_json(path: Path, data: object, indent: int | None = None) -> None:
    """Write a JSON file that only this user can read. Readers see the old content or the new one, never a part."""
    write_atomic(path, json.dumps(data, indent=indent).encode(), mode=0o600, durable=False)


def own_security(folder: Path) -> Security:
    """Return the Security for a cluster with certificate and key in `folder`. Raises ClusterError."""
    from distributed import Security

    certificate, key = str(folder / CERT_FILE), str(folder / KEY_FILE)
    for path in (certificate, key):
        if not os.access(path, os.R_OK):
            raise ClusterError(f"the TLS file {path} can't be read")
    roles = ("client", "worker", "scheduler")
    files = {f"tls_{role}_{kind}": path for role in roles for kind, path in (("cert", certificate), ("key", key))}
    return Security(require_encryption=True, tls_ca_file=certificate, **files)


def keep(given: Security, folder: Path) -> None:
    """Write the client certificate and key of a foreign cluster into `folder`, for `own_security`; nothing without TLS.

    cert.pem contains the client's certificate, followed by that of the authority, which both sides trust.
    """
    tls = given.get_tls_config_for_role("client")
    authority, certificate, key = tls["ca_file"], tls["cert"], tls["key"]
    if not authority or not certificate:
        return
    texts = [_pem(certificate), _pem(authority)]
    write_private(folder / KEY_FILE, _pem(key or certificate).encode())
    write_private(folder / CERT_FILE, "".join(f"{text.rstrip()}\n" for text in dict.fromkeys(texts)).encode())


def _pem(value: str) -> str:
    """Return the PEM text of a Dask setting, which is either the text or the path of a file."""
    return value if "\n" in value else Path(value).read_text(encoding="ascii")
