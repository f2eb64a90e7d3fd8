"""Where text can be cut without changing its tokens, whichever known pre-tokenizer reads it.

Two borders hold for every pattern in `fast_patterns.py` (none looks behind, and only runs of
blanks look ahead): between a non-blank and an ASCII space, since a space can only begin a piece or
stand among blanks; and between an ASCII letter or a Han character and punctuation other than an
apostrophe, since a run of letters ends there, no contraction reaches over it, and no alternative
takes letters and then punctuation. Neither lets a normalizer compose anything across.
"""

import re
from typing import Final

# Large enough to hide the cost of a call, small enough for the processor's cache.
PIECE_CHARS: Final = 4_000
_SAFE_CUT: Final = re.compile(
    r"\S(?= )|[A-Za-z\u4e00-\u9fa5](?=[,.;:!?()\[\]{}\"\u3001\u3002\uff0c\uff1b\uff1a\uff1f\uff01\uff08\uff09\u300a-\u300d])"
)


def safe_pieces(text: str, size: int = PIECE_CHARS) -> list[str]:
    """Cut text into pieces of about `size` characters.

    A stretch without a safe place stays whole. A text that goes on where another ended is cut like
    that one, but for its last piece.
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
