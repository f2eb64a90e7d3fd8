"""The model's own Jinja chat template, with the environment that Hugging Face gives it."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from finback.shared.codec.template_budget import (
    BUDGET,
    MAX_TEXT_CHARS,
    BoundedEnvironment,
    Budget,
)
from finback.shared.errors import ConfigError, InvalidRequest

Message = Mapping[str, Any]


class ChatTemplate:
    """Renders messages to the text of a prompt. Thread-safe."""

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        self.source = source
        self._environment = _environment()
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = self._environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the model's chat template is not valid Jinja: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text; what the template itself refuses is the caller's mistake."""
        BUDGET.set(Budget())
        context = {
            **self._tokens,
            "tools": None,
            "documents": None,
            **(variables or {}),
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._bounded_text(context)
        except (jinja2.TemplateError, TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(
                f"the chat template of this model cannot render these messages: {error}",
                param="messages",
            ) from error

    def _bounded_text(self, context: Mapping[str, Any]) -> str:
        parts, num_chars = [], 0
        for part in self._template.generate(context):
            num_chars += len(part)
            if num_chars > MAX_TEXT_CHARS:
                raise jinja2.exceptions.SecurityError("the rendered prompt is too long")
            parts.append(part)
        return "".join(parts)


class _GenerationTag(Extension):
    """`{% generation %}` marks what the model wrote, for training; here it is only a bracket."""

    tags = {"generation"}  # noqa: RUF012 -- the base class declares it without ClassVar

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter it escapes neither HTML nor non-ASCII text."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return time.strftime(pattern)
