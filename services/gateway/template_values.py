"""`chat_template_kwargs`: a caller's values for the chat template, beside what the service sets."""

from collections.abc import Mapping
from typing import Any, Final

from finback.services.gateway.tool_rules import unsupported

# What a template is given anyway, and what says how one is rendered, each with why not here.
_FIELDS: Final = "it is set from the fields of the request"
_MODEL: Final = "it belongs to the served model"
_RESERVED: Final[Mapping[str, str]] = {
    **dict.fromkeys(("messages", "tools"), _FIELDS),
    **dict.fromkeys(("add_generation_prompt", "continue_final_message"), _FIELDS),
    "documents": "documents are not supported",
    **dict.fromkeys(("chat_template", "bos_token", "eos_token"), _MODEL),
    **dict.fromkeys(("raise_exception", "strftime_now", "tokenize"), _MODEL),
}


def template_values(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The values; a reserved name is refused, unless it is null and so says nothing."""
    if given is None:
        return None
    for name in given.keys() & _RESERVED:
        if given[name] is not None:
            raise unsupported(f"chat_template_kwargs.{name}", _RESERVED[name])
    return {name: value for name, value in given.items() if name not in _RESERVED}
