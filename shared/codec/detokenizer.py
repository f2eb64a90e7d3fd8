"""Token bytes to text as they come: what is emitted is always whole, valid UTF-8."""

import codecs
from typing import Final

_DECODER: Final = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Decodes one completion's bytes; a character split over tokens waits for its last byte.

    Bytes that can never become valid are shown as U+FFFD, as soon as that is certain. The text is
    a function of the bytes alone: how they were cut into pushes does not matter.
    """

    __slots__ = ("_decoder",)

    def __init__(self) -> None:
        self._decoder = _DECODER(errors="replace")

    def push(self, raw: bytes) -> str:
        """The text that `raw` completes, possibly empty."""
        return self._decoder.decode(raw)

    def finish(self) -> str:
        """What is left at the end: U+FFFD for a character that was never completed."""
        return self._decoder.decode(b"", final=True)

    @property
    def is_mid_character(self) -> bool:
        """Are there bytes whose character is not complete."""
        return bool(self._decoder.getstate()[0])
