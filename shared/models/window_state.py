"""What a windowed model keeps beside its blocks. Torch-free, so that tools may tell it too."""

from typing import Final

from finback.shared.kv.state import StatePart, StateSpec
from finback.shared.kv.state_policy import exact_replay_tokens
from finback.shared.models.config import ModelConfig

WINDOW_PART: Final = "window"


def window_state(config: ModelConfig, kv_dtype: str) -> StateSpec:
    """Keys and values of the last window of each window layer, less the token to come."""
    num_layers, window = len(config.window_layers), config.sliding_window
    part = StatePart(
        name=WINDOW_PART,
        num_layers=num_layers,
        lookback_tokens=window - 1,
        shape=(2, config.num_kv_heads, config.head_dim),
        dtype=kv_dtype,
    )
    return StateSpec(
        parts=(part,),
        replay_tokens=exact_replay_tokens(num_layers, window),
        window_tokens=window,
    )
