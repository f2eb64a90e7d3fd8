"""Stored bytes of every message still decode, and msgspec reads and writes the same.

A message that is new, or has a new field, needs `python tests/support/wire_samples.py`, which adds
its bytes to `golden.json` and never changes what is there.
"""

from typing import Any

import msgspec
import pytest

from finback.shared.wire import codec
from support import wire_samples

TYPES = wire_samples.message_types()
IDS = [codec.schema_of(message_type) for message_type in TYPES]


def keeps(old: Any, new: Any) -> bool:
    """Whether `new` says all that `old` does; maps at any depth may have gained fields."""
    if isinstance(old, dict) and isinstance(new, dict):
        return all(key in new and keeps(old[key], new[key]) for key in old)
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(keeps, old, new))
    return bool(type(old) is type(new) and old == new)


@pytest.mark.parametrize("message_type", TYPES, ids=IDS)
def test_stored_bytes_still_decode(message_type: type) -> None:
    golden = wire_samples.stored().get(codec.schema_of(message_type), [])
    assert golden, "new message: run python tests/support/wire_samples.py"
    for text in golden:
        body = bytes.fromhex(text)
        decoded: object = codec.decode(body, message_type)
        old = msgspec.msgpack.decode(body)
        new = msgspec.msgpack.decode(codec.pack(decoded))
        assert keeps(old, new), "no field is lost, renamed or retyped"
        assert msgspec.msgpack.decode(body, type=message_type) == decoded


@pytest.mark.parametrize("message_type", TYPES, ids=IDS)
def test_today_s_bytes_are_stored(message_type: type) -> None:
    body = codec.pack(wire_samples.sample(message_type))
    golden = wire_samples.stored().get(codec.schema_of(message_type), [])
    assert body.hex() in golden, "changed fields: run python tests/support/wire_samples.py"


@pytest.mark.parametrize("message_type", TYPES, ids=IDS)
def test_a_second_writer_writes_the_same(message_type: type) -> None:
    value = wire_samples.sample(message_type)
    assert msgspec.msgpack.encode(value) == codec.pack(value)
    assert codec.decode(codec.encode(value), message_type) == value
    assert msgspec.msgpack.decode(codec.encode(value), type=message_type) == value, "seal ignored"


def test_schemas_are_well_formed_and_all_there() -> None:
    for schema in IDS:
        owner, _, rest = schema.partition(".")
        name, _, version = rest.partition("/")
        assert owner.islower() and name[0].isupper() and version.isdigit(), schema
    assert set(wire_samples.stored()) <= set(IDS), "a message was removed or renamed"
