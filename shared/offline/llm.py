"""`LLM`: a model in the caller's own process, over the engine that the service runs.

from finback import LLM, SamplingParams

with LLM() as llm:
    for completion in llm.generate(["The sky is", "The sea is"], SamplingParams(max_tokens=8)):
        print(completion.text)
"""

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from finback.shared.codec.load import load_renderer, load_tokenizer
from finback.shared.codec.tokenizer import Tokenizer
from finback.shared.engine.build import build_engine
from finback.shared.engine.engine import Engine
from finback.shared.engine.output import StepOutput
from finback.shared.models.config import ModelConfig
from finback.shared.models.deepseek_v4.config import V4Config
from finback.shared.models.source import ModelSource, open_source
from finback.shared.offline.calls import Calls
from finback.shared.offline.consumer import Consumer
from finback.shared.offline.drafter import LocalDrafter
from finback.shared.offline.host import EngineHost
from finback.shared.offline.options import LLMOptions
from finback.shared.offline.outputs import Completion, CompletionChunk, LLMStats
from finback.shared.offline.prompts import Messages, PromptEncoder, Prompts
from finback.shared.offline.requests import Params, RequestMaker
from finback.shared.offline.track import Request
from finback.shared.wire.messages.control import CacheSpec


class LLM:
    """One model. Methods may be called from several threads; their prompts share the batch.

    `model`: None or "embedded" for the model that comes with Finback, a GGUF file, or a Hugging
    Face folder. 0 in a number means chosen from the model and the machine. `deterministic`: the
    same tokens and logprobs to the last bit whatever else is in the batch. `max_draft_tokens`: most
    tokens guessed a step from what the text itself repeats; the answers are the same. `weights_dtype`
    "stored" keeps a DeepSeek V4's fp8 and fp4 weights as they are. `kv_pool_bytes` and `max_model_len`
    bound the memory. `num_threads` is torch's, so the whole process's.

    Raises `InvalidOption` (a `ConfigError` and `ValueError`) for wrong options and `ConfigError` for
    a model that cannot be loaded. Not usable in a child made by `fork` afterwards.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        device: str = "auto",
        deterministic: bool = False,
        weights_dtype: str = "auto",
        kv_dtype: str = "auto",
        max_model_len: int = 0,
        max_num_seqs: int = 0,
        max_num_batched_tokens: int = 0,
        kv_pool_bytes: int = 0,
        block_size: int = 0,
        num_threads: int = 0,
        max_draft_tokens: int = 0,
        enable_prefix_cache: bool = True,
    ) -> None:
        options = LLMOptions(
            model=model,
            device=device,
            deterministic=deterministic,
            weights_dtype=weights_dtype,
            kv_dtype=kv_dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_pool_bytes=kv_pool_bytes,
            block_size=block_size,
            num_threads=num_threads,
            max_draft_tokens=max_draft_tokens,
            enable_prefix_cache=enable_prefix_cache,
        )
        source = open_source(options.source)
        self._tokenizer = load_tokenizer(source.text)
        self._model_config = source.config
        renderer = load_renderer(source.text, self._tokenizer)
        self._host = _start_host(source, options, self._tokenizer)
        self._consumer = Consumer(self._host, max_unread=options.window)
        # The collector must not wait; at the interpreter's exit the host itself waits.
        weakref.finalize(self, self._host.ask_to_stop).atexit = False
        sizes = {
            "vocab_size": source.config.vocab_size,
            "max_model_len": self._host.max_model_len,
        }
        encoder = PromptEncoder(self._tokenizer, renderer, **sizes)
        self._requests = RequestMaker(encoder, **sizes)

    # -- answers

    def generate(
        self, prompts: Prompts, params: Params | None = None, *, progress: bool = False
    ) -> list[Completion]:
        """The answers to one prompt or several, in their order. Blocks until all are there.

        A prompt is a text or a list of token ids. `params`: one for all, or one a prompt.
        `progress`: say on stderr how far it is. An interrupt (Ctrl-C) ends the prompts of this call
        alone. Raises `InvalidInput` for what cannot run, before anything runs.
        """
        requests = self._requests.of_prompts(prompts, params)
        return self._consumer.answers(requests, progress=progress)

    def chat(
        self, messages: Messages, params: Params | None = None, *, progress: bool = False
    ) -> list[Completion]:
        """The answers to one conversation or several, through the model's own chat template."""
        requests = self._requests.of_messages(messages, params)
        return self._consumer.answers(requests, progress=progress)

    def stream(self, prompts: Prompts, params: Params | None = None) -> Iterator[CompletionChunk]:
        """The answers as they come, of all prompts mixed; leaving the iterator ends the rest."""
        return self._stream(self._requests.of_prompts(prompts, params))

    async def agenerate(self, prompts: Prompts, params: Params | None = None) -> list[Completion]:
        """`generate` for a coroutine; cancelling it ends its prompts."""
        requests = await asyncio.to_thread(self._requests.of_prompts, prompts, params)
        return await self._consumer.answers_async(requests)

    async def astream(
        self, prompts: Prompts, params: Params | None = None
    ) -> AsyncIterator[CompletionChunk]:
        """`stream` for a coroutine."""
        requests = await asyncio.to_thread(self._requests.of_prompts, prompts, params)
        async with contextlib.aclosing(self._consumer.chunks_async(requests)) as chunks:
            async for chunk in chunks:
                yield chunk

    def _stream(self, requests: list[Request]) -> Iterator[CompletionChunk]:
        yield from self._consumer.chunks(requests)  # self lives as long as this does

    # -- facts

    @property
    def model_config(self) -> ModelConfig | V4Config:
        """The model's shape."""
        return self._model_config

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to ids and back: `encode`, `decode`."""
        return self._tokenizer

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus answer, in tokens."""
        return self._host.max_model_len

    @property
    def cache_spec(self) -> CacheSpec:
        """How KV lies in a block."""
        return self._host.cache_spec

    def stats(self) -> LLMStats:
        """Counts since the start; of a closed LLM, its last."""
        return self._host.stats()

    def reset_prefix_cache(self) -> None:
        """Reuse no KV of earlier prompts."""
        self._host.reset_prefix_cache()

    # -- the end

    def close(self) -> None:
        """Stop the engine and give its memory back; calls that wait raise `Unavailable`."""
        self._host.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _start_host(source: ModelSource, options: LLMOptions, tokenizer: Tokenizer) -> EngineHost:
    settings = options.engine_config(source)

    def load(
        on_step: Callable[[StepOutput], None], on_failure: Callable[[BaseException], None]
    ) -> Engine:
        return build_engine(
            source,
            settings,
            weights_dtype=options.weights_dtype,
            on_step=on_step,
            on_failure=on_failure,
        )

    drafter = LocalDrafter(options.max_draft_tokens) if options.max_draft_tokens else None
    return EngineHost(load, Calls(tokenizer, window=options.window, drafter=drafter))
