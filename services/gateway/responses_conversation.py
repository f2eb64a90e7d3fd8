"""Items and settings of a request to what the codec is given, whole or shortened."""

import dataclasses
from collections.abc import Sequence

from finback.services.gateway.answer_formats import from_structured, from_text_format
from finback.services.gateway.grammar import one_of
from finback.services.gateway.responses_schema import InputRequest
from finback.services.gateway.responses_tools import tool_choice_of, tools_of
from finback.services.gateway.responses_turns import Unseal, turns_of
from finback.services.gateway.store_limits import Item
from finback.services.gateway.template_values import template_values
from finback.shared.codec.dialogue import Conversation


def conversation_of(request: InputRequest, items: Sequence[Item], unseal: Unseal) -> Conversation:
    """What the codec is given."""
    tools = tools_of(request.tools)
    is_parallel = request.parallel_tool_calls is not False
    effort = request.reasoning.effort if request.reasoning is not None else None
    asked = one_of(
        from_text_format(request.text.format if request.text is not None else None),
        from_structured(request.structured_outputs),
    )
    return Conversation(
        turns=tuple(turns_of(items, instructions=request.instructions, unseal=unseal)),
        tools=tools,
        tool_choice=tool_choice_of(request.tool_choice, tools, is_parallel=is_parallel),
        is_thinking=None if effort is None else effort != "none",
        effort=effort,
        variables=template_values(request.chat_template_kwargs),
        answer=asked.spec if asked is not None else None,
        answer_param=asked.param if asked is not None else "",
    )


def without_first_turns(conversation: Conversation, num_dropped: int) -> Conversation:
    """What `truncation: auto` leaves: instructions stay, the oldest other turns go."""
    first = 1 if conversation.turns and conversation.turns[0].role == "system" else 0
    turns = (*conversation.turns[:first], *conversation.turns[first + num_dropped :])
    return dataclasses.replace(conversation, turns=turns)


def droppable(conversation: Conversation) -> list[int]:
    """How many turns may be dropped: so many that what is left begins with a user's turn."""
    first = 1 if conversation.turns and conversation.turns[0].role == "system" else 0
    rest = conversation.turns[first:]
    return [at for at, turn in enumerate(rest) if at > 0 and turn.role == "user"]
