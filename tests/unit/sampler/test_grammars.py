"""What grammars allow, token by token, on the embedded model's vocabulary."""

import json
import random
import re
from collections.abc import Iterator

import jsonschema
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from finback.services.sampler.compiler import Grammar, Vocabulary, compile_grammar
from finback.services.sampler.grammar_source import grammar_id
from finback.shared.codec.tokenizer import Tokenizer
from finback.shared.errors import InvalidRequest
from finback.shared.wire.messages.generate import GrammarSpec

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def compiled(vocabulary: Vocabulary, kind: str, text: str = "") -> Grammar:
    spec = GrammarSpec(kind=kind, text=text)
    return compile_grammar(vocabulary, spec, grammar_id(spec))


def allowed(bitmask: bytes) -> set[int]:
    bits = np.unpackbits(np.frombuffer(bitmask, np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def masks(
    vocabulary: Vocabulary, tokenizer: Tokenizer, grammar: Grammar, text: str
) -> Iterator[tuple[int | None, set[int], bool]]:
    """(next token of `text`, what the mask allows, accepting) up to and with the text's end."""
    matcher = grammar.start.deep_copy()
    for token_id in [*tokenizer.encode(text), None]:
        bitmask = vocabulary.bitmask(matcher)
        assert len(bitmask) == -(-vocabulary.vocab_size // 32) * 4
        yield token_id, allowed(bitmask), matcher.is_accepting()
        if token_id is not None and not matcher.consume_token(token_id):
            return


def accepts(vocabulary: Vocabulary, tokenizer: Tokenizer, grammar: Grammar, text: str) -> bool:
    """Whether the masks let exactly `text` pass and then let it end."""
    ends = set(vocabulary.eos_ids)
    for token_id, mask, is_accepting in masks(vocabulary, tokenizer, grammar, text):
        assert (ends <= mask) == is_accepting and (not ends & mask) == (not is_accepting)
        if token_id is None:
            return is_accepting
        if token_id not in mask:
            return False
    return False


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("regex", r"[a-z]+@[a-z]+\.com", ["bob@mail.com"], ["bob@mail.org", "bob", ""]),
        ("regex", r"^\d{3}$", ["123"], ["12", "1234"]),
        ("regex", r"(yes|no)?", ["", "yes"], ["maybe"]),
        ("choice", '["yes", "no", "n\u00e9 \U0001f600", "a.b", "a\\nb"]',
         ["yes", "n\u00e9 \U0001f600", "a.b", "a\nb"], ["axb", "ye", "yesno"]),
        ("lark", 'start: "a" b+\nb: "b" | "c"', ["abc", "ab"], ["a", "ba"]),
        ("json_object", "", ["{}", '{"a": [1, {"b": null}]}', '{\n    "a": "x"\n}'],
         ["[]", '"a"', "null", "{", '{"a": 1,}']),
        ("json_schema", json.dumps(PERSON), ['{"name": "Bo", "age": 3}', '{"name":"","age":-1}'],
         ['{"name": "Bo"}', '{"age": 3, "name": "Bo"}', '{"name": "Bo", "age": 3, "x": 1}']),
        ("json_schema", "true", ["[1, true]", "null"], ["{", "x"]),
        ("json_schema", '{"enum": ["a", 3]}', ['"a"', "3"], ["a", "4"]),
    ],
)  # fmt: skip
def test_exactly_the_language_passes(
    kind: str,
    text: str,
    good: list[str],
    bad: list[str],
    vocabulary: Vocabulary,
    tokenizer: Tokenizer,
) -> None:
    grammar = compiled(vocabulary, kind, text)
    for sample in good:
        assert accepts(vocabulary, tokenizer, grammar, sample), sample
    for sample in bad:
        assert not accepts(vocabulary, tokenizer, grammar, sample), sample


# The engine wants DEL escaped, which is its right.
TEXT = st.text(st.characters(exclude_characters="\x7f", exclude_categories=["Cs"]), max_size=6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(value=st.dictionaries(TEXT, JSON, max_size=3), indent=st.sampled_from([None, 2]))
def test_every_json_object_passes(
    value: dict[str, object],
    indent: int | None,
    vocabulary: Vocabulary,
    tokenizer: Tokenizer,
) -> None:
    grammar = compiled(vocabulary, "json_object")
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    spelled = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text)))
    assume(spelled == text.encode())  # this vocabulary lacks some rare bytes
    assert accepts(vocabulary, tokenizer, grammar, text)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_sampled_is_a_json_object(
    seed: int, vocabulary: Vocabulary, tokenizer: Tokenizer
) -> None:
    """Random allowed tokens; ends are taken when offered, closing characters are preferred."""
    rng = random.Random(seed)
    matcher = compiled(vocabulary, "json_object").start.deep_copy()
    ids: list[int] = []
    closing = set(tokenizer.encode("}") + tokenizer.encode("]") + tokenizer.encode('"'))
    while True:
        mask = allowed(vocabulary.bitmask(matcher))
        if mask & set(vocabulary.eos_ids):
            break
        likely = sorted(mask & closing) if len(ids) > 20 and rng.random() < 0.9 else []
        ids.append(rng.choice(likely or sorted(mask)))
        assert matcher.consume_token(ids[-1])
        assert len(ids) < 4000
    text = b"".join(tokenizer.token_bytes(i) for i in ids).decode(errors="replace")
    assert isinstance(json.loads(text), dict)


def test_blanks_are_bounded(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    matcher = compiled(vocabulary, "json_object").start.deep_copy()
    matcher.consume_tokens(tokenizer.encode('{"a":'))
    blank = [i for i in range(vocabulary.vocab_size) if tokenizer.token_bytes(i).isspace()]
    num_blank = 0
    while fitting := allowed(vocabulary.bitmask(matcher)) & set(blank):
        matcher.consume_token(min(fitting, key=lambda i: len(tokenizer.token_bytes(i))))
        num_blank += 1
        assert num_blank < 40


def test_control_tokens_are_never_text(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    mask = allowed(vocabulary.bitmask(compiled(vocabulary, "regex", r"(?s:.*)").start.deep_copy()))
    control = {i for i in range(vocabulary.vocab_size) if tokenizer.is_special(i)}
    assert len(control) >= 3
    assert mask & control == set(vocabulary.eos_ids)
    assert len(mask) > 40_000


@pytest.mark.parametrize(
    ("kind", "text", "param", "names"),
    [
        ("regex", "(a", "structured_outputs.regex", "unclosed group"),
        ("regex", "(?=a)b", "structured_outputs.regex", "look-around"),
        ("regex", "", "structured_outputs.regex", "empty"),
        ("regex", r"[^\s\S]", "structured_outputs.regex", ""),
        ("regex", "a\ud800", "structured_outputs.regex", "surrogate"),
        ("regex", "a" * 300_000, "structured_outputs.regex", "text_bytes"),
        ("choice", "[]", "structured_outputs.choice", "empty"),
        ("choice", '["a", ""]', "structured_outputs.choice", "empty"),
        ("choice", '["a", 1]', "structured_outputs.choice", "type"),
        ("choice", "{", "structured_outputs.choice", "type"),
        ("choice", json.dumps(["x"] * 10_001), "structured_outputs.choice", "num_choices"),
        ("lark", "start: foo", "structured_outputs.grammar", 'unknown name: "foo"'),
        ("lark", "%import nothing.X\nstart: X", "structured_outputs.grammar", ""),
        ("json_schema", "{", "response_format.json_schema", "json"),
        ("json_schema", "3", "response_format.json_schema", "type"),
        ("json_schema", "false", "response_format.json_schema", "endless"),
        ("json_schema", '{"type": "objct"}', "response_format.json_schema", "type at #/type"),
        ("json_schema", '{"not": {}}', "response_format.json_schema", "not"),
        ("json_schema", '{"not": {"pattern": "a"}, "x-guidance": {"lenient": true}}',
         "response_format.json_schema", "not at #/not"),
        ("json_schema", '{"type": "string", "format": "iri"}', "response_format.json_schema",
         "format at #/format"),
        ("json_schema", '{"a":' * 100 + "1" + "}" * 100, "response_format.json_schema", "depth"),
        ("json_schema", "[" * 100_000, "response_format.json_schema", "json"),
        ("json_schema", '{"$ref": "http://other.host/x"}', "response_format.json_schema", ""),
        ("pigeon", "x", "structured_outputs", "kind"),
    ],
)  # fmt: skip
def test_a_bad_grammar_is_named(
    kind: str, text: str, param: str, names: str, vocabulary: Vocabulary
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        compiled(vocabulary, kind, text)
    assert caught.value.param == param
    assert caught.value.reason and names in caught.value.reason
    assert "<state>" not in caught.value.public_message


HOSTILE = {
    "nested repetition": ("regex", r"((a{1,1000}b{1,1000}){1,1000}c{1,1000}){1,1000}"),
    "many states": ("regex", r"(a|b)*a(a|b){2000}"),
    "wide enum": ("json_schema", json.dumps({"enum": [f"value {i}" for i in range(12_000)]})),
    "long bounds": ("json_schema", '{"type": "string", "minLength": 99999, "maxLength": 999999}'),
    "items": ("json_schema", '{"type": "array", "minItems": 100000, "items": {"type": "integer"}}'),
    "no base case": (
        "json_schema",
        json.dumps(
            {
                "$ref": "#/$defs/a",
                "$defs": {
                    "a": {
                        "type": "object",
                        "required": ["x"],
                        "properties": {"x": {"$ref": "#/$defs/a"}},
                    }
                },
            }
        ),
    ),
    "wide rule": ("lark", "start: " + " | ".join(f'"w{i}"' for i in range(20_000))),
    "any of": ("json_schema", json.dumps({"anyOf": [{"const": f"c{i}"} for i in range(3000)]})),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_end_in_time(name: str, vocabulary: Vocabulary) -> None:
    """Compiled, or refused, by the engine's own budgets already."""
    try:
        compiled(vocabulary, *HOSTILE[name])
    except InvalidRequest as error:
        assert error.reason


def test_a_grammar_too_wide_to_follow_is_refused(vocabulary: Vocabulary) -> None:
    with pytest.raises(InvalidRequest, match="20001 items"):
        compiled(vocabulary, *HOSTILE["wide rule"])


BLANKS = {
    "type": "array",
    "minItems": 2,
    "maxItems": 3,
    "items": {
        "type": "object",
        "properties": {
            "a": {"type": "boolean"},
            "b": {"type": "array", "items": {"enum": [1, "x", None]}, "maxItems": 2},
            "c": {
                "properties": {"d": {"enum": [1, 2]}},
                "additionalProperties": False,
                "type": "object",
            },
        },
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("end", ["never", "as any"])
def test_a_model_that_wants_blanks_comes_to_an_end(
    seed: int, end: str, vocabulary: Vocabulary, tokenizer: Tokenizer
) -> None:
    """At temperature 1.5, all likelihood on tokens with blanks; the end, if need be, last of all."""
    temperature, rng = 1.5, np.random.default_rng(seed)
    logits = rng.normal(0.0, 3.0, vocabulary.vocab_size)
    spelled = [tokenizer.token_bytes(i) for i in range(vocabulary.vocab_size)]
    logits += [40.0 * text.isspace() + 10.0 * any(b in b" \n\t" for b in text) for text in spelled]
    if end == "never":
        logits[list(vocabulary.eos_ids)] = -100.0
    matcher = compiled(vocabulary, "json_schema", json.dumps(BLANKS)).start.deep_copy()
    text, num_tokens = b"", 0
    while True:
        mask = np.array(sorted(allowed(vocabulary.bitmask(matcher))))
        weights = np.exp((logits[mask] - logits[mask].max()) / temperature)
        token_id = int(rng.choice(mask, p=weights / weights.sum()))
        if token_id in vocabulary.eos_ids:
            break
        assert matcher.consume_token(token_id)
        text, num_tokens = text + spelled[token_id], num_tokens + 1
        assert num_tokens < 2000
    value = json.loads(text)
    assert isinstance(value, list)
    jsonschema.validate(value, BLANKS)
    outside = re.sub(rb'"(?:[^"\\]|\\.)*"', b'""', text)
    assert max(map(len, re.findall(rb"\s+", outside)), default=0) <= 2 + 1 + 32
    assert text.strip() == text  # nothing comes before or behind
    assert len(re.findall(rb"\s+", outside)) > 5


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer"}, ["0", "-7", "12345678901234567890"], ["1.0", "1e2", "01", "+1", "-"]),
        ({"type": "number"}, ["0", "-0.5", "1e2", "2E-3", "1.50"], ["01", ".5", "1.", "NaN", "1e", "0x1"]),
        ({"type": "number", "minimum": 0.5, "exclusiveMaximum": 2}, ["0.5", "1", "1.99"],
         ["0.49", "2", "2.0", "-1", "1e0"]),
        ({"type": "integer", "multipleOf": 3, "minimum": 4, "maximum": 10}, ["6", "9"], ["3", "4", "12"]),
        ({"type": "string", "maxLength": 2},
         ['"\u00e9\u6f22"', r'"\u00e9\u6f22"', r'"\ud83d\ude00!"', '"\U0001f600!"', r'"\"\\"', r'"\u0041"'],
         ['"abc"', r'"\ud83d"', r'"\ude00"', r'"\x41"', '"a\nb"', '"\t"', r'"\ud83dA"']),
        ({"enum": ["\u00e9", "\n"]}, ['"\u00e9"', r'"\n"'], ['"\n"', '"e"']),
        ({"type": "object", "properties": {"z": {"type": "null"}, "a": {"type": "null"}}, "required": ["q"],
          "additionalProperties": {"const": 1}},
         ['{"z":null,"a":null,"q":1}', '{"a":null,"q":1,"b":1}', '{"q":1}'],
         ['{"a":null,"z":null,"q":1}', '{"q":1,"a":null}', '{"b":1,"q":1}', '{"z":null}']),
    ],
)  # fmt: skip
def test_numbers_unicode_and_order(
    schema: object, good: list[str], bad: list[str], vocabulary: Vocabulary, tokenizer: Tokenizer
) -> None:
    grammar = compiled(vocabulary, "json_schema", json.dumps(schema))
    for text in good:
        assert accepts(vocabulary, tokenizer, grammar, text), text
    for text in bad:
        assert not accepts(vocabulary, tokenizer, grammar, text), text
