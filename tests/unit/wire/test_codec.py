"""What the codec accepts, what it refuses, and how it names the fault."""

import msgpack
import pytest

from finback.shared.errors import WireError
from finback.shared.wire import codec
from finback.shared.wire.messages.control import PingReply
from finback.shared.wire.messages.generate import SamplingSpec, TokenBatch, TokenRow
from finback.shared.wire.messages.route import RouteRequest


def _packed(**fields: object) -> bytes:
    return msgpack.packb(fields, use_bin_type=True)


def test_unknown_fields_are_ignored_and_missing_ones_have_defaults() -> None:
    body = _packed(instance="a", epoch=1, state="serving", colour="blue")
    assert codec.decode(body, PingReply) == PingReply(instance="a", epoch=1, state="serving")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "undecodable"),
        (b"\xc1", "undecodable"),
        (b"\xdd\xff\xff\xff\xff", "undecodable"),
        (_packed(instance="a"), "lacks epoch, state"),
        (msgpack.packb([1, 2], use_bin_type=True), "must be a map"),
        (_packed(instance=1, epoch=1, state="s"), "instance must be str, not int"),
        (_packed(instance="a", epoch=True, state="s"), "epoch must be int, not bool"),
        (_packed(instance="a", epoch=1.0, state="s"), "epoch must be int, not float"),
        (_packed(instance=b"a", epoch=1, state="s"), "instance must be str, not bytes"),
    ],
)
def test_what_does_not_fit_is_named(body: bytes, words: str) -> None:
    with pytest.raises(WireError, match=words):
        codec.decode(body, PingReply)


def test_nested_messages_and_ranges() -> None:
    batch = TokenBatch(
        epoch=1, step=2, rows=(TokenRow(request_id="r", choice=0, attempt=1, offset=0),)
    )
    assert codec.decode(codec.encode(batch), TokenBatch) == batch
    with pytest.raises(WireError, match="temperature must be within"):
        codec.decode(_packed(temperature=9.0), SamplingSpec)
    assert codec.decode(_packed(temperature=1), SamplingSpec).temperature == 1.0


def test_only_messages_travel() -> None:
    for value in (object(), PingReply, 3 + 4j):
        with pytest.raises(WireError, match="not a wire message"):
            codec.encode(value)


def test_a_message_is_frozen_and_small() -> None:
    request = RouteRequest(request_id="r", model="m", num_prompt_tokens=1, max_tokens=1)
    with pytest.raises(AttributeError):
        request.model = "n"  # type: ignore[misc]  # what the test is about
    assert not hasattr(request, "__dict__")
