"""How one setting is declared, and how a value for it is read and checked. Pure."""

import dataclasses
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from finback.shared.errors import ConfigError

_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is known about a field beside its type; kept in the field's metadata."""

    help: str
    unit: str = ""
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    is_secret: bool = False


def setting(
    default: Any,
    help: str,
    *,
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    env: tuple[str, ...] = (),
    is_secret: bool = False,
) -> Any:
    """Declare one setting. `env` names further variables, read when `FINBACK_<NAME>` is not set."""
    told = Setting(
        help=help, unit=unit, low=low, high=high, choices=choices, env=env, is_secret=is_secret
    )
    return dataclasses.field(default=default, metadata={"setting": told})


def parse(name: str, value: Any, kind: Any, told: Setting, source: str) -> Any:
    """The value as its type, checked; a `ConfigError` names the setting, the limit and the source.

    `kind`: bool, int, float, str or `tuple[str, ...]`. Text is converted, as it comes from the
    environment; other values must have the type already.
    """
    try:
        parsed = _convert(value, kind)
    except (TypeError, ValueError):
        wanted = _kind_name(kind)
        shown = "what was given" if told.is_secret else repr(value)
        raise ConfigError(f"{name} must be {wanted}, not {shown} (from {source})") from None
    if told.choices and parsed not in told.choices:
        allowed = ", ".join(told.choices)
        raise ConfigError(f"{name} must be one of {allowed}, not {parsed!r} (from {source})")
    _check_range(name, parsed, told, source)
    return parsed


def _check_range(name: str, value: Any, told: Setting, source: str) -> None:
    unit = f" {told.unit}" if told.unit else ""
    if told.low is not None and not value >= told.low:
        raise ConfigError(
            f"{name} must be at least {told.low:g}{unit}, not {value:g} (from {source})"
        )
    if told.high is not None and not value <= told.high:
        raise ConfigError(
            f"{name} must be at most {told.high:g}{unit}, not {value:g} (from {source})"
        )


def _convert(value: Any, kind: Any) -> Any:
    if isinstance(kind, types.GenericAlias):  # tuple[str, ...]
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, list | tuple):
            raise TypeError
        return tuple(text for item in items if (text := _convert(item, str).strip()))
    if kind is bool and isinstance(value, str):
        if value.lower() in _TRUE | _FALSE:
            return value.lower() in _TRUE
        raise ValueError
    if kind is str and isinstance(value, Path):
        return str(value)
    if kind in (int, float) and isinstance(value, str):
        return kind(value.replace("_", ""))
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise TypeError
    return value


def _kind_name(kind: Any) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return names.get(kind, "a list of texts")
