"""What the store may hold, and how values are packed and measured."""

import json
import sqlite3
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from finback.shared.errors import InvalidRequest, PayloadTooLarge

Item = dict[str, Any]

# Of a response with its whole context, and of a conversation: both are read at once.
MAX_VALUE_BYTES: Final = 8 * 2**20
MAX_CONVERSATION_ITEMS: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """`retention_s`: after the last change. Counts and bytes (as stored) are a tenant's."""

    retention_s: float
    max_tenant_values: int
    max_tenant_bytes: int


def raw_json(value: Any) -> bytes:
    """Compact JSON in UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def compress(raw: bytes) -> bytes:
    """JSON as it is stored."""
    return zlib.compress(raw, 1)


def pack(value: Any) -> bytes:
    """A value as it is stored."""
    return compress(raw_json(value))


def unpack(packed: bytes) -> Any:
    """The value again."""
    return json.loads(zlib.decompress(packed))


def raw_items(items: Sequence[Item]) -> bytes:
    """Items one a line: encoded one by one, so that the event loop gets its turn in between."""
    return b"\n".join(map(raw_json, items))


def unpack_items(packed: bytes) -> list[Item]:
    """The items of compressed lines."""
    return [json.loads(line) for line in zlib.decompress(packed).split(b"\n") if line]


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
    connection: sqlite3.Connection,
    limits: StoreLimits,
    tenant: str,
    num_bytes: int,
    *,
    num_values: int = 1,
) -> None:
    """Drop the tenant's oldest finished responses until `num_values` of `num_bytes` more fit.

    Raises `InvalidRequest` if what is left (conversations, unfinished work) fills the quota.
    """
    values, held = usage_of(connection, tenant)
    over_values = values + num_values - limits.max_tenant_values
    over_bytes = held + num_bytes - limits.max_tenant_bytes
    dropped: list[tuple[str]] = []
    if over_values > 0 or over_bytes > 0:
        oldest = connection.execute(
            """SELECT id, bytes FROM responses WHERE tenant = ?
                AND status NOT IN ('queued', 'in_progress') ORDER BY created_s""",
            (tenant,),
        )
        for name, freed in oldest:
            if over_values <= 0 and over_bytes <= 0:
                break
            dropped.append((name,))
            over_values, over_bytes = over_values - 1, over_bytes - freed
    if over_values > 0 or over_bytes > 0:
        raise InvalidRequest(
            f"the quota of stored values is used up: {values} of {limits.max_tenant_values} "
            f"values, {held} of {limits.max_tenant_bytes} bytes; delete some, or send store=false",
            param="store",
            reason="storage_quota_exceeded",
        )
    connection.executemany("DELETE FROM responses WHERE id = ?", dropped)


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
