"""The stand-in for the tokenizer of a model whose folder holds none: token ids in, token ids out."""

from collections.abc import Iterable, Sequence
from typing import ClassVar, Final, NoReturn

import numpy as np
import tokenizers

from finback.shared.codec.byte_ranks import IdArray
from finback.shared.codec.control_tokens import ControlToken
from finback.shared.codec.tokenizer import Tokenizer
from finback.shared.errors import InvalidRequest

REFUSAL: Final = "this model has no tokenizer: give the prompt as token ids"


class NoTokenizer(Tokenizer):
    """Every id is of the vocabulary and adds no text. Encoding text raises `InvalidRequest`."""

    has_text: ClassVar[bool] = False

    def __init__(self, *, vocab_size: int, bos_id: int | None, eos_ids: Sequence[int]) -> None:
        super().__init__(
            plain=tokenizers.Tokenizer(tokenizers.models.BPE()),
            full=_refuse,
            control=(),
            vocab_size=vocab_size,
            bos_id=bos_id,
            eos_ids=eos_ids,
            adds_bos=False,
            read_vocabulary=lambda: None,
        )

    def encode_many(self, texts: Sequence[str]) -> list[IdArray]:
        """See `Tokenizer`."""
        return _refuse() if texts else []

    def encode_parts(self, parts: Sequence[str | ControlToken]) -> list[IdArray]:
        """See `Tokenizer`: control tokens are ids."""
        return [
            _refuse() if isinstance(part, str) else np.array([part.token_id], dtype=np.int32)
            for part in parts
        ]

    def encode_prompt(self, text: str) -> list[int]:
        """See `Tokenizer`; not even an empty text is one."""
        _refuse()

    def prepare(self) -> bool:
        """See `Tokenizer`: there is nothing to build."""
        return False

    def token_bytes(self, token_id: int) -> bytes:
        """See `Tokenizer`."""
        return b""

    def decode(self, token_ids: Iterable[int]) -> str:
        """See `Tokenizer`."""
        return ""

    def is_special(self, token_id: int) -> bool:
        """See `Tokenizer`: no token is ever shown."""
        return True


def _refuse() -> NoReturn:
    raise InvalidRequest(REFUSAL, param="prompt", reason="no_tokenizer")
