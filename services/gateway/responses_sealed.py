"""`reasoning.encrypted_content`: thoughts that a client carries but cannot read or change.

Encrypt-then-MAC from the standard library: the text is XORed with SHAKE-256(key, nonce), and a
keyed BLAKE2b over tenant, nonce and cipher text guards it (the same construction as any stream
cipher with a MAC; SHAKE-256 as the generator: FIPS 202). Keys come from the cluster's secret, so
that every gateway of the cluster reads what another has sealed, for the same tenant alone.
"""

import base64
import binascii
import hashlib
import hmac
import secrets
from typing import Final

from finback.shared.errors import InvalidRequest

_VERSION: Final = b"\x01"
_NONCE_BYTES: Final = 24
_TAG_BYTES: Final = 32
MAX_SEALED_CHARS: Final = 8 * 2**20


class Seals:
    """Seals and opens. Without a cluster key a fresh one is drawn, good until the process ends."""

    def __init__(self, cluster_key: bytes) -> None:
        secret = cluster_key or secrets.token_bytes(32)
        self._key = hashlib.blake2b(key=secret, person=b"finback-think").digest()

    def seal(self, text: str, tenant: str) -> str:
        """The text, for this tenant's eyes of ours."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        body = self._mask(text.encode(), nonce)
        sealed = _VERSION + nonce + body
        return base64.b64encode(sealed + self._tag(sealed, tenant)).decode()

    def unseal(self, sealed: str, tenant: str) -> str:
        """The text again. Raises `InvalidRequest` for what was not sealed here, for this tenant."""
        try:
            raw = base64.b64decode(sealed, validate=True)
        except (binascii.Error, ValueError):
            raise _unreadable() from None
        body, tag = raw[:-_TAG_BYTES], raw[-_TAG_BYTES:]
        is_whole = len(body) > _NONCE_BYTES and body[:1] == _VERSION
        if not is_whole or not hmac.compare_digest(tag, self._tag(body, tenant)):
            raise _unreadable()
        nonce = body[1 : 1 + _NONCE_BYTES]
        return self._mask(body[1 + _NONCE_BYTES :], nonce).decode()

    def _mask(self, data: bytes, nonce: bytes) -> bytes:
        stream = hashlib.shake_256(self._key[:32] + nonce).digest(len(data))
        mixed = int.from_bytes(data, "little") ^ int.from_bytes(stream, "little")
        return mixed.to_bytes(len(data), "little")

    def _tag(self, body: bytes, tenant: str) -> bytes:
        owner = hashlib.blake2b(tenant.encode(), digest_size=32).digest()
        return hashlib.blake2b(owner + body, key=self._key[32:], digest_size=_TAG_BYTES).digest()


def _unreadable() -> InvalidRequest:
    return InvalidRequest(
        "the encrypted_content of a reasoning item was not made here for this key's owner, or was "
        "changed",
        param="input",
        reason="invalid_encrypted_content",
    )
