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
_PARTS = ("params", "args", "tracking")
_INFO = b"ddptrain rank environment"
_KEY_BYTES = 32
_NONCE = bytes(12)  # each key is used once


class WorkerKey:
    """The key of a worker, made on first use: its `public` half encrypts, and only this process can decrypt."""

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
        """The public key, with which the driver encrypts."""
        return _text(self._key().public_key().public_bytes_raw())

    def open(self, env: Mapping[str, str], purpose: str) -> dict[str, str]:
        """Decrypt an environment if it is encrypted. Raises ClusterError if that is for another worker or purpose."""
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
    """Encrypt an environment for the owner of `public` and this purpose; an empty one stays empty."""
    if not env:
        return {}
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    own = X25519PrivateKey.generate()
    sender = own.public_key().public_bytes_raw()
    shared = own.exchange(X25519PublicKey.from_public_bytes(base64.b64decode(public)))
    sealed = _cipher(shared, sender).encrypt(_NONCE, json.dumps(dict(env)).encode(), purpose.encode())
    return {SEALED: _text(sender + sealed)}


def has_secrets(spec: RankSpec) -> bool:
    """Whether only the rank's worker may read all of the spec."""
    return bool(spec.env) or bool(_hidden_parts(spec))


def _parts(spec: RankSpec) -> dict[str, Any]:
    """The parts of a spec, besides its environment, that may contain secrets, as JSON data."""
    tracking = dataclasses.asdict(spec.tracking) if spec.tracking else None
    parts = {"params": spec.code.params, "args": spec.code.args, "tracking": tracking}
    return {name: json.loads(json.dumps(value)) for name, value in parts.items()}


def _hidden_parts(spec: RankSpec) -> dict[str, Any]:
    """Those of the parts that contain secrets, without these secrets."""
    parts = _parts(spec)
    hidden = {name: hide_secrets(value) for name, value in parts.items()}
    return {name: value for name, value in hidden.items() if value != parts[name]}


def _with_parts(spec: RankSpec, parts: Mapping[str, Any]) -> RankSpec:
    """The spec with these parts instead of its own."""
    code = {name: value for name, value in parts.items() if name != "tracking"}
    if "args" in code:
        code["args"] = tuple(code["args"])
    changes: dict[str, Any] = {"code": dataclasses.replace(spec.code, **code)}
    if "tracking" in parts:
        changes["tracking"] = decode_json_data(TrackingSpec, parts["tracking"], "tracking")
    return dataclasses.replace(spec, **changes)


def encrypt_specs(specs: Sequence[RankSpec], keys: Sequence[str]) -> list[RankSpec]:
    """Encrypt environments and parts with secrets, so that only the owner of the public key of each spec can read them.

    What ranks have in common is searched once, and encrypted once for each worker: with a key agreement for each of a
    thousand ranks, their start would take longer.
    """
    found: dict[tuple[int, ...], tuple[Mapping[str, Any], Mapping[str, Any]]] = {}
    sealed: dict[tuple[str, str, str], dict[str, str]] = {}
    encrypted = []
    for spec, public in zip(specs, keys, strict=True):
        of_spec = id(spec.code.params), id(spec.code.args), id(spec.tracking)  # specs share these objects
        if of_spec not in found:
            found[of_spec] = _parts(spec), _hidden_parts(spec)
        parts, hidden = found[of_spec]
        env = {**spec.env, **{_FIELD + name: json.dumps(parts[name]) for name in hidden}}
        message = public, _purpose(spec), json.dumps(env)
        if message not in sealed:
            sealed[message] = seal(env, public, _purpose(spec))
        encrypted.append(dataclasses.replace(_with_parts(spec, hidden) if hidden else spec, env=sealed[message]))
    return encrypted


def decrypt_specs(specs: Sequence[RankSpec], opener: WorkerKey) -> list[RankSpec]:
    """Return the specs as they were before encrypt_specs. Raises ClusterError if another worker is to read them."""
    opened: dict[str, dict[str, str]] = {}
    decrypted = []
    for spec in specs:
        text = spec.env.get(SEALED, "")
        if text not in opened:
            opened[text] = opener.open(spec.env, _purpose(spec))
        env = dict(opened[text]) if text else dict(spec.env)
        parts = {name: json.loads(env.pop(_FIELD + name)) for name in _PARTS if _FIELD + name in env}
        decrypted.append(dataclasses.replace(_with_parts(spec, parts) if parts else spec, env=env))
    return decrypted


def _purpose(spec: RankSpec) -> str:
    """What a message is bound to: one attempt of a run."""
    return f"{key_prefix(spec.run_id)}{spec.attempt}"


def _cipher(shared: bytes, sender: bytes) -> ChaCha20Poly1305:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return ChaCha20Poly1305(HKDF(hashes.SHA256(), 32, salt=sender, info=_INFO).derive(shared))


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
