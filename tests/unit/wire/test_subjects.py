"""Subjects are built from clean tokens only."""

import pytest

from finback.shared.wire.subjects import Subjects

S = Subjects()


def test_subjects() -> None:
    assert S.service("router", "route") == "finback.v1.router.route"
    assert S.instance("decode", "decode-1a2b3c", "ping") == "finback.v1.decode.decode-1a2b3c.ping"
    assert S.stream("gateway-1", "decode-1") == "finback.v1.stream.gateway-1.decode-1"
    assert S.streams_for("gateway-1") == "finback.v1.stream.gateway-1.*"
    assert S.event("decode", "load") == "finback.v1.event.decode.load"
    assert S.api("chat.completions") == "finback.v1.api.chat.completions"
    assert Subjects("a.b").service("router", "route") == "a.b.v1.router.route"


@pytest.mark.parametrize("token", ["", "*", ">", "a.b", "a b", "Ä", "UPPER", "a\n", "-x"])
def test_odd_tokens_never_reach_a_subject(token: str) -> None:
    with pytest.raises(ValueError, match="not a subject token"):
        S.service(token, "route")
    with pytest.raises(ValueError, match="not a subject token"):
        S.instance("decode", token, "ping")
    if token != "a.b":  # a prefix may have several
        with pytest.raises(ValueError, match="not a subject token"):
            Subjects(token)
