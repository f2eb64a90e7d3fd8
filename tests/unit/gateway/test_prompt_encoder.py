"""The cache of encoded prompts: what it gives is what encoding everything anew would give."""

import random
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finback.services.gateway.prompt_encoder import PromptEncoder
from finback.shared.codec.control_tokens import ControlToken
from finback.shared.codec.encode_cache import Border, EncodeCache, Encoded
from finback.shared.codec.load import load_tokenizer
from finback.shared.codec.prompt_groups import Part, grouped
from finback.shared.codec.tokenizer import Tokenizer
from finback.shared.kv import block_hash
from finback.shared.kv.cache_salt import cache_salt_of
from finback.shared.kv.forget_scope import forget_scope
from finback.shared.models.source import open_source

BLOCK: Final = 16
KEY: Final = b"key"
START: Final = ControlToken(token_id=1, spelling="<|im_start|>")
END: Final = ControlToken(token_id=2, spelling="<|im_end|>")


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    return load_tokenizer(open_source("embedded").text)


def encoder(tokenizer: Tokenizer, **options: Any) -> PromptEncoder:
    return PromptEncoder(tokenizer, block_size=BLOCK, cluster_key=KEY, model_digest="m", **options)


def anew(tokenizer: Tokenizer, parts: Sequence[Part], tenant: str) -> tuple[bytes, bytes]:
    ids = np.asarray(tokenizer.encode_pieces(parts), dtype="<i4")
    root = block_hash.prompt_root(KEY, tenant.encode(), BLOCK)
    hashes = block_hash.extend_all(root, ids.tobytes(), BLOCK, KEY)
    return ids.tobytes(), b"".join(hashes)


def said(size: int, seed: int) -> str:
    draw = random.Random(seed)
    words = (
        "sea",
        " wave",
        " is",
        ",",
        "\n\n",
        "  x = 1",
        " 文字",
        "\uff0c海",
        "12",
        "e\u0301",
        " 👍🏽",
    )
    return "".join(draw.choices(words, k=size))


def turn(role: str, text: str) -> list[Part]:
    return [START, f"{role}\n{text}", END, "\n"]


def ask(parts: Sequence[Part]) -> list[Part]:
    return [*parts, START, "assistant\n"]


def test_a_growing_conversation(smollm: Tokenizer) -> None:
    subject = encoder(smollm)
    parts: list[Part] = []
    for at in range(12):
        parts += turn("user", said(40 * (at % 4) ** 3 + 3, at))
        found = subject.encode(ask(parts), "a")
        assert (found.token_ids, found.block_hashes) == anew(smollm, ask(parts), "a")
        parts += turn("assistant", said(300, 100 + at))
    assert len(subject._cache._prompts) == 1  # each turn replaced the one before


def test_only_the_new_text_is_encoded(smollm: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = encoder(smollm)
    parts = [part for at in range(8) for part in turn("user", said(2000, at))]
    subject.encode(ask(parts), "a")
    encoded: list[int] = []
    original = smollm.encode_many

    def counted(texts: Sequence[str]) -> Any:
        encoded.append(sum(map(len, texts)))
        return original(texts)

    monkeypatch.setattr(smollm, "encode_many", counted)
    new = turn("user", "And then?")
    subject.encode(ask([*parts, *new]), "a")
    subject.encode(ask([*parts, *new]), "a")  # known as a whole
    assert encoded[0] < 4_200
    assert len(encoded) == 1
    subject.encode(ask([*parts, *new]), "b")  # another tenant's: nothing is shared
    assert encoded[1] > 8 * 4_200


CHOICES: Final = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from(["a", "b"])),
    min_size=1,
    max_size=12,
)


@settings(max_examples=40, deadline=None)
@given(CHOICES, st.sampled_from([3_000, 30_000, 10**6]))
def test_any_order_of_prompts(
    smollm: Tokenizer, choices: list[tuple[int, int, str]], max_bytes: int
) -> None:
    """Conversations that fork, shrink and come again, of two tenants, in caches of any size."""
    cache = EncodeCache(max_bytes)
    subject = encoder(smollm, cache=cache)
    for fork, length, tenant in choices:
        parts = turn("system", said(900, 1))
        for at in range(length):
            parts += turn("user", said(500, at if at == 0 else 10 * fork + at))
        found = subject.encode(ask(parts), tenant)
        assert (found.token_ids, found.block_hashes) == anew(smollm, ask(parts), tenant)
        assert cache.num_bytes <= max_bytes
        assert cache.num_bytes == sum(p.num_bytes for p in cache._prompts.values())
        indexed = {id(prompt) for prompt, _ in cache._index.values()}
        assert indexed <= {id(prompt) for prompt in cache._prompts.values()}


def test_one_growing_text_without_control_tokens(smollm: Tokenizer) -> None:
    subject, text = encoder(smollm), ""
    for at in range(6):
        text += said(1500, at)
        found = subject.encode([text], "a")
        assert (found.token_ids, found.block_hashes) == anew(smollm, [text], "a")
    assert len(subject._cache._prompts) == 1


def test_no_two_lists_of_parts_have_one_digest() -> None:
    lists: list[list[Part]] = [
        ["ab"], ["a", "b"], ["t1:a"], [START, "a"], ["a", START], [END, "a"], ["c1:", "a"], ["c1:a"],
    ]  # fmt: skip
    digests = {grouped(parts, salt=b"s", is_cuttable=True)[-1].digest for parts in lists}
    digests |= {grouped(["ab"], salt=b"other", is_cuttable=True)[-1].digest}
    assert len(digests) == len(lists) + 1


def test_text_is_not_cut_where_it_may_not_be() -> None:
    text = "a b " * 5_000
    assert len(grouped([text], salt=b"", is_cuttable=False)) == 1
    assert len(grouped([text], salt=b"", is_cuttable=True)) > 4


def test_the_longest_unused_prompt_goes_first() -> None:
    cache = EncodeCache(1_000)

    def prompt(name: bytes) -> Encoded:
        border = Border(name, 10)
        return Encoded(token_ids=bytes(40), block_hashes=bytes(100), borders=(border,))

    for name in (b"1", b"2"):
        cache.keep(prompt(name), None)
    assert cache.find([b"1"]) is not None
    cache.keep(prompt(b"3"), None)
    assert cache.find([b"2"]) is None
    assert cache.find([b"0", b"1"]) is not None
    assert cache.find([b"3"]) is not None
    too_large = Encoded(token_ids=bytes(4_000), block_hashes=b"", borders=(Border(b"4", 1000),))
    cache.keep(too_large, None)
    assert cache.find([b"4"]) is None


def test_prompts_of_a_tenant_or_a_conversation_are_forgotten(smollm: Tokenizer) -> None:
    cache = EncodeCache(2**22)
    own = encoder(smollm, cache=cache)
    talk, other = ask(turn("user", said(400, 1))), ask(turn("user", said(400, 2)))
    first = own.encode(talk, "ann")
    for parts, whose in ((other, "ann"), (talk, cache_salt_of("ann", "work")), (talk, "bob")):
        own.encode(parts, whose)
    before = cache.num_bytes
    assert own.forget(forget_scope("nobody", b"")) == 0
    assert own.forget(forget_scope(None, first.block_hashes)) == 1
    assert own.forget(forget_scope("ann", b"")) == 2
    assert 0 < cache.num_bytes < before
    assert own.encode(talk, "ann") == first, "it is encoded anew"
    assert own.forget(forget_scope(None, b"")) == 2
    assert cache.num_bytes == 0
