"""Text, stop strings and logprobs of a choice, whatever the cuts."""

from hypothesis import given
from hypothesis import strategies as st

from finback.shared.codec.answer_text import AnswerText
from finback.shared.codec.tokenizer import Tokenizer


def run(
    tokenizer: Tokenizer, batches: list[list[int]], stops: list[str], min_tokens: int = 0
) -> tuple[str, list[int], tuple[str, int] | None]:
    text: AnswerText[int] = AnswerText(tokenizer, stops, min_tokens=min_tokens)
    shown, told, position = "", [], 0
    for batch in batches:
        delta = text.push(batch, list(range(position, position + len(batch))))
        position += len(batch)
        shown += delta.text
        told += [entry for _, entry in delta.logprobs]
        if delta.stop is not None:
            return shown, told, (delta.stop.matched, delta.stop.num_tokens)
    delta = text.finish()
    told += [entry for _, entry in delta.logprobs]
    stop = delta.stop
    return shown + delta.text, told, None if stop is None else (stop.matched, stop.num_tokens)


@st.composite
def cut(draw: st.DrawFn, ids: list[int]) -> list[list[int]]:
    batches: list[list[int]] = [[]]
    for token_id in ids:
        if draw(st.booleans()):
            batches.append([])
        batches[-1].append(token_id)
    return batches


@given(st.text("aé👍🏽 \n1", max_size=30), st.data())
def test_cuts_do_not_matter(smollm: Tokenizer, text: str, data: st.DataObject) -> None:
    ids = smollm.encode(text)
    stops = data.draw(st.lists(st.sampled_from(["é", "a 1", "👍", "\n\n", "zz"]), max_size=3))
    expected = run(smollm, [[token_id] for token_id in ids], stops)
    assert run(smollm, data.draw(cut(ids)), stops) == expected
    told = b"".join(smollm.token_bytes(ids[index]) for index in expected[1])
    assert told.startswith(expected[0].encode())
    if not stops:
        assert expected[0] == text
        assert expected[1] == list(range(len(ids)))


def test_the_stop_is_counted_in_tokens(smollm: Tokenizer) -> None:
    ids = smollm.encode("one two three four")
    shown, told, stop = run(smollm, [ids], ["ee f"])
    assert (shown, stop) == ("one two thr", ("ee f", 4))
    assert told == [0, 1, 2]  # " three" is shown in part, " four" is not
    assert run(smollm, [ids], [" three"])[:2] == ("one two", [0, 1])
    assert run(smollm, [ids], ["one"])[:2] == ("", [])


def test_min_tokens_come_before_stops(smollm: Tokenizer) -> None:
    ids = smollm.encode("a b a b a b")
    assert run(smollm, [ids], [" b"])[2] == (" b", 2)
    assert run(smollm, [ids], [" b"], min_tokens=3)[2] == (" b", 4)


def test_special_tokens_are_not_shown(smollm: Tokenizer) -> None:
    ids = [*smollm.encode("a"), 1, 2, *smollm.encode("b")]
    assert run(smollm, [ids], [])[:2] == ("ab", [0, 1, 2, 3])
    assert AnswerText(smollm, []).push(ids).text == "ab"
