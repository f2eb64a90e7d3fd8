"""Text to ids and ids to bytes, whatever file the vocabulary came from.

`encode` never sees a control token: text is text. Control tokens enter a prompt by id, from the
pieces that the conversation renderer hands over.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import tokenizers

from finback.shared.codec.byte_alphabet import to_bytes
from finback.shared.codec.control_tokens import ControlToken, ControlTokens

# Text above this is encoded in pieces: faster even on one core, since the working set stays in
# cache, and parallel on several.
PIECE_CHARS: Final = 4_000
# Between a non-space and one ASCII space every pre-tokenizer in `pre_tokenizers.py` has a border,
# and no look-ahead crosses it: cutting there gives the ids of the whole text.
_SAFE_CUT: Final = re.compile(r"\S(?= )")


class Tokenizer:
    """A byte-level BPE vocabulary. Thread-safe.

    `plain` knows no control tokens; `full` makes the tokenizer that knows them, for grammars.
    """

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
        is_cuttable: bool,
    ) -> None:
        tokens = list(control)
        self.control = ControlTokens(tokens)
        self.vocab_size = vocab_size
        self.bos_id = bos_id
        self.eos_ids = tuple(eos_ids)
        self.adds_bos = adds_bos
        self._plain = plain
        self._full = full
        self._is_cuttable = is_cuttable
        self._by_id = {token.token_id: token for token in tokens}
        self._bytes: dict[int, bytes] = {
            token.token_id: b"" if token.is_special else token.spelling.encode() for token in tokens
        }

    def encode(self, text: str) -> list[int]:
        """The ids of plain text; control spellings in it are ordinary characters."""
        if len(text) <= PIECE_CHARS or not self._is_cuttable:
            return self._encode_batch([text])
        return self._encode_batch(safe_pieces(text))

    def encode_pieces(self, pieces: Iterable[str | ControlToken]) -> list[int]:
        """The ids of a rendered prompt: stretches of text and control tokens in order."""
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, str):
                ids.extend(self.encode(piece))
            else:
                ids.append(piece.token_id)
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a bare prompt, with the beginning-of-text token where the model wants one."""
        ids = self.encode(text)
        return [self.bos_id, *ids] if self.adds_bos and self.bos_id is not None else ids

    def _encode_batch(self, texts: list[str]) -> list[int]:
        ids: list[int] = []
        for encoding in self._plain.encode_batch_fast(texts, add_special_tokens=False):
            ids.extend(encoding.ids)
        return ids

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


def safe_pieces(text: str, size: int = PIECE_CHARS) -> list[str]:
    """Cut text where cutting cannot change its tokens, into pieces of about `size` characters.

    A stretch without such a place stays whole.
    """
    pieces, start = [], 0
    while len(text) - start > size:
        found = _SAFE_CUT.search(text, start + size - 1)
        if found is None:
            break
        pieces.append(text[start : found.end()])
        start = found.end()
    if start < len(text):
        pieces.append(text[start:])
    return pieces
