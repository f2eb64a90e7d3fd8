"""Taking a prefix out into a file, and in again under another cluster's key."""

from collections.abc import Sequence
from typing import BinaryIO

from finback.services.cache.segments.appending import Appending
from finback.services.cache.segments.exchange_format import (
    MAX_BLOCKS,
    PrefixHead,
    read_blocks,
    read_head,
    write_block,
    write_head,
)
from finback.services.cache.segments.lookups import Lookups
from finback.services.cache.segments.record import BlockRecord, Entry, Miss, check_record
from finback.services.cache.segments.state import State
from finback.shared.errors import InvalidRequest, NotFound
from finback.shared.kv import block_hash


def export(
    state: State,
    lookups: Lookups,
    salt: str,
    hashes: Sequence[bytes],
    file: BinaryIO,
    block_size: int,
) -> int:
    """Write the leading run of these blocks, from a prompt's first on; returns how many.

    Raises `NotFound` if the first is not there, `Miss` if one cannot be read.
    """
    if not 0 < len(hashes) <= MAX_BLOCKS:
        raise InvalidRequest(f"a prefix has 1 to {MAX_BLOCKS} blocks", param="hashes")
    run = _leading(lookups.find(salt, hashes))
    if not run or run[0].record.first_block != 0:
        raise NotFound("the prefix's first block is not in the file tier")
    if any(entry.record.length <= 4 * block_size for entry in run):
        raise InvalidRequest(f"block_size {block_size}: the blocks are shorter", param="block_size")
    first = run[0].record
    head = PrefixHead(
        salt=salt,
        block_size=block_size,
        num_blocks=len(run),
        tenant=first.tenant,
        traffic_class=first.traffic_class,
    )
    write_head(file, head)
    for entry in run:
        record = entry.record
        with state.pool.lend(record.length) as out:
            [outcome] = lookups.read(salt, [record.hash], [out])
            if isinstance(outcome, Miss):
                raise outcome
            write_block(file, out)
    return len(run)


def _leading(found: Sequence[Entry | Miss]) -> list[Entry]:
    run: list[Entry] = []
    for entry in found:
        if isinstance(entry, Miss):
            break
        run.append(entry)
    return run


def import_(
    state: State,
    appending: Appending,
    file: BinaryIO,
    cluster_key: bytes,
    *,
    cache_salt: str,
    tenant: str | None,
    traffic_class: str | None,
    expires_unix_s: float,
) -> tuple[str, list[bytes]]:
    """Store a file's blocks under this cluster's hashes; returns (salt, hashes that it has now).

    `cache_salt` is the tenant's here. Ends early where the store takes no more.
    """
    head = read_head(file)
    parent = block_hash.prompt_root(cluster_key, cache_salt.encode(), head.block_size)
    kept: list[bytes] = []
    for number, (payload, checksum) in enumerate(read_blocks(file, head)):
        parent = block_hash.extend(parent, payload[-4 * head.block_size :], cluster_key)
        record = BlockRecord(
            salt=head.salt,
            hash=parent,
            length=len(payload),
            checksum=checksum,
            expires_unix_s=expires_unix_s,
            tenant=head.tenant if tenant is None else tenant,
            traffic_class=head.traffic_class if traffic_class is None else traffic_class,
            created_unix_s=state.now(),
            used_unix_s=state.now(),
            first_block=number,
        )
        check_record(record, len(payload))
        with state.writing:
            is_new = appending.put(record, memoryview(payload))
        if not is_new and state.run(lambda: state.index.get(head.salt, parent)) is None:  # noqa: B023  # runs at once
            break
        kept.append(parent)
    return head.salt, kept
