"""The shape of a model, read from GGUF metadata or a Hugging Face config.json. Torch-free."""

from dataclasses import asdict, dataclass
from typing import Final

from finback.shared.kv.layout import BlockGeometry

ARCHITECTURES: Final = ("llama", "qwen3")
DEFAULT_BLOCK_TOKENS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Rotary frequency scaling; `kind` is "linear" or "llama3".

    linear: all frequencies / factor. llama3: frequencies whose wavelength is above
    `original_max_len / low_freq_factor` are divided by `factor`, those below
    `original_max_len / high_freq_factor` are kept, the ones between are blended.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A dense decoder-only transformer of the Llama or the Qwen3 family.

    `qk_norm`: RMS norm over each head's query and key before the rotation (Qwen3).
    `attention_bias`: q, k, v (and, when `output_bias`, o) have a bias. Sizes are in elements.
    `window_layers`: those whose tokens see the last `sliding_window` tokens only, themselves among
    them; all others see their whole context.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    max_model_len: int
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    window_layers: tuple[int, ...] = ()
    sliding_window: int = 0

    @property
    def num_kv_layers(self) -> int:
        """Layers whose keys and values lie in blocks; those of the others are state."""
        return self.num_layers - len(self.window_layers)

    @property
    def q_size(self) -> int:
        """Elements of all query heads of a token."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of all key (or value) heads of a token."""
        return self.num_kv_heads * self.head_dim

    def block_tokens(self, asked: int) -> int:
        """See `ModelFacts`: any size will do."""
        return asked or DEFAULT_BLOCK_TOKENS

    def kv_geometry(self, block_size: int, kv_dtype: str) -> BlockGeometry:
        """See `ModelFacts`: keys and values of the layers that see their whole context."""
        return BlockGeometry(
            block_size=block_size,
            num_layers=self.num_kv_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            kv_dtype=kv_dtype,
        )

    def describe(self) -> str:
        """A stable text of all that decides the numbers, for the salt of KV blocks."""
        facts = asdict(self)
        if not self.window_layers:  # so that dense models keep the salts they had
            del facts["window_layers"], facts["sliding_window"]
        return repr(sorted(facts.items()))
