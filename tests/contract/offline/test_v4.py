"""`LLM(FOLDER)` of a DeepSeek V4 folder: loaded like any other, the oracle's tokens."""

from pathlib import Path

import numpy as np
import pytest

from finback.shared.errors import ConfigError
from finback.shared.offline.llm import LLM
from finback.shared.offline.params import SamplingParams
from support import v4_tiny
from support.tiny_folders import hf_logits


def test_answers_equal_transformers(tmp_path: Path) -> None:
    folder = v4_tiny.text_folder(tmp_path / "v4")
    oracle = v4_tiny.tiny_model(settings={"vocab_size": 49152})
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    prompts = [np.random.default_rng(n).integers(20, 49152, n).tolist() for n in (3, 140)]
    with LLM(folder, num_threads=1, max_num_seqs=4, max_model_len=512) as llm:
        assert llm.cache_spec.window_tokens == v4_tiny.WINDOW
        assert llm.cache_spec.block_size == 128
        for again in (False, True):
            found = llm.generate(prompts, params)
            for prompt, completion in zip(prompts, found, strict=True):
                tokens = list(prompt)
                for _ in range(5):
                    tokens.append(int(hf_logits(oracle, tokens)[-1].argmax()))
                assert list(completion.token_ids) == tokens[len(prompt) :]
                assert completion.num_cached_tokens == (128 if again and len(prompt) > 128 else 0)
        assert llm.generate("Once upon a time", params)[0].text


def test_blocks_of_another_size_are_refused(tmp_path: Path) -> None:
    folder = v4_tiny.text_folder(tmp_path / "v4")
    with pytest.raises(ConfigError, match="has blocks of 128 tokens"):
        LLM(folder, num_threads=1, block_size=64)
