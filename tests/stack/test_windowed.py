"""A sliding-window model behind the whole service, roles apart: prompt and state are handed over."""

import json
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from finback.shared.offline.llm import LLM
from finback.shared.offline.params import SamplingParams
from support.stack import Stack
from support.windowed import windowed_text_folder

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

BLOCK = 16
MAX_TOKENS = 24
LONG = 400


def _ask(stack: Stack, prompt: list[int]) -> dict[str, object]:
    body = {"model": "windowed", "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
    reply = httpx.post(f"{stack.http}/v1/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    told = reply.json()
    cached = told["usage"]["prompt_tokens_details"]["cached_tokens"]
    return {"text": told["choices"][0]["text"], "num_cached": cached}


def _ask_and_kill(stack: Stack, prompt: list[int]) -> str:
    """The text of a long answer during which decode dies by kill -9."""
    body = {"model": "windowed", "prompt": prompt, "max_tokens": LONG, "temperature": 0}
    url, text, lost = f"{stack.http}/v1/completions", "", ""
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=120) as reply:
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            text += "".join(choice["text"] for choice in chunk["choices"])
            if not lost and text:
                lost = stack.kill("decode")
    stack.wait_restored("decode", lost)
    return text


def test_two_turns_of_a_conversation_and_a_crash(tmp_path: Path, run_dir: Path) -> None:
    folder = windowed_text_folder(tmp_path / "windowed")
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    with LLM(folder, deterministic=True, num_threads=1, block_size=BLOCK) as llm:
        prompt = list(llm.tokenizer.encode("There was a window of six tokens in it, and " * 4))
        first = llm.generate([prompt], params)[0]
        turn = [*prompt, *first.token_ids, *prompt]
        second = llm.generate([turn], params)[0]
        whole = llm.generate([turn[5:]], replace(params, max_tokens=LONG))[0]
    stack = Stack(run_dir)
    settings = ["--set", f"block_size={BLOCK}", "--set", "deterministic=true"]
    stack.up("--separate", "--model", str(folder), *settings)
    try:
        found = _ask(stack, prompt)
        assert found["text"] == first.text
        assert _ask(stack, turn) == {
            "text": second.text,
            "num_cached": (len(prompt) + len(first.token_ids) - 1) // BLOCK * BLOCK,
        }
        assert _ask_and_kill(stack, turn[5:]) == whole.text
    finally:
        stack.down()
