"""A request body to a JSON object, with the checks that come before any field has a meaning."""

import json
import re
from typing import Any, Final

from finback.shared.codec.strict_json import finite
from finback.shared.errors import InvalidRequest

MAX_BODY_BYTES: Final = 8 * 2**20
MAX_DEPTH: Final = 64
# An escaped half of a surrogate pair; whether its other half follows is looked at afterwards.
_ESCAPED_SURROGATE: Final = re.compile(rb"\\u[dD][89abAB]|\\u[dD][c-fC-F]")


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a body; everything that is wrong with it is a 400."""
    try:
        value = json.loads(
            body.decode("utf-8"), parse_constant=_refuse_constant, parse_float=finite
        )
    except UnicodeDecodeError as error:
        raise _invalid_json("the body is not valid UTF-8") from error
    except RecursionError as error:
        raise _invalid_json(f"the body is nested more than {MAX_DEPTH} levels deep") from error
    except json.JSONDecodeError as error:
        raise _invalid_json(f"the body is not valid JSON: {error}") from error
    except ValueError as error:
        has_many_digits = "int_max_str_digits" in str(error)
        text = "a whole number has too many digits" if has_many_digits else str(error)
        raise _invalid_json(f"the body is not valid JSON: {text}") from error
    if not isinstance(value, dict):
        raise _invalid_json("the body must be a JSON object")
    _check_depth(value)
    if _ESCAPED_SURROGATE.search(body):
        _check_surrogates(value, "")
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _invalid_json(message: str) -> InvalidRequest:
    return InvalidRequest(message, reason="invalid_json")


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise _invalid_json(f"the body is nested more than {MAX_DEPTH} levels deep")
        level = [
            item
            for holder in level
            for item in (holder.values() if type(holder) is dict else holder)
            if type(item) is dict or type(item) is list
        ]


def _check_surrogates(value: Any, where: str) -> None:
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"{where} holds an unpaired surrogate, which is no text", param=where
            ) from error
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_surrogates(key, where or "body")
            _check_surrogates(item, f"{where}.{key}" if where else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_surrogates(item, f"{where}.{index}")
