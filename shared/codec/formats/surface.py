"""Grammars of whole answers: reasoning left free, then content or calls as one family spells them.

They are `structural` grammars: a Lark grammar whose parts (`@p0`, ...) are schemas, expressions or
grammars of their own, put together by the sampler service with its own options.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from finback.shared.codec.dialogue import Conversation, Tool
from finback.shared.codec.formats.spans import Spans, Start
from finback.shared.codec.formats.toolbox import CUSTOM_INPUT, callable_tools
from finback.shared.errors import InvalidRequest
from finback.shared.wire.messages.generate import GrammarSpec

STRUCTURAL: Final = "structural"
# Where only one text is possible the model still chooses its tokens: it was trained to write markers
# with tokens of their own, where the engine would spell them out.
_OPTIONS: Final = '%llguidance {"no_forcing": true}'


class Surface:
    """Collects the rules and parts of one structural grammar."""

    def __init__(self, is_special: Callable[[str], bool]) -> None:
        """`is_special`: is a spelling a control token that ordinary text can never be."""
        self.is_special = is_special
        self._rules = ["TEXT: /(.|\\n)*/"]
        self._parts: dict[str, dict[str, Any]] = {}

    def rule(self, name: str, body: str, options: str = "") -> str:
        """Add a rule; its name."""
        self._rules.append(f"{name}{options}: {body}")
        return name

    def mark(self, marker: str) -> str:
        """A marker: a control token, or the text that spells it."""
        return f"<{marker[1:-1]}>" if self.is_special(marker) else quote(marker)

    def until(self, name: str, marker: str) -> str:
        """Any text up to a marker, and the marker."""
        if self.is_special(marker):
            return self.rule(name, f"TEXT {self.mark(marker)}")
        return self.rule(name, f"TEXT {quote(marker)}", "[lazy]")

    def part(self, grammar: GrammarSpec, *, param: str = "", at: str = "") -> str:
        """A grammar of its own. Under `lenient`, what the engine cannot enforce is let go.

        `param`: the request field that it comes from; `at`: the JSON pointer to it in there.
        """
        name = f"p{len(self._parts)}"
        part: dict[str, Any] = {"kind": grammar.kind, "text": grammar.text}
        more = {"is_lenient": grammar.strictness == "lenient", "param": param, "at": at}
        self._parts[name] = part | {key: value for key, value in more.items() if value}
        return f"@{name}"

    def schema(self, schema: Mapping[str, Any], tool: Tool, *, at: str = "") -> str:
        """A JSON value by a schema that belongs to a tool: exact if the tool is strict."""
        try:
            text = json.dumps(schema, ensure_ascii=False)
        except RecursionError as error:
            param = tool.param or "tools"
            raise InvalidRequest("a schema is nested too deeply", param=param) from error
        is_exact = tool.strict or tool.kind == "custom"
        strictness = "strict" if is_exact else "lenient"
        made = GrammarSpec(kind="json_schema", text=text, strictness=strictness)
        return self.part(made, param=tool.param, at=at)

    def arguments(self, tool: Tool) -> str:
        """The arguments of a tool as a JSON object."""
        return self.schema(
            custom_schema(tool) if tool.kind == "custom" else object_schema(tool), tool
        )

    def custom_text(self, tool: Tool) -> str:
        """The text of a custom tool by its grammar; empty if it has none."""
        return self.part(tool.grammar, param=tool.param) if tool.grammar is not None else ""

    def done(self, start: str) -> GrammarSpec:
        """The grammar whose answers are `start`."""
        lark = "\n".join([_OPTIONS, f"start: {start}", *self._rules])
        text = json.dumps({"lark": lark, "parts": self._parts}, ensure_ascii=False)
        return GrammarSpec(kind=STRUCTURAL, text=text)


def quote(text: str) -> str:
    """A Lark string, which no DEL may stand in as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def object_schema(tool: Tool) -> dict[str, Any]:
    """The schema of a function's arguments, which are an object."""
    schema = dict(tool.parameters or {})
    if schema.setdefault("type", "object") != "object":
        raise InvalidRequest(
            f"the parameters of the tool '{tool.name}' must be of type object",
            param=tool.param or "tools",
        )
    return schema


def custom_schema(tool: Tool) -> dict[str, Any]:
    """A custom tool as a function with one text parameter, kept to its expression if it has one."""
    text: dict[str, Any] = {"type": "string"}
    if tool.grammar is not None and tool.grammar.kind == "regex":
        text["pattern"] = f"^(?:{tool.grammar.text})$"
    return {
        "type": "object",
        "properties": {CUSTOM_INPUT: text},
        "required": [CUSTOM_INPUT],
        "additionalProperties": False,
    }


def needs_raw_text(tool: Tool) -> bool:
    """Has a custom tool a grammar that cannot be followed inside a JSON string."""
    return tool.kind == "custom" and tool.grammar is not None and tool.grammar.kind != "regex"


class CallSurface(Protocol):
    """How a family spells calls."""

    def calls(self, surface: Surface, tools: Sequence[Tool], is_parallel: bool) -> str:
        """One call, or several, and nothing else."""

    def mixed(self, surface: Surface, tools: Sequence[Tool], is_parallel: bool) -> str:
        """Free text in which every call is one of these."""

    def in_thought(self, surface: Surface) -> str | None:
        """Where calls also end reasoning: any text, and calls of those whose rules were made."""


def answer_grammar(
    conversation: Conversation,
    family: CallSurface,
    *,
    spans: Spans,
    start: Start,
    is_special: Callable[[str], bool],
) -> GrammarSpec | None:
    """What constrains the answer to a conversation; None if nothing does."""
    surface = Surface(is_special)
    tools = callable_tools(conversation)
    choice, answer = conversation.tool_choice, conversation.answer
    if not tools:
        if answer is None or start == "answer":
            return answer
        body = surface.part(answer)
    elif choice.mode == "required":
        body = family.calls(surface, tools, choice.is_parallel)
    elif answer is not None:
        body = f"{surface.part(answer)} | {family.calls(surface, tools, choice.is_parallel)}"
    elif _constrains(conversation, tools):
        body = family.mixed(surface, tools, choice.is_parallel)
    else:
        return None
    if start == "answer":
        return surface.done(body)
    surface.rule("answer", body)
    opening = f"{surface.mark(spans.think_open)} " if start == "expected" else ""
    thought = surface.until("thought", spans.think_close)
    body = f"{thought} /\\n{{0,2}}/ answer"
    in_thought = family.in_thought(surface) if tools else None
    return surface.done(f"{opening}({body} | {in_thought})" if in_thought else f"{opening}{body}")


def _constrains(conversation: Conversation, tools: Sequence[Tool]) -> bool:
    """Under `auto`: is there anything about calls that has to be enforced."""
    choice = conversation.tool_choice
    return (
        not choice.is_parallel
        or len(tools) < len(conversation.tools)
        or any(tool.strict or tool.grammar is not None for tool in tools)
    )
