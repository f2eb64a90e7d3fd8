"""A DeepSeek V4 folder behind the whole service, roles apart: blocks and state are handed over."""

from pathlib import Path

import httpx
import pytest

from finback.shared.offline.llm import LLM
from finback.shared.offline.params import SamplingParams
from support.stack import Stack
from support.v4_tiny import text_folder

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

MAX_TOKENS = 16


def _ask(stack: Stack, prompt: list[int]) -> tuple[str, int]:
    body = {"model": "v4", "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
    reply = httpx.post(f"{stack.http}/v1/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    told = reply.json()
    return told["choices"][0]["text"], told["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_two_turns_of_a_conversation(tmp_path: Path, run_dir: Path) -> None:
    folder = text_folder(tmp_path / "v4")
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    with LLM(folder, num_threads=1, max_model_len=640) as llm:
        prompt = list(
            llm.tokenizer.encode("Entries of four tokens and of 128, and a window. " * 13)
        )
        first = llm.generate([prompt], params)[0]
        turn = [*prompt, *first.token_ids, *prompt]
        second = llm.generate([turn], params)[0]
    stack = Stack(run_dir)
    stack.up("--separate", "--model", str(folder), "--set", "max_model_len=640")
    try:
        assert _ask(stack, prompt) == (first.text, 0)
        text, num_cached = _ask(stack, turn)
        assert text == second.text
        assert num_cached == (len(prompt) + len(first.token_ids) - 1) // 128 * 128
    finally:
        stack.down()
