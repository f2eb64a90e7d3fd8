"""API keys: a file of JSON lines {id, hash, name, created, revoked}, reread when it changes.

No file: no key is asked for (and only a loopback address may be bound). Once a file was there, a
key is required for good, even if every key is revoked or the file is gone.
"""

import hashlib
import ipaddress
import json
import os
from typing import Final

from finback.shared.errors import ConfigError, Unauthenticated

_HOW: Final = "Send it as 'Authorization: Bearer KEY'; `finback keys create` makes one."


class KeyRing:
    """Which keys are good. Holds hashes only."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._ids: dict[str, str] = {}
        self._is_required = False
        self._refresh()

    @property
    def is_required(self) -> bool:
        """Must a key be given."""
        self._refresh()
        return self._is_required

    def tenant_of(self, authorization: str | None) -> str:
        """The id of the key that was given; empty if none is asked for."""
        if not self.is_required:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthenticated(f"An API key is needed. {_HOW}", reason="invalid_api_key")
        digest = hashlib.sha256(key.strip().encode()).hexdigest()
        found = self._ids.get(digest)
        if found is None:
            raise Unauthenticated(
                f"This API key is unknown or revoked. {_HOW}", reason="invalid_api_key"
            )
        return found

    def _refresh(self) -> None:
        if not self._path:
            return
        try:
            stat = os.stat(self._path)
        except FileNotFoundError:
            if self._is_required:
                self._ids, self._stamp = {}, None
            return
        stamp = (stat.st_mtime_ns, stat.st_size)
        if stamp == self._stamp:
            return
        self._is_required = True
        self._ids = _read(self._path)
        self._stamp = stamp


def _read(path: str) -> dict[str, str]:
    """Hash to id of the keys that are not revoked; a broken line counts as no key."""
    ids: dict[str, str] = {}
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            try:
                record = json.loads(line)
                if not record.get("revoked"):
                    ids[str(record["hash"]).lower()] = str(record["id"])
                else:
                    ids.pop(str(record["hash"]).lower(), None)
            except (ValueError, KeyError, AttributeError):
                continue
    return ids


def check_bind(host: str, keys: KeyRing) -> None:
    """Only a loopback address may be served without keys."""
    if keys.is_required or _is_loopback(host):
        return
    raise ConfigError(
        f"refusing to listen on {host} without API keys: create one with `finback keys create` "
        "(api_keys_file), or listen on 127.0.0.1"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
