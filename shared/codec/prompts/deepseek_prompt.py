"""DeepSeek V4 and V4.1 prompts, rendered by the `deepseek-recipe` package: byte for byte its own.

A choice that cannot be put into words without breaking that (tools under `allowed`, a forced call
while thinking) is left to the grammar of the answer.
"""

import importlib
import json
from collections.abc import Mapping
from typing import Any, Final

from finback.shared.codec.control_tokens import ControlToken
from finback.shared.codec.dialogue import Conversation, Tool, ToolCall, Turn
from finback.shared.codec.formats.base import Starts
from finback.shared.codec.formats.deepseek import opens_block, thinks
from finback.shared.codec.formats.toolbox import CUSTOM_INPUT, callable_tools
from finback.shared.codec.prompts.template_values import tool_parameters
from finback.shared.errors import ConfigError, InvalidRequest

# The recipe's own defaults: thinking is on, and its effort high.
STARTS: Final = Starts({None: "opened", True: "opened", False: "answer"})
_EFFORTS: Final = {"minimal": "low", "medium": "high"}
_DEFAULT_EFFORT: Final = "high"
_NEEDED: Final = ("Bos", "Eos", "User", "Assistant", "ThinkingStart", "ThinkingEnd", "Dsml")


class DeepseekPrompt:
    """Renders with `DeepseekV4Encoding` or `DeepseekV41Encoding`."""

    def __init__(self, version: str, control: Mapping[str, ControlToken]) -> None:
        """`version`: `deepseek-v4` or `deepseek-v4.1`. `control`: the vocabulary's, by spelling."""
        self._recipe = _load_recipe()
        is_v41 = version == "deepseek-v4.1"
        encoding = "DeepseekV41Encoding" if is_v41 else "DeepseekV4Encoding"
        self.name = version
        self._encoding = getattr(self._recipe, encoding)()
        self._control = control
        self._check_vocabulary((*_NEEDED, "System") if is_v41 else _NEEDED)

    def render(self, conversation: Conversation) -> list[str | ControlToken]:
        """See `PromptFormat`."""
        if conversation.documents:
            raise InvalidRequest("this model takes no documents", param="documents")
        if not conversation.turns:
            raise InvalidRequest("messages must not be empty", param="messages")
        try:
            rendered = self._encoding.render_conversation(self._converted(conversation))
        except (ValueError, RuntimeError) as error:
            raise InvalidRequest(
                f"this model's prompt cannot be made of these messages: {error}", param="messages"
            ) from error
        prompt, pieces, at = rendered.prompt, list[str | ControlToken](), 0
        for start, end in rendered.special_ranges:
            if start > at:
                pieces.append(prompt[at:start])
            pieces.append(self._control[prompt[start:end]])
            at = end
        return [*pieces, prompt[at:]] if at < len(prompt) else pieces

    def _check_vocabulary(self, names: tuple[str, ...]) -> None:
        spellings = [getattr(self._recipe.SpecialToken, name).default_str() for name in names]
        missing = [spelling for spelling in spellings if spelling not in self._control]
        if missing:
            raise ConfigError(
                f"the vocabulary lacks {', '.join(missing)}, which {self.name} prompts need; "
                "is output_format right?"
            )

    # -- to the recipe's own objects

    def _converted(self, conversation: Conversation) -> Any:
        is_on = thinks(conversation)
        choice = conversation.tool_choice
        is_open = opens_block(conversation)
        tools = callable_tools(conversation) if is_open else conversation.tools
        forced = "required" if is_open else "auto"
        last = len(conversation.turns) - 1
        return self._recipe.Conversation(
            [
                self._message(turn, is_on, conversation.continues_last and index == last)
                for index, turn in enumerate(conversation.turns)
            ],
            thinking_mode=is_on,
            tools=[self._tool(tool) for tool in tools],
            tool_choice="none" if choice.mode == "none" else forced,
            reasoning_effort=_effort(conversation.effort) if is_on else None,
            **_response_format(conversation),
        )

    def _message(self, turn: Turn, is_on: bool, is_prefix: bool) -> Any:
        recipe = self._recipe
        if turn.role == "assistant":
            calls = [
                recipe.ToolCall(call.call_id, call.name, _arguments(call))
                for call in turn.tool_calls
            ]
            # As the recipe's own conversion: dropped without thinking, else an empty span if lacking.
            reasoning = turn.reasoning if is_on else None
            return recipe.AssistantMessage(turn.content, reasoning, calls or None, is_prefix)
        if turn.role == "tool":
            return recipe.ToolMessage(turn.content, turn.call_id)
        return (recipe.SystemMessage if turn.role == "system" else recipe.UserMessage)(turn.content)

    def _tool(self, tool: Tool) -> Any:
        parameters = tool_parameters(tool) if tool.kind == "custom" else tool.parameters or {}
        return self._recipe.ToolDefinition(
            tool.name, tool.description or None, parameters, tool.strict or None
        )


def _load_recipe() -> Any:
    try:
        return importlib.import_module("deepseek_recipe")
    except ImportError as error:
        raise ConfigError(
            "DeepSeek prompts need the package deepseek-recipe; pip install 'finback[deepseek]'"
        ) from error


def _effort(effort: str | None) -> str:
    return _DEFAULT_EFFORT if effort is None else _EFFORTS.get(effort, effort)


def _arguments(call: ToolCall) -> str:
    if call.kind == "custom":
        return json.dumps({CUSTOM_INPUT: call.arguments}, ensure_ascii=False)
    return call.arguments


def _response_format(conversation: Conversation) -> dict[str, Any]:
    answer = conversation.answer
    if answer is None:
        return {}
    if answer.kind == "json_object":
        return {"response_format": "json_object"}
    if answer.kind == "json_schema":
        return {"response_schema": json.loads(answer.text)}
    return {"response_regex": answer.text} if answer.kind == "regex" else {}
