"""What the sampler says of a grammar, as the client is told it: the field to blame, what was let go."""

from collections.abc import Sequence
from typing import Final
from urllib.parse import quote

from finback.shared.errors import InvalidRequest, ServingError, Unavailable
from finback.shared.wire.messages.generate import GrammarSpec

WIDENED_HEADER: Final = "Finback-Grammar-Widened"
MAX_WIDENED_CHARS: Final = 1000
# What may stand in a header as it is; a comma parts two entries.
_PLAIN: Final = " !#$&'()*+-./:;<=>?@[]^_`{|}~\"\\"
# What the sampler names where it does not know which tool it was.
_ANY_TOOL: Final = "tools"


def refusal(error: InvalidRequest, grammar: GrammarSpec, param: str) -> ServingError:
    """The error for the client. `param`: the field to blame if the sampler names none within it."""
    if error.reason == "vocabulary_mismatch":
        # Nothing that the client could mend, and over when the services agree again.
        return Unavailable(
            f"the sampler serves another vocabulary: {error.public_message}",
            reason="vocabulary_mismatch",
            retry_after_s=1.0,
        )
    is_named = grammar.kind == "structural" and error.param not in (None, _ANY_TOOL)
    return InvalidRequest(
        error.public_message, param=error.param if is_named else param, reason="invalid_grammar"
    )


def widened_header(widened: Sequence[str]) -> str:
    """What is not enforced, in ASCII, as much of it as fits; the rest is counted."""
    told = ""
    for index, item in enumerate(dict.fromkeys(widened)):
        added = f"{', ' if index else ''}{quote(item, safe=_PLAIN)}"
        if len(told) + len(added) > MAX_WIDENED_CHARS:
            left = len(dict.fromkeys(widened)) - index
            return f"{told or quote(item, safe=_PLAIN)[:MAX_WIDENED_CHARS]}, +{left}"
        told += added
    return told
