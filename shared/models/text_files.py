"""What a model source knows about text: vocabulary, special ids and chat templates. Torch-free."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufVocabulary:
    """The tokenizer keys of a GGUF file. Lists are decoded when asked for and not kept.

    `model`: "gpt2" is byte-level BPE. `pre`: the name of the pre-tokenizer, not its pattern.
    """

    model: str
    pre: str
    add_bos: bool | None
    read_tokens: Callable[[], list[str]] = field(repr=False)
    read_merges: Callable[[], list[str]] = field(repr=False)
    read_token_types: Callable[[], npt.NDArray[np.int32]] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class HfTokenizerFiles:
    """`tokenizer_json` is the file's text (read when asked for); the config is parsed JSON.

    `is_there`: the folder holds tokenizer files, be they complete or not.
    """

    read_tokenizer_json: Callable[[], str] = field(repr=False)
    tokenizer_config: Mapping[str, Any] = field(repr=False)
    is_there: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFiles:
    """All that `shared/codec` needs to build a tokenizer; exactly one of `gguf` and `hf` is set.

    `chat_templates` maps names to Jinja source ("default" and others); `eos_ids` end an answer.
    """

    kind: Literal["gguf", "hf"]
    vocab_size: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    pad_id: int | None
    chat_templates: Mapping[str, str] = field(repr=False)
    gguf: GgufVocabulary | None = None
    hf: HfTokenizerFiles | None = None

    @property
    def has_tokenizer(self) -> bool:
        """False: the model takes and gives token ids only."""
        return self.hf is None or self.hf.is_there

    @property
    def chat_template(self) -> str | None:
        """The default template."""
        return self.chat_templates.get("default")
