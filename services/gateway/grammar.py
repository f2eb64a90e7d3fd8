"""The grammar that a request asks for, the field to blame for it, and what it may stand beside.

Whatever the API, at most one of its fields may say what the answer is kept to. What can be told from
the form alone is refused here, by its path; whether it can be enforced is the sampler's verdict.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from finback.services.gateway.tool_rules import invalid_value
from finback.shared.codec.dialogue import Conversation
from finback.shared.codec.formats.toolbox import callable_tools
from finback.shared.codec.structural_tags import structural_tag_of
from finback.shared.codec.tag_chunks import TagFault
from finback.shared.errors import InvalidRequest
from finback.shared.wire.messages.generate import GrammarSpec

MAX_GRAMMAR_CHARS: Final = 256 * 1024
# What a schema's strictness is where nobody said: the settings decide (`ServedModel.grammar`).
UNSAID: Final = ""
STRUCTURAL_TAG: Final = "structural_tag"
# Kinds whose grammars hold schemas, of which not all can be enforced.
_WITH_SCHEMAS: Final = frozenset({"json_schema", STRUCTURAL_TAG})


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A grammar, and the field to blame for it. `field`: the request's own, `param` within it."""

    spec: GrammarSpec
    field: str
    param: str


def one_of(*found: Asked | None) -> Asked | None:
    """The one that a request asks for; two are refused, by both their names, and so is a long one."""
    given = [asked for asked in found if asked is not None]
    if len(given) > 1:
        first, second = given[:2]
        raise InvalidRequest(
            f"'{second.field}' and '{first.field}' both say what the answer is kept to: give one of "
            "them.",
            param=second.field,
            reason="mutually_exclusive_parameters",
        )
    if given and len(given[0].spec.text) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(
            f"a grammar may have {MAX_GRAMMAR_CHARS} characters at most, this one has "
            f"{len(given[0].spec.text)}",
            param=given[0].param,
        )
    return given[0] if given else None


def blame(conversation: Conversation) -> str:
    """The field of the request that its grammar came from, as far as that is one."""
    if conversation.answer_param:
        return conversation.answer_param
    tools = conversation.tools
    return tools[0].param if len(tools) == 1 and tools[0].param else "tools"


def check_together(conversation: Conversation) -> None:
    """Islands in free text, and calls in free text: which is which could not be told."""
    answer = conversation.answer
    if answer is None or answer.kind != STRUCTURAL_TAG or not callable_tools(conversation):
        return
    raise InvalidRequest(
        f"'{conversation.answer_param}' and 'tools' both open islands in free text: give one of them, "
        "or tool_choice 'none'.",
        param=conversation.answer_param,
        reason="mutually_exclusive_parameters",
    )


def schema_asked(schema: Any, field: str, param: str, strictness: str = UNSAID) -> Asked:
    """A JSON Schema, found at `param`."""
    if not isinstance(schema, Mapping | bool):
        raise invalid_value(param, "a JSON Schema: an object or a boolean")
    text = json.dumps(schema, ensure_ascii=False)
    spec = GrammarSpec(kind="json_schema", text=text, strictness=strictness)
    return Asked(spec=spec, field=field, param=param)


def tag_asked(value: Any, field: str, param: str, strictness: str = UNSAID) -> Asked:
    """A structural tag, found at `param`."""
    try:
        structural_tag_of(value)
    except TagFault as fault:
        where = ".".join(map(str, (param, *fault.path)))
        raise invalid_value(where, fault.wanted) from None
    text = json.dumps(value, ensure_ascii=False)
    spec = GrammarSpec(kind=STRUCTURAL_TAG, text=text, strictness=strictness)
    return Asked(spec=spec, field=field, param=param)


def with_strictness(spec: GrammarSpec, default: str) -> GrammarSpec:
    """The grammar as the sampler takes it: one that nobody said a strictness for has `default`."""
    wanted = spec.strictness if spec.strictness != UNSAID else default
    return replace(spec, strictness=wanted if spec.kind in _WITH_SCHEMAS else "strict")
