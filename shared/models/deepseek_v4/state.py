"""What a V4 sequence keeps beside its blocks, as parts of a state slot, and both kinds as one memory.

Window rows are of all layers; a compressor's are its projected rows, contents and biased gates: those
of the open window, and where entries overlap the window before it. Draft stages have none here.
"""

from collections.abc import Iterator
from typing import Final

from finback.shared.kv.state import StatePart, StateSpec
from finback.shared.kv.state_policy import exact_replay_tokens
from finback.shared.models.deepseek_v4.config import BLOCK_TOKENS, CSA_RATIO, HCA_RATIO, V4Config
from finback.shared.models.deepseek_v4.memory import LayerMemory, Tail
from finback.shared.models.deepseek_v4.memory_shape import has_indexer, has_overlap
from finback.shared.models.deepseek_v4.pool import V4Pool
from finback.shared.models.state_slots import StateSlots

WINDOW: Final = "window"
_NAMES: Final = {CSA_RATIO: "csa", HCA_RATIO: "hca"}


def state_spec(config: V4Config, kv_dtype: str) -> StateSpec:
    """All state of a sequence; the tails of compressors are float32 whatever the pool is."""
    parts = [
        StatePart(
            name=WINDOW,
            num_layers=config.num_layers,
            lookback_tokens=config.window - 1,
            shape=(config.head_dim,),
            dtype=kv_dtype,
        )
    ]
    for ratio in (CSA_RATIO, HCA_RATIO):
        layers = config.layers_of(ratio)
        if layers:
            parts += _tail_parts(_NAMES[ratio], ratio, len(layers), config.head_dim)
        if layers and has_indexer(ratio):
            name = f"{_NAMES[ratio]}_index"
            parts += _tail_parts(name, ratio, len(layers), config.index_head_dim)
    return StateSpec(
        parts=tuple(parts),
        replay_tokens=exact_replay_tokens(config.num_layers, config.window),
        window_tokens=config.window,
    )


def _tail_parts(name: str, ratio: int, num_layers: int, width: int) -> Iterator[StatePart]:
    is_double = has_overlap(ratio)
    for kind in ("content", "gate"):
        yield StatePart(
            name=f"{name}_{kind}",
            num_layers=num_layers,
            lookback_tokens=ratio if is_double else 0,
            period_tokens=ratio,
            shape=(width * (2 if is_double else 1),),
            dtype="f32",
        )


def layer_memories(config: V4Config, pool: V4Pool, state: StateSlots) -> tuple[LayerMemory, ...]:
    """Views of both kinds of memory, layer by layer."""
    counts = dict.fromkeys(_NAMES, 0)
    found = []
    for layer, ratio in enumerate(config.ratios):
        ring = state.rows[WINDOW][layer]
        if not ratio:
            found.append(LayerMemory(ring_rows=ring.shape[1], ring=ring.flatten(0, 1)))
            continue
        name, place = _NAMES[ratio], counts[ratio]
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
