"""A V4 model's block KV and its state slots as one memory, layer by layer."""

from finback.shared.models.deepseek_v4.config import BLOCK_TOKENS, V4Config
from finback.shared.models.deepseek_v4.memory import LayerMemory, Tail
from finback.shared.models.deepseek_v4.memory_shape import has_indexer
from finback.shared.models.deepseek_v4.pool import V4Pool
from finback.shared.models.deepseek_v4.state_parts import TAIL_NAMES, WINDOW
from finback.shared.models.state_slots import StateSlots


def layer_memories(config: V4Config, pool: V4Pool, state: StateSlots) -> tuple[LayerMemory, ...]:
    """Views of both kinds of memory, layer by layer."""
    counts = dict.fromkeys(TAIL_NAMES, 0)
    found = []
    for layer, ratio in enumerate(config.ratios):
        ring = state.rows[WINDOW][layer]
        if not ratio:
            found.append(LayerMemory(ring_rows=ring.shape[1], ring=ring.flatten(0, 1)))
            continue
        name, place = TAIL_NAMES[ratio], counts[ratio]
        counts[ratio] += 1
        found.append(
            LayerMemory(
                ring_rows=ring.shape[1],
                ring=ring.flatten(0, 1),
                per_block=BLOCK_TOKENS // ratio,
                entries=pool.entries[layer],
                tail=_tail(state, name, place),
                index_keys=pool.index_keys[layer],
                index_tail=_tail(state, f"{name}_index", place) if has_indexer(ratio) else None,
            )
        )
    return tuple(found)


def _tail(state: StateSlots, name: str, place: int) -> Tail:
    contents = state.rows[f"{name}_content"][place]
    gates = state.rows[f"{name}_gate"][place]
    return Tail(
        num_rows=contents.shape[1], contents=contents.flatten(0, 1), gates=gates.flatten(0, 1)
    )
