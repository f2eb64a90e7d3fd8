"""What engines, gateways and people ask of a model's configuration, whatever its family. Torch-free."""

from typing import Protocol

from finback.shared.kv.layout import BlockGeometry


class ModelFacts(Protocol):
    """The part that all configurations have in common."""

    @property
    def architecture(self) -> str:
        """The family's name."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""

    @property
    def hidden_size(self) -> int:
        """Elements of a hidden state."""

    @property
    def num_layers(self) -> int:
        """All layers."""

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus completion, in tokens."""

    def describe(self) -> str:
        """A stable text of all that decides the numbers, for the salt of KV blocks."""

    def block_tokens(self, asked: int) -> int:
        """Tokens of a KV block if `asked` is what the settings want, 0 for the model's own choice.

        Raises `ConfigError` for a size that this model cannot have.
        """

    def kv_geometry(self, block_size: int, kv_dtype: str) -> BlockGeometry:
        """What a block of KV looks like in host memory."""
