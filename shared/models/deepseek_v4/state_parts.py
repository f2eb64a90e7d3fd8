"""What a V4 sequence keeps beside its blocks, as parts of a state slot. Torch-free.

Window rows are of all layers; a compressor's are its projected rows, contents and biased gates: those
of the open window, and where entries overlap the window before it. Draft stages have none here.
"""

from collections.abc import Iterator
from typing import Final

from finback.shared.kv.state import StatePart, StateSpec
from finback.shared.kv.state_policy import exact_replay_tokens
from finback.shared.models.deepseek_v4.config import CSA_RATIO, HCA_RATIO, V4Config
from finback.shared.models.deepseek_v4.memory_shape import has_indexer, has_overlap

WINDOW: Final = "window"
TAIL_NAMES: Final = {CSA_RATIO: "csa", HCA_RATIO: "hca"}


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
            parts += _tail_parts(TAIL_NAMES[ratio], ratio, len(layers), config.head_dim)
        if layers and has_indexer(ratio):
            name = f"{TAIL_NAMES[ratio]}_index"
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
