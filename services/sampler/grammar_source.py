"""A grammar as a client wrote it -> the text that the grammar engine compiles. Pure.

What is refused here is refused by name: the error's `param` is the request field, its `reason` the
construct that cannot be served, and where it is.
"""

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Any, Final

from llguidance import LLMatcher

from finback.services.sampler.policy import engine_of
from finback.services.sampler.regex_form import check_regex
from finback.services.sampler.schema_fault import SchemaFault
from finback.services.sampler.schema_source import read_schema
from finback.services.sampler.structural_tag import tag_grammars
from finback.shared.errors import InvalidRequest
from finback.shared.wire.messages.generate import GrammarSpec

MAX_TEXT_BYTES: Final = 256 * 1024
MAX_CHOICES: Final = 10_000
STRICTNESSES: Final = ("strict", "lenient")

# Where a client wrote it, for the error's `param`.
_PARAMS: Final = {
    "json_object": "response_format",
    "json_schema": "response_format.json_schema",
    "regex": "structured_outputs.regex",
    "choice": "structured_outputs.choice",
    "lark": "structured_outputs.grammar",
    "structural": "tools",
    "structural_tag": "structured_outputs.structural_tag",
}
_ANY_OBJECT: Final = '{"type": "object"}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The engine's own form of a grammar, the parts of it that are not enforced, and (pointer, the
    schemas in its place) of keywords that are said otherwise."""

    text: str
    engine: str
    widened: tuple[str, ...] = ()
    rewritten: tuple[tuple[str, list[Any]], ...] = ()


def param_of(kind: str) -> str:
    """The request field that a grammar of this kind came from."""
    return _PARAMS.get(kind, "structured_outputs")


def grammar_id(spec: GrammarSpec) -> str:
    """Content hash of a grammar, 32 hex digits; the same on every instance."""
    content = f"{spec.kind}\0{spec.text}".encode(errors="surrogatepass")
    if spec.strictness != "strict":
        content += f"\0{spec.strictness}".encode()
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _lark_of_regex(pattern: str, at: str) -> str:
    check_regex(pattern, pointer=at)
    made = json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"][0]["lark_grammar"]
    return str(made).removeprefix("start: ").strip()


def engine_text(spec: GrammarSpec) -> str:
    """The engine's own form of `spec`. Raises `InvalidRequest`."""
    return read_source(spec).text


def read_source(spec: GrammarSpec) -> Source:
    """Analyse and translate. Raises `InvalidRequest`."""
    reader = _Reader(spec)
    try:
        text = reader.read()
    except SchemaFault as fault:
        shown = fault if "/" in fault.pointer else fault.text
        raise InvalidRequest(
            f"the {reader.kind or spec.kind} cannot be used: {shown}",
            param=reader.param or param_of(spec.kind),
            reason=f"{fault.reason} at {fault.pointer}"[:200],
        ) from None
    return Source(
        text=text,
        engine=engine_of(spec.kind),
        widened=tuple(reader.widened),
        rewritten=tuple(reader.rewritten),
    )


def is_exact(spec: GrammarSpec) -> bool:
    """Must the engine enforce the whole grammar, so that its warnings count as errors."""
    if spec.strictness == "lenient":
        return False
    if spec.kind == "structural":
        return not any(part.get("is_lenient") for part in json.loads(spec.text)["parts"].values())
    return spec.kind in ("json_schema", "json_object", "structural_tag")


@dataclass(slots=True)
class _Reader:
    """Reads one grammar; `widened` grows by what it lets go.

    `kind` and `param` of the part that is being read: the field of the request that it comes from.
    """

    spec: GrammarSpec
    widened: list[str] = field(default_factory=list)
    rewritten: list[tuple[str, list[Any]]] = field(default_factory=list)
    kind: str = ""
    param: str = ""

    def read(self) -> str:
        """The engine's text. Raises `SchemaFault`, `InvalidRequest`."""
        kind, text = self.spec.kind, self.spec.text
        self._check_text(text)
        if kind in ("json_object", "json_schema"):
            schema, options = self._schema(text if kind == "json_schema" else _ANY_OBJECT)
            return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options))
        if kind == "choice":
            return self._choices(text)
        if kind == "structural":
            return self._structure(text)
        if kind == "structural_tag":
            return json.dumps({"grammars": self._tag("tag", text)})
        if not text:
            raise self._refused(f"an empty {kind}", "empty")
        if kind == "regex":
            check_regex(text)
            return str(LLMatcher.grammar_from_regex(text))
        if kind == "lark":
            return str(LLMatcher.grammar_from_lark(text))
        raise self._refused(f"unknown kind of grammar: {kind[:40]!r}", "kind")

    def _refused(self, text: str, reason: str) -> InvalidRequest:
        return InvalidRequest(text, param=param_of(self.spec.kind), reason=reason)

    def _check_text(self, text: str) -> None:
        if self.spec.strictness not in STRICTNESSES:
            raise self._refused(f"strictness is {' or '.join(STRICTNESSES)}", "strictness")
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise self._refused("a grammar must be valid Unicode", "surrogate") from None
        if size > MAX_TEXT_BYTES:
            limit = f"above the limit of {MAX_TEXT_BYTES}"
            raise self._refused(f"a grammar of {size} bytes is {limit}", "text_bytes")

    def _schema(
        self, text: str, *, at: str = "#", is_lenient: bool = False
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """`at`: the pointer of the schema itself, in what the client wrote."""
        is_lenient = is_lenient or self.spec.strictness == "lenient"
        try:
            made = read_schema(text, is_lenient=is_lenient)
        except SchemaFault as fault:
            pointer = at + fault.pointer.removeprefix("#")
            raise SchemaFault(fault.text, pointer=pointer, reason=fault.reason) from None
        base = f"{self.param}{at}"
        self.widened += [base + pointer.removeprefix("#") for pointer in made.widened]
        self.rewritten += [(base + ptr.removeprefix("#"), put) for ptr, put in made.rewritten]
        return made.schema, made.options

    def _tag(self, name: str, text: str, *, is_lenient: bool = False) -> list[dict[str, Any]]:
        def read(schema: Any, at: str) -> dict[str, Any]:
            found, options = self._schema(json.dumps(schema), at=at, is_lenient=is_lenient)
            return {**found, "x-guidance": options}

        return tag_grammars(name, text, read, _lark_of_regex)

    def _choices(self, text: str) -> str:
        try:
            choices = json.loads(text)
        except (ValueError, RecursionError):
            choices = None
        if not isinstance(choices, list) or not all(isinstance(item, str) for item in choices):
            raise self._refused("choices are a list of strings", "type")
        if not choices or not all(choices):
            raise self._refused("there must be a choice, and none may be empty", "empty")
        if len(choices) > MAX_CHOICES:
            limit = f"above the limit of {MAX_CHOICES}"
            raise self._refused(f"{len(choices)} choices are {limit}", "num_choices")
        return str(LLMatcher.grammar_from_regex("|".join(re.escape(item) for item in choices)))

    def _structure(self, text: str) -> str:
        """A Lark grammar and the parts that it refers to, as one list of grammars."""
        try:
            structure = json.loads(text)
            grammars = [{"name": "structure", "lark_grammar": structure["lark"]}]
            for name, part in structure["parts"].items():
                grammars += self._part(name, part)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise self._refused("a structural grammar is {lark, parts}", "json") from None
        return json.dumps({"grammars": grammars})

    def _part(self, name: str, part: dict[str, Any]) -> list[dict[str, Any]]:
        """The engine's grammars of a part; the first is the whole of it."""
        kind, text, is_lenient = part["kind"], part["text"], bool(part.get("is_lenient"))
        self.kind, self.param = str(kind)[:20], str(part.get("param", ""))
        if kind in ("json_schema", "json_object"):
            schema, options = self._schema(
                text if kind == "json_schema" else _ANY_OBJECT,
                at=str(part.get("at", "#")),
                is_lenient=is_lenient,
            )
            return [{"name": name, "json_schema": {**schema, "x-guidance": options}}]
        if kind == "structural_tag":
            return self._tag(name, text, is_lenient=is_lenient)
        if kind == "choice":
            engine = json.loads(self._choices(text))
        elif kind == "regex" and text:
            check_regex(text, pointer=name)
            engine = json.loads(LLMatcher.grammar_from_regex(text))
        elif kind == "lark" and text:
            return [{"name": name, "lark_grammar": text}]
        else:
            raise self._refused(f"no part of a grammar: {str(kind)[:40]!r}", "kind")
        return [{"name": name, "lark_grammar": engine["grammars"][0]["lark_grammar"]}]
