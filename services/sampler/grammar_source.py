"""A grammar as a client wrote it -> the text that the grammar engine compiles. Pure.

What is refused here is refused by name: the error's `param` is the request field, its `reason` the
construct that cannot be served.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any, Final

from llguidance import LLMatcher

from finback.services.sampler.policy import engine_of
from finback.shared.errors import InvalidRequest
from finback.shared.wire.messages.generate import GrammarSpec

MAX_TEXT_BYTES: Final = 256 * 1024
MAX_CHOICES: Final = 10_000
MAX_DEPTH: Final = 64

# Where a client wrote it, for the error's `param`.
_PARAMS: Final = {
    "json_object": "response_format",
    "json_schema": "response_format.json_schema",
    "regex": "structured_outputs.regex",
    "choice": "structured_outputs.choice",
    "lark": "structured_outputs.grammar",
    "structural": "tools",
}
# Between two JSON tokens: up to two blanks, or one line break and an indent. Bounded, because a
# model may otherwise write blanks for ever.
_WHITESPACE: Final = r"[ ]{1,2}|[ ]?\r?\n[ \t]{0,32}"
# Given as overrides, so that a schema's own "x-guidance" cannot loosen them. In strings printable
# characters stand for themselves: the engine does not offer \\uXXXX for them.
_JSON_OPTIONS: Final[dict[str, Any]] = {
    "whitespace_flexible": True,
    "whitespace_pattern": _WHITESPACE,
    "lenient": False,
    "coerce_one_of": False,
}


def param_of(kind: str) -> str:
    """The request field that a grammar of this kind came from."""
    return _PARAMS.get(kind, "structured_outputs")


def grammar_id(spec: GrammarSpec) -> str:
    """Content hash of a grammar, 32 hex digits; the same on every instance."""
    content = f"{spec.kind}\0{spec.text}".encode(errors="surrogatepass")
    if spec.strictness != "strict":
        content += f"\0{spec.strictness}".encode()
    return hashlib.blake2b(content, digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The engine's own form of a grammar, and the parts of it that are not enforced."""

    text: str
    engine: str
    widened: tuple[str, ...] = ()


def read_source(spec: GrammarSpec) -> Source:
    """Analyse and translate. Raises `InvalidRequest`."""
    return Source(text=engine_text(spec), engine=engine_of(spec.kind))


def engine_text(spec: GrammarSpec) -> str:
    """The engine's own form of `spec`. Raises `InvalidRequest`."""
    refuse = _Refusal(param_of(spec.kind))
    try:
        size = len(spec.text.encode())
    except UnicodeEncodeError:
        raise refuse("a grammar must be valid Unicode", "surrogate") from None
    if size > MAX_TEXT_BYTES:
        raise refuse(
            f"a grammar of {size} bytes is above the limit of {MAX_TEXT_BYTES}", "text_bytes"
        )
    if spec.kind == "json_object":
        return _from_schema({"type": "object"})
    if spec.kind == "json_schema":
        return _from_schema(_schema(spec.text, refuse))
    if spec.kind == "choice":
        return _from_choices(spec.text, refuse)
    if spec.kind == "structural":
        return _from_structure(spec.text, refuse)
    if not spec.text:
        raise refuse(f"an empty {spec.kind}", "empty")
    if spec.kind == "regex":
        return str(LLMatcher.grammar_from_regex(spec.text))
    if spec.kind == "lark":
        return str(LLMatcher.grammar_from_lark(spec.text))
    raise refuse(f"unknown kind of grammar: {spec.kind[:40]!r}", "kind")


def is_exact(spec: GrammarSpec) -> bool:
    """Must the engine enforce the whole grammar, so that its warnings count as errors."""
    if spec.kind == "structural":
        return not any(part.get("is_lenient") for part in json.loads(spec.text)["parts"].values())
    return spec.kind == "json_schema"


def _from_structure(text: str, refuse: "_Refusal") -> str:
    """A Lark grammar and the parts that it refers to, as one list of grammars."""
    try:
        structure = json.loads(text)
        lark, parts = structure["lark"], structure["parts"]
        grammars = [{"name": "structure", "lark_grammar": lark}]
        grammars += [_part(name, part, refuse) for name, part in parts.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise refuse("a structural grammar is {lark, parts}", "json") from None
    return json.dumps({"grammars": grammars})


def _part(name: str, part: dict[str, Any], refuse: "_Refusal") -> dict[str, Any]:
    kind, text = part["kind"], part["text"]
    if kind in ("json_schema", "json_object"):
        schema = _schema(text, refuse) if kind == "json_schema" else {"type": "object"}
        options = {**_JSON_OPTIONS, "lenient": bool(part.get("is_lenient"))}
        return {"name": name, "json_schema": {**schema, "x-guidance": options}}
    if kind == "choice":
        engine = json.loads(_from_choices(text, refuse))
    elif kind == "regex" and text:
        engine = json.loads(LLMatcher.grammar_from_regex(text))
    elif kind == "lark" and text:
        return {"name": name, "lark_grammar": text}
    else:
        raise refuse(f"no part of a grammar: {str(kind)[:40]!r}", "kind")
    return {"name": name, "lark_grammar": engine["grammars"][0]["lark_grammar"]}


class _Refusal:
    """Makes the errors of one grammar."""

    def __init__(self, param: str) -> None:
        self._param = param

    def __call__(self, text: str, reason: str) -> InvalidRequest:
        return InvalidRequest(text, param=self._param, reason=reason)


def _from_schema(schema: dict[str, Any]) -> str:
    return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_JSON_OPTIONS))


def _schema(text: str, refuse: _Refusal) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refuse(f"the schema is not JSON: {error}", "json") from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise refuse("a JSON schema is an object", "type")
    if _depth(schema) > MAX_DEPTH:
        raise refuse(f"a schema nested deeper than {MAX_DEPTH} levels", "depth")
    return schema


def _depth(value: Any) -> int:
    deepest, open_values = 0, [(value, 1)]
    while open_values:
        item, depth = open_values.pop()
        children = item.values() if isinstance(item, dict) else item
        if isinstance(item, dict | list):
            deepest = max(deepest, depth)
            open_values += [(child, depth + 1) for child in children]
    return deepest


def _from_choices(text: str, refuse: _Refusal) -> str:
    try:
        choices = json.loads(text)
    except (ValueError, RecursionError):
        choices = None
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise refuse("choices are a list of strings", "type")
    if not choices or not all(choices):
        raise refuse("there must be a choice, and none may be empty", "empty")
    if len(choices) > MAX_CHOICES:
        raise refuse(f"{len(choices)} choices are above the limit of {MAX_CHOICES}", "num_choices")
    return str(LLMatcher.grammar_from_regex("|".join(re.escape(choice) for choice in choices)))
