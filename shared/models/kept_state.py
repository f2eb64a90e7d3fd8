"""What a sequence of a model keeps beside its blocks, whatever the family. Torch-free."""

from finback.shared.kv.state import StateSpec
from finback.shared.models.config import ModelConfig
from finback.shared.models.deepseek_v4.config import V4Config
from finback.shared.models.deepseek_v4.state_parts import state_spec
from finback.shared.models.window_state import window_state


def kept_state(config: ModelConfig | V4Config, kv_dtype: str) -> StateSpec | None:
    """None: all that a sequence needs lies in its blocks."""
    if isinstance(config, V4Config):
        return state_spec(config, kv_dtype)
    return window_state(config, kv_dtype) if config.window_layers else None
