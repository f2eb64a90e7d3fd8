"""What is read can be written again, and is what Python's own reader says."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finback.services.gateway.messages_content import INVALID, input_of
from finback.shared.codec.dialogue import ToolCall
from finback.shared.codec.prompts.template_values import call_arguments
from finback.shared.codec.strict_json import MAX_DEPTH, loads_strictly

BAD = [
    r'{"a": "\ud800"}',
    r'{"\uDFFF": 1}',
    '{"a": 1e999}',
    '{"a": [-1e999]}',
    '{"a": NaN}',
    '{"a": -Infinity}',
    '{"a": ' + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "}",
    '{"a": ' + "[" * 100_000,
    '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}",
    '{"a": ' + "9" * 5_000 + "}",
    '{"a": }',
]
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)  # fmt: skip


@pytest.mark.parametrize("text", BAD)
def test_what_cannot_be_given_back_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        loads_strictly(text)
    assert input_of(text) == {INVALID: text}
    call = ToolCall(call_id="c", name="f", arguments=text)
    assert call_arguments(call) == text


@given(values, st.booleans())
def test_everything_else_is_read(value: Any, is_ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii)
    assert loads_strictly(text) == json.loads(text)


def test_pairs_of_surrogates_are_characters() -> None:
    assert loads_strictly(r'{"a": "\ud83d\ude00"}') == {"a": "\U0001f600"}
