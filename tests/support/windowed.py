"""A tiny network whose layers partly see a window only: transformers' (the oracle) and ours."""

import json
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch

from finback.shared.codec.load import load_tokenizer
from finback.shared.models.batch import StateBatch
from finback.shared.models.causal_lm import CausalLM, StatefulLM
from finback.shared.models.kv_pool import KVPool
from finback.shared.models.loader import load_model
from finback.shared.models.source import open_source
from finback.shared.models.state_slots import StateSlots
from support.forward_batches import Chunk, flat_batch
from support.tiny_folders import save_hf, tiny_hf_model

WINDOW: Final = 6
KINDS: Final = ("sliding_attention", "full_attention", "sliding_attention", "sliding_attention")
REPLAY: Final = 3 * (WINDOW - 1)


def windowed_oracle(**changes: Any) -> Any:
    """A random Qwen3 of transformers with three window layers of four."""
    settings: dict[str, Any] = {
        "num_hidden_layers": 4,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "layer_types": list(KINDS),
    }
    return tiny_hf_model("qwen3", **{**settings, **changes})


def windowed_folder(folder: Path, **changes: Any) -> Path:
    """The same on disk."""
    return save_hf(windowed_oracle(**changes), folder)


def windowed_text_folder(folder: Path) -> Path:
    """The same with SmolLM2's vocabulary, tokenizer and template, so that it can be talked to."""
    embedded = open_source()
    path = windowed_folder(
        folder,
        vocab_size=embedded.config.vocab_size,
        max_position_embeddings=2048,
        eos_token_id=list(embedded.text.eos_ids),
    )
    (path / "tokenizer.json").write_text(load_tokenizer(embedded.text).to_json())
    template = {"chat_template": embedded.text.chat_template}
    (path / "tokenizer_config.json").write_text(json.dumps(template))
    return path


@lru_cache(maxsize=4)
def windowed_model(mode: Any = "fast") -> CausalLM:
    """The same, loaded from its folder."""
    with TemporaryDirectory() as folder:
        return load_model(open_source(windowed_folder(Path(folder))), mode=mode, num_threads=1)


@dataclass(slots=True)
class Steps:
    """Steps of a windowed network over a pool and slots of their own; every row leaves it."""

    model: CausalLM
    rollback: int = 5
    num_blocks: int = 16
    block_size: int = 8
    pool: KVPool = field(init=False)
    state: StateSlots = field(init=False)

    def __post_init__(self) -> None:
        assert isinstance(self.model, StatefulLM)
        self.pool = self.model.new_pool(self.num_blocks, self.block_size, "f32")
        self.state = self.model.new_state(4, self.rollback, "f32")

    def run(
        self,
        chunks: list[Chunk],
        slots: list[int] | None = None,
        floors: list[int] | None = None,
        num_kept: int = 0,
    ) -> torch.Tensor:
        """One step; float32 [rows, vocab_size]. Rows of positions below `num_kept` are a replay."""
        batch = flat_batch(chunks, self.block_size)
        stored = torch.nonzero(batch.positions >= num_kept)[:, 0]
        state = StateBatch(
            pool=self.state,
            slots=torch.tensor(slots or list(range(len(chunks)))),
            floors=torch.tensor(floors or [0] * len(chunks)),
            stored_rows=stored if num_kept else None,
        )
        hidden = self.model.forward(replace(batch, state=state), self.pool)
        return self.model.logits(hidden).clone()
