"""What `LLM` answers, whole and streamed, and what it refuses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finback.shared.errors import ConfigError
from finback.shared.offline.errors import InvalidInput
from finback.shared.offline.llm import LLM
from finback.shared.offline.outputs import CompletionChunk
from finback.shared.offline.params import SamplingParams
from finback.shared.offline.prompts import Prompt
from support.tiny_llm import VOCAB_SIZE, mixed_params, tiny_llm, token_prompts, told

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)


def test_answers_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts: list[Prompt] = ["the", [5, 6, 7], np.array([8, 9]), (10,)]
    found = llm.generate(prompts, GREEDY)
    assert [c.index for c in found] == [0, 1, 2, 3]
    assert [c.prompt_token_ids for c in found] == [(95, 72), (5, 6, 7), (8, 9), (10,)]
    assert told(llm.generate([8, 9], GREEDY))[0][1:] == told(found)[2][1:]  # type: ignore[index]  # tuples
    for completion in found:
        assert completion.text == llm.tokenizer.decode(completion.token_ids)
        assert completion.finish_reason == "length"
        assert completion.logprobs is not None
        assert len(completion.logprobs) == len(completion.token_ids) == 24
        for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True):
            assert len(entry.top) == 2
            assert entry.logprob == max(entry.top.values()) == entry.top[token_id]


def test_no_prompts_are_no_answers(llm: LLM) -> None:
    assert llm.generate([]) == []
    assert llm.generate([], []) == []
    assert list(llm.stream([])) == []


def test_max_tokens_none_goes_to_the_context(llm: LLM) -> None:
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    [found] = llm.generate([[5] * 500], params)
    assert len(found.token_ids) == llm.max_model_len - 500
    assert found.finish_reason == "length"


def test_a_stop_string_ends_the_answer_before_it(llm: LLM) -> None:
    [whole] = llm.generate("the", GREEDY)
    stop = whole.text[5:8]
    at = whole.text.index(stop)
    [found] = llm.generate("the", SamplingParams(temperature=0.0, max_tokens=24, stop=stop))
    assert (found.text, found.finish_reason, found.stop_reason) == (whole.text[:at], "stop", stop)
    assert llm.tokenizer.decode(found.token_ids).startswith(found.text + stop[:-1])
    assert found.token_ids == whole.token_ids[: len(found.token_ids)]
    before = llm.tokenizer.decode(found.token_ids[:-1])
    assert stop not in before  # no token behind the one that completes it


def test_a_stop_token_is_told_but_not_shown(llm: LLM) -> None:
    [whole] = llm.generate("the", GREEDY)
    token_id = whole.token_ids[6]
    at = whole.token_ids.index(token_id)
    params = SamplingParams(temperature=0.0, max_tokens=24, stop_token_ids=[token_id], logprobs=0)
    [found] = llm.generate("the", params)
    assert found.token_ids == whole.token_ids[: at + 1]
    assert found.text == llm.tokenizer.decode(whole.token_ids[:at])
    assert (found.finish_reason, found.stop_reason) == ("stop", token_id)
    assert found.logprobs is not None
    assert len(found.logprobs) == at + 1


def test_streams_add_up_to_the_answers(llm: LLM) -> None:
    prompts = token_prompts(40, low=3, high=VOCAB_SIZE, num_shared=10, lengths=(1, 9, 30))
    params = mixed_params(40, 20)
    whole = llm.generate(prompts, params)
    texts = [c.text for c in whole]
    stopped = [
        SamplingParams(seed=3, temperature=0.9, max_tokens=20, stop=texts[3][4:6], logprobs=1)
    ]
    params += stopped
    prompts += [prompts[3]]
    whole = llm.generate(prompts, params)
    parts: dict[int, list[CompletionChunk]] = {}
    for chunk in llm.stream(prompts, params):
        parts.setdefault(chunk.index, []).append(chunk)
    assert len(parts) == 41
    for completion in whole:
        chunks = parts[completion.index]
        assert sum((c.token_ids for c in chunks), ()) == completion.token_ids
        assert "".join(c.text for c in chunks) == completion.text
        assert sum((c.logprobs or () for c in chunks), ()) == completion.logprobs
        assert [c.finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].finish_reason == completion.finish_reason
        assert chunks[-1].stop_reason == completion.stop_reason


def test_one_seed_is_one_answer_and_none_is_another(llm: LLM) -> None:
    one = llm.generate(["the"] * 2, SamplingParams(seed=7, max_tokens=16))
    assert one[0].token_ids == one[1].token_ids
    other = llm.generate(["the"] * 2, SamplingParams(max_tokens=16))
    assert other[0].token_ids != other[1].token_ids


def test_a_reset_forgets_prefixes(llm: LLM) -> None:
    prompt = token_prompts(1, low=3, high=VOCAB_SIZE, num_shared=200, lengths=(10,))
    params = SamplingParams(max_tokens=2)
    llm.generate(prompt, params)
    assert llm.generate(prompt, params)[0].num_cached_tokens == 192
    llm.reset_prefix_cache()
    assert llm.generate(prompt, params)[0].num_cached_tokens == 0


def test_stats_count_what_was_done(tiny_path: Path) -> None:
    with tiny_llm(tiny_path) as llm:
        llm.generate([[5, 6, 7]] * 3, SamplingParams(max_tokens=4, ignore_eos=True))
        stats = llm.stats()
        assert (stats.num_completions, stats.num_prompt_tokens) == (3, 9)
        assert stats.num_completion_tokens == 12
        assert 4 <= stats.num_steps <= 6
        assert stats.device_busy_s > 0
        assert stats.num_free_kv_blocks == stats.num_kv_blocks == 64
        assert stats.kv_bytes == stats.num_kv_blocks * llm.cache_spec.block_bytes <= 2**21
        assert llm.model_config.vocab_size == VOCAB_SIZE


def _wrong(prompts: Any, params: Any = None) -> Callable[[LLM], object]:
    return lambda llm: llm.generate(prompts, params)


@pytest.mark.parametrize(
    ("call", "param", "told"),
    [
        (_wrong(7), "prompts", "a text, token ids, or a list"),
        (_wrong([None]), "prompts[0]", "a text or a list of token ids"),
        (_wrong([[]]), "prompts[0]", "must not be empty"),
        (_wrong(""), "prompts[0]", "must not be empty"),
        (_wrong(["the", [5, 96]]), "prompts[1][1]", "outside the vocabulary of 96"),
        (_wrong([[5, -1]]), "prompts[0][1]", "outside the vocabulary of 96"),
        (_wrong([[5.0]]), "prompts[0][0]", "must be a token id"),
        (_wrong([5, "the"]), "prompts[0][1]", "must be a token id"),
        (_wrong([[5] * 512]), "prompts[0]", "no room for an answer in a context of 512"),
        (_wrong("a" * 200_000), "prompts[0]", "200000 characters"),
        (_wrong("the", [GREEDY] * 2), "params", "2 entries for 1 prompts"),
        (_wrong("the", "greedy"), "params", "must be SamplingParams"),
        (_wrong(["the"], [7]), "params[0]", "must be SamplingParams"),
        (_wrong("the", SamplingParams(max_tokens=511)), "params.max_tokens", "room for 510"),
        (
            _wrong(["the"] * 2, [GREEDY, SamplingParams(stop_token_ids=[96])]),
            "params[1].stop_token_ids",
            "vocabulary of 96",
        ),
        (_wrong("the", SamplingParams(logit_bias={96: 1})), "params.logit_bias", "of 96"),
        (lambda llm: llm.stream([[]]), "prompts[0]", "must not be empty"),
        (lambda llm: llm.chat([{"role": "user", "content": "x"}]), "messages", "no chat template"),
        (lambda llm: llm.chat("x"), "messages", "a list of messages"),
    ],
)
def test_wrong_input_is_named_with_its_limit(
    llm: LLM, call: Callable[[LLM], object], param: str, told: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        call(llm)
    assert isinstance(caught.value, ValueError)
    assert caught.value.param == param
    assert told in str(caught.value)


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.gguf: no such model"):
        LLM(tmp_path / "missing.gguf")
    with pytest.raises(ValueError, match="block_size must be within"):
        LLM(block_size=-1)
