"""Pure: which part of a prompt is computed by prefill, and which blocks are handed over.

Decode always runs the last prompt token itself (its first step samples from it), so KV is needed
for the `num_prompt_tokens - 1` tokens before it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """`num_tokens`: prompt tokens whose KV decode must have before its first step.

    Blocks `first_block` .. `num_blocks - 1` are handed over (the last may be partial); none when
    `first_block == num_blocks`, and then decode computes what it lacks itself.
    """

    num_tokens: int
    first_block: int
    num_blocks: int

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to compute here and nothing to hand over."""
        return self.first_block >= self.num_blocks


def split_prompt(
    num_prompt_tokens: int,
    num_decode_cached: int,
    num_prefill_cached: int,
    block_size: int,
    decode_computes_tokens: int = 0,
) -> Split:
    """Skip what decode has, and skip everything where decode is far better placed.

    That is so when decode lacks a block at most while prefill would have to compute the whole
    history first: the next turn of a conversation, whose answers only decode has ever computed.
    It is so as well when decode lacks no more than the router would have it compute.
    """
    num_tokens = max(0, num_prompt_tokens - 1)
    num_blocks = -(-num_tokens // block_size)
    first_block = min(num_decode_cached // block_size, num_blocks)
    lacks_at_decode = num_tokens - num_decode_cached
    lacks_here = num_tokens - num_prefill_cached
    is_better_there = lacks_at_decode <= block_size and lacks_here >= lacks_at_decode + block_size
    if lacks_at_decode <= decode_computes_tokens or (num_decode_cached > 0 and is_better_there):
        first_block = num_blocks
    return Split(num_tokens=num_tokens, first_block=first_block, num_blocks=num_blocks)


def ready_blocks(num_computed_tokens: int, split: Split, block_size: int) -> int:
    """Blocks that may be handed over: full ones, and the partial last one when all is computed."""
    if num_computed_tokens >= split.num_tokens:
        return split.num_blocks
    return num_computed_tokens // block_size


def tokens_in_block(block_index: int, split: Split, block_size: int) -> int:
    """Tokens that a handed-over block holds (fewer than `block_size` in the last one)."""
    return min(block_size, split.num_tokens - block_index * block_size)
