"""Frozen dataclasses to MessagePack and back; the only module that imports msgpack.

A message is a map of field names. Unknown fields are ignored and new fields have defaults, so that
two releases can share a bus. Types are checked once, on decode, by a reader that is built from the
annotations and kept; ranges belong to `__post_init__` of the message.

`encode` seals a body: its first entry says so, its last one is the XXH3-64 of all bytes before it.
TCP's 16 bits let one in 65,536 damaged segments pass, loopback and the server's memory check
nothing, and a flipped bit in a token id is a wrong answer. Readers that know no seal ignore both
entries; a body without a seal is read as before (ADR 18).
"""

import dataclasses
import types
import typing
from collections.abc import Callable
from typing import Any, Final, TypeVar, dataclass_transform

import msgpack
import xxhash

from finback.shared.errors import WireError

T = TypeVar("T")
_Reader = Callable[[Any, str], Any]

_SCHEMA_ATTR: Final = "__finback_schema__"
# No field is called so. The first stands at the front, so that damage to the last entry's own key
# is seen as well.
_SEALED: Final = "#"
_SEAL: Final = "##"
_SEAL_BYTES: Final = 8
_SEAL_HEAD: Final = b"\xa2##\xc4\x08"  # the key and the head of 8 bytes
_NO_SEAL: Final = bytes(_SEAL_BYTES)
_READERS: dict[type, _Reader] = {}
_FIELDS: dict[type, tuple[str, ...]] = {}


@dataclass_transform(frozen_default=True, kw_only_default=True)
def message(schema: str) -> Callable[[type[T]], type[T]]:
    """Declare a wire message; `schema` is `<owner>.<Name>/<version>` and never changes meaning."""

    def declare(cls: type[T]) -> type[T]:
        made = dataclasses.dataclass(frozen=True, slots=True, kw_only=True)(cls)
        setattr(made, _SCHEMA_ATTR, schema)
        return made

    return declare


def schema_of(message_type: type) -> str:
    """The schema name that travels in the `Finback-Schema` header."""
    try:
        return typing.cast(str, getattr(message_type, _SCHEMA_ATTR))
    except AttributeError:
        raise WireError(f"{message_type.__name__} is not a wire message") from None


def encode(value: Any) -> bytes:
    """Encode one message as MessagePack, sealed."""
    body = msgpack.packb({_SEALED: 1, **_plain(value), _SEAL: _NO_SEAL}, use_bin_type=True)
    inner = memoryview(body)[:-_SEAL_BYTES]
    return b"".join((inner, xxhash.xxh3_64_digest(inner)))


def pack(value: Any) -> bytes:
    """One message as MessagePack without a seal: the bytes that its fields alone decide."""
    return msgpack.packb(_plain(value), use_bin_type=True)


def decode(body: bytes | memoryview, message_type: type[T]) -> T:
    """Decode and check one message; one that is damaged or does not fit raises `WireError`."""
    is_sealed = _has_good_seal(body, message_type)
    try:
        raw = msgpack.unpackb(body, raw=False, strict_map_key=False)
    except Exception as error:  # msgpack raises many unrelated types for bad bytes
        raise WireError(f"undecodable body for {schema_of(message_type)}") from error
    if not is_sealed and isinstance(raw, dict) and _SEALED in raw:
        raise WireError(f"damaged body for {schema_of(message_type)}", reason="checksum")
    try:
        return typing.cast(T, _reader(message_type)(raw, message_type.__name__))
    except (TypeError, ValueError) as error:
        raise WireError(f"{schema_of(message_type)}: {error}") from error


def _has_good_seal(body: bytes | memoryview, message_type: type) -> bool:
    """False when there is no seal; `WireError` when there is one that does not fit."""
    head_at = len(body) - _SEAL_BYTES - len(_SEAL_HEAD)
    if head_at < 0 or body[head_at:-_SEAL_BYTES] != _SEAL_HEAD:
        return False
    inner = memoryview(body)[:-_SEAL_BYTES]
    if xxhash.xxh3_64_digest(inner) != body[-_SEAL_BYTES:]:
        raise WireError(f"damaged body for {schema_of(message_type)}", reason="checksum")
    return True


def _plain(value: Any) -> Any:
    cls = type(value)
    if cls in _PASS:
        return value
    if cls is tuple or cls is list:
        return [_plain(item) for item in value]
    if cls is dict:
        return {key: _plain(item) for key, item in value.items()}
    names = _FIELDS.get(cls)
    if names is None:
        schema_of(cls)
        names = _FIELDS[cls] = tuple(field.name for field in dataclasses.fields(cls))
    return {name: _plain(getattr(value, name)) for name in names}


_PASS: Final = frozenset({bool, int, float, str, bytes, type(None)})


def _reader(annotation: Any) -> _Reader:
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        found = _READERS.get(annotation)
        if found is None:
            found = _READERS[annotation] = _message_reader(annotation)
        return found
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        return _optional_reader(args)
    if origin is tuple:
        return _tuple_reader(args)
    if origin is dict:
        return _dict_reader(args)
    return _scalar_reader(annotation)


def _message_reader(cls: type) -> _Reader:
    hints = typing.get_type_hints(cls)
    # Read lazily so that a message may hold messages declared later in its module.
    readers = {field.name: hints[field.name] for field in dataclasses.fields(cls)}
    # Name, the type that needs no further look, the reader for all else, where it stands.
    plan: list[tuple[str, Any, _Reader, str]] = []
    required = {
        field.name
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }

    def read(raw: Any, where: str) -> Any:
        if not isinstance(raw, dict):
            raise TypeError(f"{where} must be a map")
        if not required <= raw.keys():
            missing = ", ".join(sorted(required - raw.keys()))
            raise TypeError(f"{where} lacks {missing}")
        if not plan:
            plan.extend(
                (name, _plain_type(hint), _reader(hint), f"{cls.__name__}.{name}")
                for name, hint in readers.items()
            )
        values = {}
        for name, plain_type, reader, path in plan:
            if name in raw:
                value = raw[name]
                values[name] = value if type(value) is plain_type else reader(value, path)
        return cls(**values)

    return read


def _plain_type(hint: Any) -> Any:
    """The type of a scalar field, or of an optional one; a value of it is taken as it is."""
    args = [arg for arg in typing.get_args(hint) if arg is not type(None)]
    if typing.get_origin(hint) in (types.UnionType, typing.Union) and len(args) == 1:
        hint = args[0]
    return hint if hint in (bool, int, float, str, bytes) else None


def _optional_reader(args: tuple[Any, ...]) -> _Reader:
    inner = [_reader(arg) for arg in args if arg is not type(None)]
    if len(inner) != 1 or len(args) != 2:
        raise TypeError("a union on the wire is a type or None")

    def read(raw: Any, where: str) -> Any:
        return None if raw is None else inner[0](raw, where)

    return read


def _tuple_reader(args: tuple[Any, ...]) -> _Reader:
    if len(args) == 2 and args[1] is Ellipsis:
        item = _reader(args[0])

        def read_many(raw: Any, where: str) -> Any:
            if not isinstance(raw, list):
                raise TypeError(f"{where} must be a list")
            return tuple(item(value, where) for value in raw)

        return read_many
    items = [_reader(arg) for arg in args]

    def read_fixed(raw: Any, where: str) -> Any:
        if not isinstance(raw, list) or len(raw) != len(items):
            raise TypeError(f"{where} must be a list of {len(items)}")
        return tuple(reader(value, where) for reader, value in zip(items, raw, strict=True))

    return read_fixed


def _dict_reader(args: tuple[Any, ...]) -> _Reader:
    key, value = _reader(args[0]), _reader(args[1])

    def read(raw: Any, where: str) -> Any:
        if not isinstance(raw, dict):
            raise TypeError(f"{where} must be a map")
        return {key(k, where): value(v, where) for k, v in raw.items()}

    return read


def _scalar_reader(expected: Any) -> _Reader:
    if expected not in (bool, int, float, str, bytes):
        raise TypeError(f"{expected} cannot travel on the wire")

    def read(raw: Any, where: str) -> Any:
        if expected is float and type(raw) is int:
            return float(raw)
        if type(raw) is not expected:
            raise TypeError(f"{where} must be {expected.__name__}, not {type(raw).__name__}")
        return raw

    return read
