"""`LLM(FOLDER)` of a model with sliding-window layers: loaded like any other, the oracle's tokens."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finback.shared.offline.errors import InvalidInput
from finback.shared.offline.llm import LLM
from finback.shared.offline.params import SamplingParams
from support.tiny_folders import hf_logits
from support.windowed import WINDOW, windowed_folder, windowed_oracle, windowed_text_folder

PROMPTS = [np.random.default_rng(n).integers(0, 96, n).tolist() for n in (3, 20, 45)]


def _greedy(oracle: Any, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(hf_logits(oracle, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def test_answers_equal_transformers(tmp_path: Path) -> None:
    folder = windowed_text_folder(tmp_path / "windowed")
    small = windowed_folder(tmp_path / "small")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (small / name).write_bytes((folder / name).read_bytes())
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    oracle = windowed_oracle()
    with LLM(small, num_threads=1, block_size=8, max_num_seqs=4, kv_pool_bytes=2**21) as llm:
        assert llm.cache_spec.window_tokens == WINDOW
        for again in (False, True):
            found = llm.generate(PROMPTS, params)
            for prompt, completion in zip(PROMPTS, found, strict=True):
                assert list(completion.token_ids) == _greedy(oracle, prompt, 10)
                cached = completion.num_cached_tokens
                assert cached == ((len(prompt) - 1) // 8 * 8 if again else 0)


def test_a_conversation(tmp_path: Path) -> None:
    """With drafts, in deterministic mode; the second turn begins at the first answer's end."""
    folder = windowed_text_folder(tmp_path / "windowed")
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    options: dict[str, Any] = {"num_threads": 1, "block_size": 8, "max_num_seqs": 4}
    with LLM(folder, deterministic=True, max_draft_tokens=4, **options) as llm:
        prompt = list(llm.tokenizer.encode("Once upon a time there was a window."))
        first = llm.generate([prompt], params)[0]
        assert isinstance(first.text, str)
        turn = [*prompt, *first.token_ids, *prompt]
        second = llm.generate([turn], params)[0]
        assert second.num_cached_tokens == (len(prompt) + 23) // 8 * 8
    with LLM(folder, deterministic=True, enable_prefix_cache=False, **options) as llm:
        assert llm.generate([prompt], params)[0].token_ids == first.token_ids
        assert llm.generate([turn], params)[0].token_ids == second.token_ids


def test_a_folder_without_text_takes_and_gives_ids(tmp_path: Path) -> None:
    folder = windowed_folder(tmp_path / "plain")
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    with LLM(folder, num_threads=1, block_size=8, max_num_seqs=4, kv_pool_bytes=2**21) as llm:
        found = llm.generate(PROMPTS[0], params)[0]
        assert list(found.token_ids) == _greedy(windowed_oracle(), PROMPTS[0], 6)
        assert found.text == ""
        chunks = list(llm.stream([PROMPTS[0]], params))
        assert [t for chunk in chunks for t in chunk.token_ids] == list(found.token_ids)
        with pytest.raises(InvalidInput, match="has no tokenizer; give token ids"):
            llm.generate("a text")
        with pytest.raises(InvalidInput, match="has no tokenizer"):
            llm.chat([{"role": "user", "content": "hello"}])
        with pytest.raises(InvalidInput, match=r"params.stop: this model has no tokenizer"):
            llm.generate(PROMPTS[0], SamplingParams(stop="end"))
