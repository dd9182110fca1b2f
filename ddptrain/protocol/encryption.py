"""Encrypts the secrets in rank specs, so that users who see the tasks of a scheduler can't read them.

X25519 with a new key for each message, HKDF-SHA256, ChaCha20-Poly1305 (RFC 7748, 5869, 8439). It does not protect
against users who can run code in the scheduler or the workers.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddptrain.errors import ClusterError
from ddptrain.protocol.rank_spec import RankSpec, TrackingSpec, key_prefix
from ddptrain.protocol.typed_json import decode_json_data
from ddptrain.redact import hide_secrets

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

SEALED = "DDPTRAIN_SEALED_ENV"  # the only variable of an encrypted environment
_FIELD = "="  # prefix of the encrypted fields; no variable can begin with it
_SECRET_FIELDS = ("params", "args", "tracking")
_INFO = b"ddptrain rank environment"
_KEY_BYTES = 32
_NONCE = bytes(12)  # each key is used once


class WorkerKey:
    """The key pair of a worker, created on first use.

    The driver encrypts with `public`; only this process can decrypt.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._private: X25519PrivateKey | None = None

    def _key(self) -> X25519PrivateKey:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        with self._lock:
            if self._private is None:
                self._private = X25519PrivateKey.generate()
            return self._private

    @property
    def public(self) -> str:
        """The public key in base64."""
        return _text(self._key().public_key().public_bytes_raw())

    def open(self, env: Mapping[str, str], purpose: str) -> dict[str, str]:
        """Decrypt an environment if it is encrypted.

        Raises ClusterError if it was encrypted for another worker or purpose.
        """
        if SEALED not in env:
            return dict(env)
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

        try:
            data = base64.b64decode(env[SEALED], validate=True)
            shared = self._key().exchange(X25519PublicKey.from_public_bytes(data[:_KEY_BYTES]))
            text = _cipher(shared, data[:_KEY_BYTES]).decrypt(_NONCE, data[_KEY_BYTES:], purpose.encode())
        except (ValueError, InvalidTag) as error:
            raise ClusterError(
                "the environment of a rank was not encrypted for this worker, which has been restarted; try again"
            ) from error
        return {str(name): str(value) for name, value in json.loads(text).items()}


def seal(env: Mapping[str, str], public: str, purpose: str) -> dict[str, str]:
    """Encrypt an environment for the owner of the key `public` and this purpose; {} if there is nothing to encrypt."""
    if not env:
        return {}
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    sender_key = X25519PrivateKey.generate()
    sender = sender_key.public_key().public_bytes_raw()
    shared = sender_key.exchange(X25519PublicKey.from_public_bytes(base64.b64decode(public)))
    sealed = _cipher(shared, sender).encrypt(_NONCE, json.dumps(dict(env)).encode(), purpose.encode())
    return {SEALED: _text(sender + sealed)}


def has_secrets(spec: RankSpec) -> bool:
    """Return whether the spec contains secrets, which only the rank's worker may read."""
    return bool(spec.env) or bool(_redacted_fields(spec))


def _secret_fields(spec: RankSpec) -> dict[str, Any]:
    """Return the fields of a spec, other than its environment, that may contain secrets, as JSON data."""
    tracking = dataclasses.asdict(spec.tracking) if spec.tracking else None
    fields = {"params": spec.code.params, "args": spec.code.args, "tracking": tracking}
    return {name: json.loads(json.dumps(value)) for name, value in fields.items()}


def _redacted_fields(spec: RankSpec) -> dict[str, Any]:
    """Return the fields that contain secrets, with the secrets left out."""
    fields = _secret_fields(spec)
    hidden = {name: hide_secrets(value) for name, value in fields.items()}
    return {name: value for name, value in hidden.items() if value != fields[name]}


def _with_secret_fields(spec: RankSpec, fields: Mapping[str, Any]) -> RankSpec:
    """Return the spec with these values of its fields."""
    code = {name: value for name, value in fields.items() if name != "tracking"}
    if "args" in code:
        code["args"] = tuple(code["args"])
    changes: dict[str, Any] = {"code": dataclasses.replace(spec.code, **code)}
    if "tracking" in fields:
        changes["tracking"] = decode_json_data(TrackingSpec, fields["tracking"], "tracking")
    return dataclasses.replace(spec, **changes)


def encrypt_specs(specs: Sequence[RankSpec], keys: Sequence[str]) -> list[RankSpec]:
    """Encrypt the environment and the fields with secrets of each spec for the owner of its public key.

    Fields that ranks share are searched once and encrypted once for each worker: a key agreement for each of a thousand
    ranks would delay the start.
    """
    searched: dict[tuple[int, ...], tuple[Mapping[str, Any], Mapping[str, Any]]] = {}
    sealed: dict[tuple[str, str, str], dict[str, str]] = {}
    encrypted = []
    for spec, public in zip(specs, keys, strict=True):
        shared_ids = id(spec.code.params), id(spec.code.args), id(spec.tracking)  # specs share these objects
        if shared_ids not in searched:
            searched[shared_ids] = _secret_fields(spec), _redacted_fields(spec)
        fields, hidden = searched[shared_ids]
        env = {**spec.env, **{_FIELD + name: json.dumps(fields[name]) for name in hidden}}
        message = public, _purpose(spec), json.dumps(env)
        if message not in sealed:
            sealed[message] = seal(env, public, _purpose(spec))
        redacted = _with_secret_fields(spec, hidden) if hidden else spec
        encrypted.append(dataclasses.replace(redacted, env=sealed[message]))
    return encrypted


def decrypt_specs(specs: Sequence[RankSpec], key: WorkerKey) -> list[RankSpec]:
    """Return the specs as they were before encrypt_specs.

    Raises ClusterError if they were encrypted for another worker.
    """
    environments: dict[str, dict[str, str]] = {}
    decrypted = []
    for spec in specs:
        text = spec.env.get(SEALED, "")
        if text not in environments:
            environments[text] = key.open(spec.env, _purpose(spec))
        env = dict(environments[text]) if text else dict(spec.env)
        fields = {name: json.loads(env.pop(_FIELD + name)) for name in _SECRET_FIELDS if _FIELD + name in env}
        decrypted.append(dataclasses.replace(_with_secret_fields(spec, fields) if fields else spec, env=env))
    return decrypted


def _purpose(spec: RankSpec) -> str:
    """Return the text that binds a message to one attempt of a run."""
    return f"{key_prefix(spec.run_id)}{spec.attempt}"


def _cipher(shared: bytes, sender: bytes) -> ChaCha20Poly1305:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return ChaCha20Poly1305(HKDF(hashes.SHA256(), 32, salt=sender, info=_INFO).derive(shared))


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
