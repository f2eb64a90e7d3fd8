"""Grammars to compile at the start: a file of JSON lines, `{"kind", "text", "strictness"}` each."""

import json
from pathlib import Path
from typing import Final

from finback.shared.errors import ConfigError
from finback.shared.wire.messages.generate import GrammarSpec

MAX_WARM: Final = 256
_FIELDS: Final = ("kind", "text", "strictness")


def read_warm_list(path: str) -> tuple[GrammarSpec, ...]:
    """None for an empty path. `text` may be a schema as JSON. Raises `ConfigError` with the line."""
    if not path:
        return ()
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"warm_grammars: cannot read {path}: {error}") from error
    found = [
        _spec(line, f"warm_grammars: {path}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if len(found) > MAX_WARM:
        raise ConfigError(f"warm_grammars: {len(found)} grammars; {MAX_WARM} are the limit")
    return tuple(found)


def _spec(line: str, where: str) -> GrammarSpec:
    try:
        told = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: no JSON: {error}") from error
    if not isinstance(told, dict) or not isinstance(told.get("kind"), str):
        raise ConfigError(f"{where}: an object with kind and text is needed")
    unknown = sorted(set(told) - set(_FIELDS))
    if unknown:
        raise ConfigError(f"{where}: unknown field {unknown[0]!r}")
    text = told.get("text", "")
    return GrammarSpec(
        kind=told["kind"],
        text=text if isinstance(text, str) else json.dumps(text, ensure_ascii=False),
        strictness=str(told.get("strictness", "strict")),
    )
