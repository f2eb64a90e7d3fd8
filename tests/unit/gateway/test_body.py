"""What is refused before any field has a meaning."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finback.services.gateway.body import parse_object
from finback.shared.errors import InvalidRequest

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), JSON, max_size=4), st.booleans())
def test_any_json_object_is_read(value: dict[str, object], ascii_only: bool) -> None:
    import json

    try:
        body = json.dumps(value, ensure_ascii=ascii_only).encode()
    except UnicodeEncodeError:
        return
    assert parse_object(body) == value


@given(st.binary(max_size=60))
def test_any_bytes_are_an_object_or_a_400(body: bytes) -> None:
    try:
        assert isinstance(parse_object(body), dict)
    except InvalidRequest:
        pass


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b'{"a":}',
        b'{"a":NaN}',
        b'{"a":-Infinity}',
        b'{"a":' + b"9" * 5000 + b"}",
        b"\xff\xfe{}",
        b'{"a":"\xff"}',
        b"[" * 100_000,
        b'{"a":' * 100 + b"1" + b"}" * 100,
    ],
)
def test_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_object(body)
    assert caught.value.reason == "invalid_json"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (rb'{"a":{"b":["x","\ud800"]}}', "a.b.1"),
        (rb'{"m":"\uDC00x"}', "m"),
        (rb'{"\ud800":1}', "body"),
    ],
)
def test_unpaired_surrogates_are_named(body: bytes, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_object(body)
    assert caught.value.param == param


def test_paired_surrogates_are_text() -> None:
    assert parse_object(rb'{"a":"\ud83d\ude00"}') == {"a": "😀"}
