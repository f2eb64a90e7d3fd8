"""How blocks and their owners are named in requests and headers: checked here, once."""

from hashlib import blake2b
from typing import Final

from finback.services.cache.index import split_hashes
from finback.shared.errors import InvalidRequest
from finback.shared.lanes.arena_format import MAX_SALT_BYTES

MAX_LOOKUP: Final = 65_536  # hashes in one lookup
MAX_READ: Final = 64  # hashes in one read


def tenant_digest(tenant: str) -> bytes:
    """What a slot's header says of whom it belongs to, 16 bytes."""
    return blake2b(tenant.encode(), digest_size=16, person=b"finback-tenant").digest()


def check_salt(salt: str) -> None:
    """InvalidRequest unless it can be a block's salt."""
    if not 0 < len(salt.encode()) <= MAX_SALT_BYTES:
        raise InvalidRequest(f"salt must have 1 to {MAX_SALT_BYTES} bytes", param="salt")


def checked_hashes(salt: str, hashes: bytes, limit: int) -> list[bytes]:
    """Hashes that travelled joined, 1 to `limit` of them; InvalidRequest names the field."""
    check_salt(salt)
    try:
        found = split_hashes(hashes)
    except ValueError as error:
        raise InvalidRequest(str(error), param="hashes") from None
    if not 0 < len(found) <= limit:
        raise InvalidRequest(f"hashes must be 1 to {limit}, not {len(found)}", param="hashes")
    return found


def hashes_of(salt: str, hashes: bytes) -> list[bytes]:
    """The hashes of a lookup, checked."""
    return checked_hashes(salt, hashes, MAX_LOOKUP)
