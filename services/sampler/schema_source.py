"""A JSON Schema's text -> what the engine is given: its own keywords, and options it may not loosen."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from finback.services.sampler.schema_budget import check_budget
from finback.services.sampler.schema_dynamic import with_static_references
from finback.services.sampler.schema_ends import check_ends
from finback.services.sampler.schema_fault import SchemaFault, dialect_of
from finback.services.sampler.schema_form import check_form
from finback.services.sampler.schema_rewrite import Rewriter
from finback.services.sampler.schema_walk import every_schema

# Between two JSON tokens: up to two blanks, or one line break and an indent. Bounded, because a
# model may otherwise write blanks for ever.
_WHITESPACE: Final = r"[ ]{1,2}|[ ]?\r?\n[ \t]{0,32}"
# Given as overrides, so that a schema's own "x-guidance" cannot loosen them.
_OPTIONS: Final[Mapping[str, Any]] = {
    "whitespace_flexible": True,
    "whitespace_pattern": _WHITESPACE,
    "coerce_one_of": False,
}
_NO_UNICODE_ESCAPES: Final = 'nrbtf\\"'


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSchema:
    """A schema for the engine, and its options. `widened`: pointers of what is not enforced.

    `rewritten`: (pointer, the schemas that say the same instead) of keywords the engine is not given.
    """

    schema: dict[str, Any]
    options: dict[str, Any]
    widened: list[str]
    rewritten: list[tuple[str, list[Any]]]


def read_schema(text: str, *, is_lenient: bool) -> ReadSchema:
    """Analyse and rewrite. Raises `SchemaFault`."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SchemaFault(f"the schema is not JSON: {error}", pointer="#", reason="json") from None
    if schema is False:
        raise SchemaFault("the schema false lets no value be", pointer="#", reason="endless")
    if not isinstance(schema, dict | bool):
        raise SchemaFault("a JSON schema is an object", pointer="#", reason="type")
    check_budget(schema)
    check_form(schema, dialect_of(schema))
    schema = with_static_references(schema, dialect_of(schema))
    rewriter = Rewriter(schema, is_lenient=is_lenient)
    check_ends(rewriter.endings, schema)
    made = rewriter.run()
    if made is True:
        made = {}
    return ReadSchema(
        schema=made,
        options=json_options(made, is_lenient=is_lenient),
        widened=rewriter.widened,
        rewritten=rewriter.rewritten,
    )


def json_options(schema: dict[str, Any], *, is_lenient: bool) -> dict[str, Any]:
    r"""How strings and blanks may be spelled.

    `\uXXXX` only where no object has both named members and others: there the engine compares names
    as they are spelled, so that an escape would let a named member pass for another.
    """
    options: dict[str, Any] = {**_OPTIONS, "lenient": is_lenient}
    if any(_is_open(found) for _, found in every_schema(schema)):
        options["json_allowed_escapes"] = _NO_UNICODE_ESCAPES
    else:
        options["json_allow_general_unicode_escapes"] = True
    return options


def _is_open(schema: dict[str, Any]) -> bool:
    names = schema.get("properties") or schema.get("patternProperties")
    return bool(names) and schema.get("additionalProperties") is not False
