"""The options of `LLM`, checked before a model is opened, and the engine's settings from them."""

import numbers
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from finback.shared.cores import num_cores
from finback.shared.engine.config import EngineConfig
from finback.shared.engine.device import choose_device
from finback.shared.models.source import EMBEDDED, ModelSource
from finback.shared.offline.errors import InvalidOption

_NUM_SEQS: Final = 64
_BATCHED_TOKENS: Final = 512
_DTYPES: Final = ("auto", "f32", "f16", "bf16")
_CHOICES: Final = {
    "device": ("auto", "cpu", "cuda"),
    "weights_dtype": (*_DTYPES, "stored"),
    "kv_dtype": _DTYPES,
}
_LIMITS: Final = {
    "max_model_len": 2**24,
    "max_num_seqs": 2**16,
    "max_num_batched_tokens": 2**20,
    "kv_pool_bytes": 2**48,
    "block_size": 1024,
    "num_threads": 1024,
    "max_draft_tokens": 16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMOptions:
    """As in `LLM`; 0 means chosen, as there. Raises `InvalidOption`."""

    model: str | Path | None = None
    device: str = "auto"
    deterministic: bool = False
    weights_dtype: str = "auto"
    kv_dtype: str = "auto"
    max_model_len: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    kv_pool_bytes: int = 0
    block_size: int = 0
    num_threads: int = 0
    max_draft_tokens: int = 0
    enable_prefix_cache: bool = True

    def __post_init__(self) -> None:
        if self.model is not None and not isinstance(self.model, (str, Path)):
            raise InvalidOption(
                f"model must be a GGUF file, a model folder, 'embedded' or None, not {self.model!r}"
            )
        for name, choices in _CHOICES.items():
            _check_choice(name, getattr(self, name), choices)
        for name, high in _LIMITS.items():
            _check_whole(name, getattr(self, name), high)
        for name in ("deterministic", "enable_prefix_cache"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidOption(f"{name} must be True or False, not {getattr(self, name)!r}")
        if 0 < self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidOption(
                f"max_num_batched_tokens must be at least max_num_seqs ({self.max_num_seqs}), "
                f"not {self.max_num_batched_tokens}: every sequence takes a row a step"
            )

    @property
    def source(self) -> str:
        """What to open."""
        return EMBEDDED if self.model is None else str(self.model)

    @property
    def window(self) -> int:
        """Sequences that are in the engine at once: as many wait there as run."""
        return 2 * self.num_seqs

    @property
    def num_seqs(self) -> int:
        """Sequences in a step."""
        most = self.max_num_batched_tokens or _NUM_SEQS
        return self.max_num_seqs or min(_NUM_SEQS, most)

    def engine_config(self, source: ModelSource) -> EngineConfig:
        """The settings of the engine for an opened model."""
        return EngineConfig(
            kv_pool_bytes=self.kv_pool_bytes,
            block_size=source.config.block_tokens(self.block_size),
            kv_dtype=self.kv_dtype,
            max_model_len=self.max_model_len,
            max_num_seqs=self.num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens
            or max(_BATCHED_TOKENS, self.num_seqs),
            max_queue=self.window,
            max_draft_tokens=self.max_draft_tokens,
            eos_token_ids=source.text.eos_ids,
            mode="deterministic" if self.deterministic else "fast",
            device=choose_device(self.device),
            num_threads=self.num_threads or num_cores(),
            prefix_caching=self.enable_prefix_cache,
            weights_digest=source.digest,
        )


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InvalidOption(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def _check_whole(name: str, value: Any, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise InvalidOption(f"{name} must be a whole number, not {value!r}")
    if not 0 <= int(value) <= high:
        raise InvalidOption(f"{name} must be within [0, {high}], not {value}")
