"""What the store may hold, and how values are packed and measured."""

import json
import sqlite3
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from finback.shared.errors import InvalidRequest, PayloadTooLarge

Item = dict[str, Any]

# Of a response with its whole context, and of a conversation: both are read at once.
MAX_VALUE_BYTES: Final = 8 * 2**20
MAX_CONVERSATION_ITEMS: Final = 10_000
_EVICTED_AT_ONCE: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """`retention_s`: after the last change. Counts and bytes (as stored) are a tenant's."""

    retention_s: float
    max_tenant_values: int
    max_tenant_bytes: int


def raw_json(value: Any) -> bytes:
    """Compact JSON in UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def pack(value: Any) -> bytes:
    """A value as it is stored."""
    return zlib.compress(raw_json(value), 1)


def unpack(packed: bytes) -> Any:
    """The value again."""
    return json.loads(zlib.decompress(packed))


def check_value(num_bytes: int, what: str, param: str) -> None:
    """Refuse what is too large to be read at once."""
    if num_bytes > MAX_VALUE_BYTES:
        raise PayloadTooLarge(
            f"{what} would have {num_bytes} bytes; at most {MAX_VALUE_BYTES} can be kept",
            param=param,
            reason="stored_value_too_large",
        )


def usage_of(connection: sqlite3.Connection, tenant: str) -> tuple[int, int]:
    """(values, bytes) that a tenant has stored."""
    total = [0, 0]
    for table in ("responses", "conversations"):
        query = f"SELECT count(*), coalesce(sum(bytes), 0) FROM {table} WHERE tenant = ?"
        count, num_bytes = connection.execute(query, (tenant,)).fetchone()
        total[0] += count
        total[1] += num_bytes
    return total[0], total[1]


def make_room(
    connection: sqlite3.Connection, limits: StoreLimits, tenant: str, num_bytes: int
) -> None:
    """Drop the tenant's oldest finished responses until a value of `num_bytes` more fits.

    Raises `InvalidRequest` if what is left (conversations, unfinished work) fills the quota.
    """
    while True:
        values, held = usage_of(connection, tenant)
        if values < limits.max_tenant_values and held + num_bytes <= limits.max_tenant_bytes:
            return
        oldest = connection.execute(
            """DELETE FROM responses WHERE id IN (
                SELECT id FROM responses WHERE tenant = ? AND status NOT IN ('queued', 'in_progress')
                ORDER BY created_s LIMIT ?)""",
            (tenant, max(1, min(_EVICTED_AT_ONCE, values - limits.max_tenant_values + 1))),
        )
        if not oldest.rowcount:
            raise InvalidRequest(
                f"the quota of stored values is used up: {values} of {limits.max_tenant_values} "
                f"values, {held} of {limits.max_tenant_bytes} bytes; delete some, or send "
                "store=false",
                param="store",
                reason="storage_quota_exceeded",
            )


def metadata_of(value: Any, param: str = "metadata") -> dict[str, str]:
    """Metadata as OpenAI limits it: 16 pairs, keys of 64 characters, values of 512."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or len(value) > 16:
        raise InvalidRequest(
            f"Invalid value for '{param}': it must be an object with at most 16 pairs.",
            param=param,
            reason="invalid_value",
        )
    for key, text in value.items():
        if len(key) > 64 or not isinstance(text, str) or len(text) > 512:
            raise InvalidRequest(
                f"Invalid value for '{param}': keys have at most 64 characters, values are "
                "strings of at most 512.",
                param=f"{param}.{key[:64]}",
                reason="invalid_value",
            )
    return dict(value)
