"""API keys: a file of JSON lines, reread when it changes; what each key may do.

No file: no key is asked for (and only a loopback address may be bound). Once a file was there, a
key is required for good, even if every key is revoked or the file is gone.
"""

import hashlib
import ipaddress
import os
from collections.abc import Mapping
from typing import Final

from finback.services.gateway.grant import OPEN, Grant, KeyLine, grants_of, read_line
from finback.shared.clock import unix_s
from finback.shared.errors import ConfigError, Unauthenticated

_HOW: Final = "Send it as 'Authorization: Bearer KEY'; `finback keys create` makes one."


class KeyRing:
    """Which keys are good. Holds hashes only."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._grants: Mapping[str, Grant] = {}
        self._is_required = False
        self._refresh()

    @property
    def is_required(self) -> bool:
        """Must a key be given."""
        self._refresh()
        return self._is_required

    def grant_of(self, authorization: str | None) -> Grant:
        """What the key that was given allows; everything if none is asked for.

        Found by the hash of the whole key in a table: how long that takes tells something about
        hashes at most, and nobody can choose a key by its hash. So nothing is compared in constant
        time.
        """
        if not self.is_required:
            return OPEN
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthenticated(f"An API key is needed. {_HOW}", reason="invalid_api_key")
        digest = hashlib.sha256(key.strip().encode()).hexdigest()
        found = self._grants.get(digest)
        if found is None:
            raise Unauthenticated(
                f"This API key is unknown or revoked. {_HOW}", reason="invalid_api_key"
            )
        if found.expires and unix_s() >= found.expires:
            raise Unauthenticated(f"This API key has expired. {_HOW}", reason="invalid_api_key")
        return found

    def tenant_of(self, authorization: str | None) -> str:
        """The tenant of the key that was given; empty if none is asked for."""
        return self.grant_of(authorization).tenant

    def _refresh(self) -> None:
        if not self._path:
            return
        try:
            stat = os.stat(self._path)
        except FileNotFoundError:
            if self._is_required:
                self._grants, self._stamp = {}, None
            return
        # The file is replaced, never written over: the inode tells what a coarse clock may not.
        stamp = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        if stamp == self._stamp:
            return
        self._is_required = True
        self._grants = grants_of(_read(self._path))
        self._stamp = stamp


def _read(path: str) -> list[KeyLine]:
    """The keys of a file, revoked ones too; a broken line counts as no key."""
    with open(path, encoding="utf-8", errors="replace") as lines:
        return [found for line in lines if (found := read_line(line)) is not None]


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
