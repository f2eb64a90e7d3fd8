"""Prompts from the model's own chat template, or from the one of its templates that knows tools."""

from collections.abc import Mapping
from dataclasses import dataclass

from finback.shared.codec.control_tokens import ControlToken
from finback.shared.codec.conversation import ConversationRenderer
from finback.shared.codec.dialogue import Conversation
from finback.shared.codec.prompts.template_values import tool_json, turn_json, variables_of

DEFAULT = "default"
TOOL_USE = "tool_use"


@dataclass(frozen=True, slots=True, kw_only=True)
class JinjaPrompt:
    """`renderers` by template name: `default` is there, `tool_use` is taken when there are tools."""

    renderers: Mapping[str, ConversationRenderer]
    name: str = "jinja"

    def render(self, conversation: Conversation) -> list[str | ControlToken]:
        """See `PromptFormat`. Under tool choice `none` the tools are not shown."""
        tools = conversation.tools if conversation.tool_choice.mode != "none" else ()
        variables = variables_of(conversation)
        if tools:
            variables["tools"] = [tool_json(tool) for tool in tools]
        if conversation.documents:
            variables["documents"] = [dict(document) for document in conversation.documents]
        renderer = self.renderers[DEFAULT]
        if tools and TOOL_USE in self.renderers:
            renderer = self.renderers[TOOL_USE]
        messages = [turn_json(turn) for turn in conversation.turns]
        return renderer.pieces(messages, variables, continues=conversation.continues_last)
