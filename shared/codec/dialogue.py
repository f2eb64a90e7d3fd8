"""A conversation as the codec sees it: what every public API is turned into before a prompt is made.

Nothing here knows HTTP, a particular API, or a particular model's spelling.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from finback.shared.wire.messages.generate import GrammarSpec

Role = Literal["system", "user", "assistant", "tool"]
ToolKind = Literal["function", "custom"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the model made in an earlier turn.

    `arguments`: JSON text for a function, free text for a custom tool.
    """

    call_id: str
    name: str
    arguments: str
    kind: ToolKind = "function"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One message. `call_id` (role `tool`): which call it answers, `name`: of which tool."""

    role: Role
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """What the model may call.

    `parameters`: a JSON Schema (None: no parameters). A custom tool takes free text, or text of a
    `grammar` (`lark` or `regex`). `strict`: arguments must be valid by construction. `param`: the
    request field that says what they must be, to blame it; empty: not told.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    strict: bool = False
    kind: ToolKind = "function"
    grammar: GrammarSpec | None = None
    param: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """`auto`: calls or text; `none`: text; `required`: at least one call.

    `names`: only these tools may be called; empty means all. `is_parallel`: several calls a turn.
    """

    mode: Literal["auto", "none", "required"] = "auto"
    names: tuple[str, ...] = ()
    is_parallel: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Everything that the prompt depends on.

    `is_thinking` None: the model's own default; `effort`: `none`, `minimal`, `low`, `medium`,
    `high`, `xhigh` or `max` where the client named one. `continues_last`: the last turn is the
    assistant's and is to be continued instead of answered. `variables`: for the chat template.
    `answer`: the grammar of the content (not of tool calls), None for free text; `answer_param`: the
    request field that it comes from.
    """

    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    is_thinking: bool | None = None
    effort: str | None = None
    documents: tuple[Mapping[str, Any], ...] = ()
    variables: Mapping[str, Any] | None = None
    continues_last: bool = False
    answer: GrammarSpec | None = None
    answer_param: str = ""
