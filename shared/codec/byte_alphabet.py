"""The visible alphabet in which byte-level BPE vocabularies spell raw bytes (GPT-2's table).

Printable Latin-1 characters stand for themselves; the other 68 byte values are written as the
characters from U+0100 on, in order of their value. So a space is U+0120.
"""

from typing import Final


def _alphabet() -> dict[str, int]:
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(value): value for value in visible}
    hidden = (value for value in range(256) if value not in set(visible))
    table.update({chr(0x100 + index): value for index, value in enumerate(hidden)})
    return table


BYTE_OF: Final = _alphabet()
CHAR_OF: Final = {value: char for char, value in BYTE_OF.items()}


def to_bytes(spelling: str) -> bytes:
    """The raw bytes of a vocabulary entry; a character outside the alphabet raises `KeyError`."""
    return bytes(BYTE_OF[char] for char in spelling)


def to_spelling(raw: bytes) -> str:
    """The vocabulary spelling of raw bytes."""
    return "".join(CHAR_OF[value] for value in raw)
