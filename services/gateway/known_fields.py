"""Objects inside a body that no model checks: a field that is not known there is refused by path."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from finback.services.gateway.schema import OPENAI_RULES
from finback.shared.errors import InvalidRequest

# Where a prefix ends that is worth caching: prefixes are found here without being told.
CACHE_HINTS: Final = frozenset({"cache_control", "prompt_cache_breakpoint"})
# Switches of OpenAI's newest SDK for what is not there; off, they ask for nothing.
_SWITCHES: Final = frozenset({"async", "async_", "defer_loading"})
_MAX_SHOWN_CHARS: Final = 64
# Of items. Who made one, and what an SDK parsed of it, is accepted: it comes with an answer.
_COMMON: Final = frozenset({"id", "type", "status", "caller", "created_by"})
_CALL: Final = _COMMON | {"call_id", "name"}
ITEM_FIELDS: Final[dict[str, frozenset[str]]] = {
    "message": _COMMON | {"role", "content", "phase"},
    "function_call": _CALL | {"arguments", "parsed_arguments"},
    "function_call_output": _CALL | {"output"},
    "custom_tool_call": _CALL | {"input"},
    "custom_tool_call_output": _CALL | {"output"},
    "reasoning": _COMMON | {"summary", "content", "encrypted_content"},
    "item_reference": frozenset({"id", "type"}),
}
# Parts of messages.
INPUT_FIELDS: Final = CACHE_HINTS | {"type", "text"}
OUTPUT_FIELDS: Final = INPUT_FIELDS | {"annotations", "logprobs", "parsed"}


def check_fields(given: Mapping[str, Any], known: Iterable[str], param: str) -> None:
    """Refuse the first field of `given`, found at `param`, that is not `known`.

    Null counts as absent, and so does a switch that is off.
    """
    wanted = frozenset(known)
    for name, value in given.items():
        if name in wanted or value is None or (value is False and name in _SWITCHES):
            continue
        where = f"{param}.{name[:_MAX_SHOWN_CHARS]}"
        raise InvalidRequest(
            OPENAI_RULES.unknown.format(param=where), param=where, reason="unknown_parameter"
        )
