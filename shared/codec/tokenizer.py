"""Text to ids and ids to bytes, whatever file the vocabulary came from.

`encode` never sees a control token: text is text. Control tokens enter a prompt by id, from the
pieces that the conversation renderer hands over.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, Final

import numpy as np
import tokenizers

from finback.shared.codec.byte_alphabet import to_bytes
from finback.shared.codec.byte_ranks import IdArray
from finback.shared.codec.control_tokens import ControlToken, ControlTokens
from finback.shared.codec.fast_encoder import joined
from finback.shared.codec.fast_path import FastPath, Vocabulary, build_encoder
from finback.shared.codec.fast_patterns import normal_form, pattern_of
from finback.shared.codec.safe_cuts import safe_pieces


class Tokenizer:
    """A byte-level BPE vocabulary. Thread-safe.

    `plain` knows no control tokens; `full` makes the tokenizer that knows them, for grammars.
    `has_text`: False of the stand-in for models that have none (`no_tokenizer`).
    """

    has_text: ClassVar[bool] = True

    def __init__(
        self,
        *,
        plain: tokenizers.Tokenizer,
        full: Callable[[], tokenizers.Tokenizer],
        control: Iterable[ControlToken],
        vocab_size: int,
        bos_id: int | None,
        eos_ids: Sequence[int],
        adds_bos: bool,
        read_vocabulary: Callable[[], Vocabulary | None],
    ) -> None:
        """`read_vocabulary`: for the fast encoder; see `fast_path.build_encoder`."""
        tokens = list(control)
        self.control = ControlTokens(tokens)
        self.vocab_size = vocab_size
        self.bos_id = bos_id
        self.eos_ids = tuple(eos_ids)
        self.adds_bos = adds_bos
        self._plain = plain
        self._full = full
        # Can plain text be cut at safe places; else it goes to the library as one piece.
        self.is_cuttable = pattern_of(plain) is not None and normal_form(plain) is not None
        self._fast = FastPath(lambda: build_encoder(plain, read_vocabulary, self._encode_whole))
        self._by_id = {token.token_id: token for token in tokens}
        self._bytes: dict[int, bytes] = {
            token.token_id: b"" if token.is_special else token.spelling.encode() for token in tokens
        }

    def encode(self, text: str) -> list[int]:
        """The ids of plain text; control spellings in it are ordinary characters."""
        found: list[int] = self.encode_many([text])[0].tolist()
        return found

    def encode_many(self, texts: Sequence[str]) -> list[IdArray]:
        """The ids of each text, int32. Long and many texts are spread over the cores."""
        encoder = self._fast.encoder(sum(map(len, texts)))
        if encoder is not None:
            return encoder.encode_many(texts)
        if not self.is_cuttable:
            return self._encode_batch(texts)
        pieces = [safe_pieces(text) or [""] for text in texts]
        done = iter(self._encode_batch([piece for cut in pieces for piece in cut]))
        return [joined([next(done) for _ in cut]) for cut in pieces]

    def encode_pieces(self, pieces: Iterable[str | ControlToken]) -> list[int]:
        """The ids of a rendered prompt: stretches of text and control tokens in order."""
        found: list[int] = joined(self.encode_parts(list(pieces))).tolist()
        return found

    def encode_parts(self, parts: Sequence[str | ControlToken]) -> list[IdArray]:
        """The ids of each part of a prompt, int32."""
        texts = iter(self.encode_many([part for part in parts if isinstance(part, str)]))
        return [
            next(texts) if isinstance(part, str) else np.array([part.token_id], dtype=np.int32)
            for part in parts
        ]

    def prepare(self) -> bool:
        """Build what encodes fast, and wait for it. Has this vocabulary such an encoder."""
        return self._fast.prepare()

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a bare prompt, with the beginning-of-text token where the model wants one."""
        ids = self.encode(text)
        return [self.bos_id, *ids] if self.adds_bos and self.bos_id is not None else ids

    def _encode_whole(self, text: str) -> IdArray:
        return self._encode_batch([text])[0]

    def _encode_batch(self, texts: Sequence[str]) -> list[IdArray]:
        found = self._plain.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.int32) for encoding in found]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to the text: none for special tokens and unknown ids."""
        raw = self._bytes.get(token_id)
        if raw is None:
            raw = self._bytes[token_id] = self._plain_bytes(token_id)
        return raw

    def _plain_bytes(self, token_id: int) -> bytes:
        spelling = self._plain.id_to_token(token_id)
        if spelling is None:
            return b""
        try:
            return to_bytes(spelling)
        except KeyError:  # not in the byte alphabet: the file spells it literally
            return str(spelling).encode()

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of ids: special tokens add none, bytes that are no character are U+FFFD."""
        return b"".join(map(self.token_bytes, token_ids)).decode(errors="replace")

    def is_special(self, token_id: int) -> bool:
        """Is it a control token that is never shown."""
        token = self._by_id.get(token_id)
        return token is not None and token.is_special

    def spelling(self, token_id: int) -> str:
        """How a token is called, for logprobs of tokens that are not text."""
        token = self._by_id.get(token_id)
        return token.spelling if token is not None else f"<token {token_id}>"

    @property
    def longest_token_bytes(self) -> int:
        """An upper bound of a token's bytes, so that hopelessly long prompts are refused early."""
        return _LONGEST_TOKEN_BYTES

    def to_json(self) -> str:
        """The whole tokenizer in Hugging Face's tokenizer.json form, control tokens included."""
        return self._full().to_str()


# No vocabulary in use has a longer entry (runs of 128 blanks and the like are the longest).
_LONGEST_TOKEN_BYTES: Final = 256
