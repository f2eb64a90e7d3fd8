"""Structural tags to the engine's grammars: a lazy lexeme up to each trigger, schemas behind it.

The engine ends a lazy lexeme as soon as it matches, so that free text can never run over a trigger:
what opens an island has to go on as one.
"""

import json
from collections.abc import Callable
from typing import Any, Final

from finback.services.sampler.schema_fault import SchemaFault, child
from finback.shared.codec.structural_tags import StructuralTag, TagFault, structural_tag_of

# As in the answers of `codec.formats.surface`: a marker may have a token of its own.
_OPTIONS: Final = '%llguidance {"no_forcing": true}'
_TEXT: Final = "TEXT: /(.|\\n)*/"
# (schema, pointer to it) -> the schema with the options that the engine is given.
ReadSchema = Callable[[Any, str], dict[str, Any]]


def tag_grammars(name: str, text: str, read: ReadSchema) -> list[dict[str, Any]]:
    """The engine's grammars of the structural tag in `text`; the one called `name` is the whole.

    Raises `SchemaFault`, with a pointer into the tag.
    """
    try:
        tag = structural_tag_of(json.loads(text))
    except TagFault as fault:
        raise SchemaFault(
            f"it must be {fault.wanted}", pointer=child("#", *fault.path), reason="structural_tag"
        ) from None
    except (ValueError, RecursionError) as error:
        raise SchemaFault(f"this is no JSON: {error}", pointer="#", reason="json") from None
    schemas = [
        {
            "name": f"{name}_s{index}",
            "json_schema": read(structure.schema, child("#", "structures", index, "schema")),
        }
        for index, structure in enumerate(tag.structures)
    ]
    return [{"name": name, "lark_grammar": _lark(name, tag)}, *schemas]


def _lark(name: str, tag: StructuralTag) -> str:
    islands = " | ".join(f"island{index}" for index in range(len(tag.triggers)))
    lines = [_OPTIONS, f"start: ({islands})* TEXT", _TEXT]
    for index, trigger in enumerate(tag.triggers):
        bodies = [
            f"{_quoted(structure.rest)} @{name}_s{at} {_quoted(structure.end)}"
            for at, structure in enumerate(tag.structures)
            if structure.trigger == index
        ]
        lines.append(f"head{index}[lazy]: TEXT {_quoted(trigger)}")
        lines.append(f"island{index}: head{index} ({' | '.join(bodies)})")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    """A Lark string, which no DEL may stand in as it is; nothing for nothing."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") if text else ""
