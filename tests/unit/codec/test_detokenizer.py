"""Whatever the cuts, the text is whole UTF-8 and equals the decoding of all bytes."""

from hypothesis import given
from hypothesis import strategies as st

from finback.shared.codec.byte_alphabet import BYTE_OF, to_bytes, to_spelling
from finback.shared.codec.detokenizer import Detokenizer


@given(st.lists(st.binary(max_size=5), max_size=12))
def test_cuts_do_not_matter(pieces: list[bytes]) -> None:
    detokenizer = Detokenizer()
    text = "".join(detokenizer.push(piece) for piece in pieces) + detokenizer.finish()
    assert text == b"".join(pieces).decode("utf-8", errors="replace")


@given(st.text(max_size=20))
def test_no_replacement_in_valid_text(text: str) -> None:
    detokenizer, shown = Detokenizer(), ""
    for value in text.encode():
        shown += detokenizer.push(bytes([value]))
        assert text.startswith(shown)
    assert not detokenizer.is_mid_character
    assert shown + detokenizer.finish() == text


def test_mid_character_is_seen() -> None:
    detokenizer = Detokenizer()
    assert detokenizer.push("é".encode()[:1]) == ""
    assert detokenizer.is_mid_character
    assert detokenizer.finish() == "�"


@given(st.binary())
def test_alphabet_round_trip(raw: bytes) -> None:
    assert len(BYTE_OF) == 256
    assert to_bytes(to_spelling(raw)) == raw
