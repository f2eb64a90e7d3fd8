"""Masks through a ring of shared memory (`byte_ring`): which bytes of a reply lie there, and bringing them back."""

from dataclasses import replace
from pathlib import Path

from finback.shared.lanes.byte_ring import Left, RingReader, RingWriter
from finback.shared.wire.messages.sampler import Mask, MaskReply


def mask_folder(shm_dir: str, stack_id: str) -> Path:
    """Where the samplers of a stack have their rings."""
    return Path(shm_dir) / stack_id / "masks"


def leave_mask(ring: RingWriter, mask: Mask) -> Mask:
    """The mask with its bytes in the ring; as it is if there are none, or too many."""
    if not mask.bitmask:
        return mask
    left = ring.leave(mask.bitmask + mask.ahead_masks)
    if left is None:
        return mask
    at = (left.offset, len(mask.bitmask), len(mask.ahead_masks), left.checksum)
    return replace(mask, bitmask=b"", ahead_masks=b"", ring_at=at)


def take_mask(rings: RingReader, ring: str, mask: Mask) -> Mask | None:
    """The whole mask; None if its bytes were overwritten: it is to be asked for again."""
    if not mask.ring_at:
        return mask
    if len(mask.ring_at) != 4:  # of another version
        return None
    offset, num_own, num_ahead, checksum = mask.ring_at
    data = rings.take(ring, Left(offset, num_own + num_ahead, checksum))
    if data is None:
        return None
    return replace(mask, bitmask=data[:num_own], ahead_masks=data[num_own:], ring_at=())


def take_masks(rings: RingReader, reply: MaskReply) -> tuple[Mask, ...]:
    """The masks of a reply that could be read."""
    taken = (take_mask(rings, reply.ring, mask) for mask in reply.masks)
    return tuple(mask for mask in taken if mask is not None)
