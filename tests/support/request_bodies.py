"""Good request bodies of both chat APIs, and hypothesis strategies that spoil them."""

import json
from typing import Any, Final

from hypothesis import strategies as st

WORDS: Final = [
    "user", "assistant", "system", "tool", "developer", "function", "custom", "text", "tool_use",
    "tool_result", "thinking", "redacted_thinking", "image", "auto", "any", "none", "required",
    "allowed_tools", "json_schema", "json_object", "grammar", "regex", "object", "string", "c1",
    "add", "", " ", "\x00", "<|im_end|>", "é\u0301👍🏽",
]  # fmt: skip
FIELDS: Final = [
    "model", "messages", "role", "content", "type", "text", "name", "id", "input", "arguments",
    "function", "custom", "tool_calls", "tool_call_id", "tool_use_id", "is_error", "thinking",
    "signature", "data", "tools", "tool_choice", "allowed_tools", "mode", "parameters",
    "input_schema", "properties", "items", "anyOf", "required", "enum", "$ref", "strict", "format",
    "syntax", "definition", "system", "max_tokens", "stop_sequences", "output_config", "effort",
    "response_format", "json_schema", "schema", "metadata", "logit_bias", "stop", "n", "seed",
    "temperature", "budget_tokens", "citations", "cache_control", "chat_template_kwargs",
]  # fmt: skip
LEAVES: Final = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(WORDS),
    st.text(max_size=5),
)
VALUES: Final = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)
CHAT: Final[dict[str, Any]] = {
    "model": "thinker",
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ],
    "tools": [
        {"type": "function", "function": {"name": "add", "parameters": {
            "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}},
        {"type": "custom", "custom": {"name": "note", "format": {
            "type": "grammar", "grammar": {"syntax": "regex", "definition": "a"}}}},
    ],
    "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
        {"type": "function", "function": {"name": "add"}}]}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
    "metadata": {"k": "v"},
}  # fmt: skip
MESSAGES: Final[dict[str, Any]] = {
    "model": "thinker",
    "max_tokens": 2000,
    "system": [{"type": "text", "text": "s"}],
    "messages": [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "t", "signature": ""},
            {"type": "text", "text": "x"},
            {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": [
                {"type": "text", "text": "r"}], "is_error": True},
            {"type": "text", "text": "y"}]},
    ],
    "tools": [{"name": "add", "input_schema": {
        "type": "object", "properties": {"a": {"type": "integer"}}}}],
    "tool_choice": {"type": "tool", "name": "add"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
    "stop_sequences": ["x"],
}  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every path into a document."""
    found = [path]
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            found += places(item, (*path, key))
    return found


def changed(document: Any, path: tuple[Any, ...], value: Any, kind: str) -> Any:
    """A copy in which something else stands at `path`, or nothing, or something more."""
    copy = json.loads(json.dumps(document))
    if not path:
        return value if kind == "replace" else copy
    holder = copy
    for key in path[:-1]:
        holder = holder[key]
    if kind == "drop":
        del holder[path[-1]]
    elif kind == "add" and isinstance(holder[path[-1]], dict):
        holder[path[-1]]["name" if value is None else "type"] = value
    elif kind == "add" and isinstance(holder[path[-1]], list):
        holder[path[-1]].append(value)
    else:
        holder[path[-1]] = value
    return copy


def bodies(valid: dict[str, Any], max_changes: int = 3) -> st.SearchStrategy[Any]:
    """Anything; or a good body with a few things wrong."""

    @st.composite
    def mutated(draw: st.DrawFn) -> Any:
        body: Any = valid
        for _ in range(draw(st.integers(1, max_changes))):
            path = draw(st.sampled_from(places(body)))
            kind = draw(st.sampled_from(["replace", "drop", "add"]))
            body = changed(body, path, draw(VALUES), kind)
        return body

    return st.one_of(mutated(), mutated(), VALUES)
