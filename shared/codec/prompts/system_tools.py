"""Tools for models whose template knows none: told in the system turn, in the Hermes style.

The form (a <tools> list of JSON schemas, calls and results in tags) is the one that the Hermes models
made common; the wording is ours. Results go back as user turns with <tool_response>.
"""

import json
from dataclasses import dataclass, replace

from finback.shared.codec.control_tokens import ControlToken
from finback.shared.codec.dialogue import Conversation, Turn
from finback.shared.codec.formats.hermes import CLOSE, OPEN
from finback.shared.codec.prompts.prompt_format import PromptFormat
from finback.shared.codec.prompts.template_values import call_arguments, tool_json

_INTRODUCTION = "You may call functions to help the user. These are the functions, as JSON schemas:"
_HOW = (
    "To call one, answer with a JSON object that holds its name and its arguments, "
    f"between {OPEN} tags, one pair of tags for each call:"
)
_SHAPE = '{"name": <name of the function>, "arguments": <object with its arguments>}'


@dataclass(frozen=True, slots=True)
class SystemToolsPrompt:
    """Turns tools and tool turns into plain text for `inner`."""

    inner: PromptFormat
    name: str = "jinja with tools in the system turn"

    def render(self, conversation: Conversation) -> list[str | ControlToken]:
        """See `PromptFormat`."""
        turns = _without_calls(conversation.turns)
        if conversation.tools and conversation.tool_choice.mode != "none":
            turns = _with_tools(turns, conversation)
        return self.inner.render(replace(conversation, turns=turns, tools=()))


def _with_tools(turns: tuple[Turn, ...], conversation: Conversation) -> tuple[Turn, ...]:
    tools = "\n".join(
        json.dumps(tool_json(tool)["function"], ensure_ascii=False) for tool in conversation.tools
    )
    block = f"{_INTRODUCTION}\n<tools>\n{tools}\n</tools>\n\n{_HOW}\n{OPEN}\n{_SHAPE}\n{CLOSE}"
    if turns and turns[0].role == "system":
        return (replace(turns[0], content=f"{turns[0].content}\n\n{block}"), *turns[1:])
    return (Turn(role="system", content=block), *turns)


def _without_calls(turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """Calls as the text that they were, results of consecutive tool turns as one user turn."""
    plain: list[Turn] = []
    is_open = False
    for turn in turns:
        if turn.role == "tool":
            said = f"<tool_response>\n{turn.content}\n</tool_response>"
            if is_open:
                plain[-1] = replace(plain[-1], content=f"{plain[-1].content}\n{said}")
            else:
                plain.append(Turn(role="user", content=said))
        elif turn.tool_calls:
            plain.append(replace(turn, content=_call_text(turn), tool_calls=()))
        else:
            plain.append(turn)
        is_open = turn.role == "tool"
    return tuple(plain)


def _call_text(turn: Turn) -> str:
    calls = [
        json.dumps({"name": call.name, "arguments": call_arguments(call)}, ensure_ascii=False)
        for call in turn.tool_calls
    ]
    blocks = [f"{OPEN}\n{call}\n{CLOSE}" for call in calls]
    return "\n".join([turn.content, *blocks] if turn.content else blocks)
