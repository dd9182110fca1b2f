"""Seals what is secret in ranks' orders on its way through a scheduler: who sees its tasks can't read it.

X25519 with a key of its own for each message, HKDF-SHA256, ChaCha20-Poly1305 (RFC 7748, 5869, 8439). It guards
against those who look: whoever can make a scheduler run code can make a worker tell.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ddptrain.errors import ClusterError
from ddptrain.redact import hide_options
from ddptrain.spec import RankSpec

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

SEALED = "DDPTRAIN_SEALED_ENV"  # the one variable that stands for all
_TRACKING = "=tracking"  # beside the variables, none of which can be called so
_INFO = b"ddptrain rank environment"
_KEY_BYTES = 32
_NONCE = bytes(12)  # a key is used once


class Opener:
    """A worker's key: who knows its `public` half can seal, and only this process can open. Made when asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._private: bytes | None = None

    def _key(self) -> bytes:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        with self._lock:
            if self._private is None:
                self._private = X25519PrivateKey.generate().private_bytes_raw()
            return self._private

    @property
    def public(self) -> str:
        """What the driver seals with."""
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        return _text(X25519PrivateKey.from_private_bytes(self._key()).public_key().public_bytes_raw())

    def open(self, env: Mapping[str, str], purpose: str) -> dict[str, str]:
        """The environment as it was before it was sealed; one that was not sealed is returned as it is.

        Raises ClusterError where it was sealed for another worker, or for another purpose.
        """
        if SEALED not in env:
            return dict(env)
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

        try:
            data = base64.b64decode(env[SEALED], validate=True)
            own = X25519PrivateKey.from_private_bytes(self._key())
            shared = own.exchange(X25519PublicKey.from_public_bytes(data[:_KEY_BYTES]))
            text = _cipher(shared, data[:_KEY_BYTES]).decrypt(_NONCE, data[_KEY_BYTES:], purpose.encode())
        except (ValueError, InvalidTag) as error:
            raise ClusterError(
                "the environment of a rank was not sealed for this worker: it was started again in between; try again"
            ) from error
        return {str(name): str(value) for name, value in json.loads(text).items()}


def seal(env: Mapping[str, str], public: str, purpose: str) -> dict[str, str]:
    """The environment as only the owner of `public` can read it, and for this purpose alone; nothing stays nothing."""
    if not env:
        return {}
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    own = X25519PrivateKey.generate()
    sender = own.public_key().public_bytes_raw()
    shared = own.exchange(X25519PublicKey.from_public_bytes(base64.b64decode(public)))
    return {
        SEALED: _text(
            sender + _cipher(shared, sender).encrypt(_NONCE, json.dumps(dict(env)).encode(), purpose.encode())
        )
    }


def has_secrets(spec: RankSpec) -> bool:
    """Whether nobody but its worker is to read all of a rank's order."""
    return bool(spec.env) or _tells_too_much(spec)


def _tells_too_much(spec: RankSpec) -> bool:
    """Whether there are secrets among the options of its trackers."""
    return _shown(spec) != spec.tracking


def _shown(spec: RankSpec) -> dict[str, Any]:
    """What its trackers are told, less these secrets."""
    told = dict(spec.tracking)
    if told:
        told["trackers"] = [{**each, "options": hide_options(each.get("options"))} for each in told["trackers"]]
    return told


def seal_spec(spec: RankSpec, public: str) -> RankSpec:
    """A rank's order as only the owner of `public` can read all of it: the environment, and options with secrets."""
    if not _tells_too_much(spec):
        return dataclasses.replace(spec, env=seal(spec.env, public, spec.key))
    env = {**spec.env, _TRACKING: json.dumps(spec.tracking)}
    return dataclasses.replace(spec, env=seal(env, public, spec.key), tracking=_shown(spec))


def open_spec(spec: RankSpec, opener: Opener) -> RankSpec:
    """The order as it was before it was sealed. Raises ClusterError where it was sealed for another worker."""
    env = opener.open(spec.env, spec.key)
    told = env.pop(_TRACKING, None)
    return dataclasses.replace(spec, env=env, tracking=spec.tracking if told is None else json.loads(told))


def _cipher(shared: bytes, sender: bytes) -> ChaCha20Poly1305:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return ChaCha20Poly1305(HKDF(hashes.SHA256(), 32, salt=sender, info=_INFO).derive(shared))


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
