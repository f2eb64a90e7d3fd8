"""The workload through `LLM` in this process: no service, no bus, no HTTP."""

import dataclasses
import importlib.metadata
import math
import time
from collections.abc import Sequence
from typing import Any, Final

from finback.shared.bench.load import Job, Sampling
from finback.shared.bench.track import RequestFailed, Track
from finback.shared.engine.device import choose_device
from finback.shared.errors import ServingError
from finback.shared.offline.llm import LLM
from finback.shared.offline.outputs import CompletionChunk, TokenLogprobs
from finback.shared.offline.params import SamplingParams

_VERSIONS: Final = ("torch", "numba", "triton", "numpy")


class OfflineClient:
    """A `BatchClient`. `is_whole`: by `generate`, which gives no times of single tokens."""

    def __init__(self, *, model: str, is_whole: bool, options: dict[str, Any]) -> None:
        self._llm = LLM(model, **options)
        self._is_whole = is_whole
        self._device = choose_device(str(options.get("device", "auto")))

    async def ask(self, job: Job, sampling: Sampling, track: Track) -> None:
        """See `Client`."""
        await self.ask_all([job], sampling, [track])

    async def ask_all(
        self, jobs: Sequence[Job], sampling: Sampling, tracks: Sequence[Track]
    ) -> None:
        """All of them in one call, which is how a batch is computed offline."""
        prompts = [list(job.prompt) for job in jobs]
        params = [_params(job, sampling) for job in jobs]
        try:
            if self._is_whole:
                for completion in await self._llm.agenerate(prompts, params):
                    track = tracks[completion.index]
                    _count(track, completion.token_ids, completion.logprobs)
                    track.num_cached_tokens = completion.num_cached_tokens
                    track.ended(time.monotonic())
                return
            async for chunk in self._llm.astream(prompts, params):
                _take(tracks[chunk.index], chunk)
        except ServingError as error:
            raise RequestFailed(str(error)) from error

    async def reset(self) -> None:
        """Forget all cached prefixes."""
        self._llm.reset_prefix_cache()

    def stats(self) -> dict[str, Any]:
        return dataclasses.asdict(self._llm.stats())

    def about(self) -> dict[str, Any]:
        """What runs here, for the record and for the limit."""
        spec, stats = self._llm.cache_spec, self._llm.stats()
        return {
            "model_config": dataclasses.asdict(self._llm.model_config),
            "weights_bytes": stats.weights_bytes,
            "kv_dtype": spec.kv_dtype,
            "device": self._device,
            "versions": _versions(),
        }

    async def close(self) -> None:
        self._llm.close()


def _params(job: Job, sampling: Sampling) -> SamplingParams:
    return SamplingParams(
        temperature=sampling.temperature,
        max_tokens=job.num_tokens,
        ignore_eos=True,
        seed=job.seed,
        logprobs=sampling.num_logprobs,
    )


def _take(track: Track, chunk: CompletionChunk) -> None:
    at_s = time.monotonic()
    if chunk.token_ids:
        track.arrived(at_s)
        _count(track, chunk.token_ids, chunk.logprobs)
    if chunk.finish_reason is not None:
        track.ended(at_s)


def _count(
    track: Track, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None
) -> None:
    track.num_tokens += len(token_ids)
    track.token_counts.update(token_ids)
    for entry in logprobs or ():
        track.surprisals_bits.append(-entry.logprob / math.log(2))


def _versions() -> dict[str, str]:
    found = {}
    for name in _VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
