"""An engine without a model, for tests of the roles around it: same calls, same promises.

The next token is a function of (context, seed). The "KV" of a token is a digest of the tokens up to
it, so a block that was handed over wrongly is seen when its sequence is activated.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from finback.shared.clock import monotonic_s
from finback.shared.engine.output import (
    Admission,
    EngineLoad,
    PrefillProgress,
    SequenceOutput,
    StepOutput,
)
from finback.shared.engine.prefix_hold import PrefixHold
from finback.shared.engine.sequence import SequenceCounts, SequenceKey, SequenceSpec, TokenIds
from finback.shared.engine.step_times import StepTime
from finback.shared.errors import NotFound
from finback.shared.kv import block_hash
from finback.shared.wire.messages.control import CacheSpec
from finback.shared.wire.messages.generate import EndInfo, TokenLogprob

BLOCK_SIZE = 4
TOKEN_BYTES = 16
VOCAB_SIZE = 64
EOS = 0


def next_token(tokens: list[int], seed: int) -> int:
    """The one token that may follow; never `EOS` by chance."""
    digest = blake2b(np.array([seed, *tokens], dtype="<i8").tobytes(), digest_size=8).digest()
    return 1 + int.from_bytes(digest, "little") % (VOCAB_SIZE - 1)


def expected(prompt: list[int], seed: int, num_tokens: int) -> list[int]:
    """The completion of a lone sequence."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, seed))
    return tokens[len(prompt) :]


def kv_of(tokens: list[int], position: int) -> bytes:
    """The KV of one token."""
    prefix = np.array(tokens[: position + 1], dtype="<i8").tobytes()
    return blake2b(prefix, digest_size=TOKEN_BYTES).digest()


class FakePrefixes:
    """No prefix is ever cached here; blocks have names, as everywhere."""

    is_enabled = True

    def __init__(self) -> None:
        self.on_new_block: Callable[[Any], None] | None = None
        self.on_change: Callable[[bytes, bool], None] | None = None

    def hashes(self) -> list[bytes]:
        return []

    def lacks(self, token_ids: TokenIds, cache_salt: bytes) -> bool:
        return False

    def chain(self, token_ids: TokenIds, cache_salt: bytes) -> tuple[bytes, ...]:
        root = block_hash.prompt_root(b"", cache_salt, BLOCK_SIZE)
        data = np.ascontiguousarray(token_ids, dtype="<i4").tobytes()
        return tuple(block_hash.extend_all(root, data, BLOCK_SIZE, b""))

    def hold(self, token_ids: TokenIds, cache_salt: bytes) -> PrefixHold:
        return PrefixHold(hashes=(), tokens=(), num_prompt=token_ids.size, is_released=True)

    def release(self, hold: PrefixHold) -> None:
        pass


@dataclass(slots=True)
class _Sequence:
    spec: SequenceSpec
    tokens: list[int]
    num_prompt: int
    credit: int
    state: str
    kv: dict[int, bytes] = field(default_factory=dict)
    num_computed: int = 0
    num_cached: int = 0
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    mask: tuple[int, bytes] | None = None
    draft: tuple[int, list[int]] | None = None
    asked_mask: int = -1

    @property
    def completion(self) -> list[int]:
        return self.tokens[self.num_prompt :]


class FakeEngine:
    """See the module. `step_s` is the pace; `chunk` the prompt tokens a step computes."""

    def __init__(
        self,
        on_step: Callable[[StepOutput], None],
        *,
        step_s: float = 0.002,
        chunk: int = 8,
        max_sequences: int = 64,
    ) -> None:
        self.cache_spec = CacheSpec(
            block_size=BLOCK_SIZE,
            num_layers=1,
            num_kv_heads=1,
            head_dim=2,
            kv_dtype="f32",
            block_bytes=BLOCK_SIZE * TOKEN_BYTES,
            salt="fake",
        )
        self.prefixes = FakePrefixes()
        self.states = None
        self.row_ms = 0.0
        self.num_blocks = 1000
        self.vocab_size = 64
        self.max_model_len = 1000
        self.progress = 0
        self.sequences: dict[SequenceKey, _Sequence] = {}
        self.ended: dict[SequenceKey, _Sequence] = {}
        self.num_recomputed = 0
        self._on_step = on_step
        self._step_s = step_s
        self._chunk = chunk
        self._max_sequences = max_sequences
        self._task: asyncio.Task[None] | None = None
        self._failure: asyncio.Future[None]

    async def start(self) -> None:
        self._failure = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if not self._failure.done():
            self._failure.set_result(None)

    async def failed(self) -> None:
        await asyncio.shield(self._failure)

    def fail(self, error: BaseException) -> None:
        """As if the device thread had died."""
        self._failure.set_exception(error)

    def add(self, spec: SequenceSpec, hold: PrefixHold | None = None) -> Admission:
        if len(self.sequences) >= self._max_sequences:
            return Admission(accepted=False, reason="queue_full")
        num_prompt = spec.token_ids.size
        tokens = [*spec.token_ids.tolist(), *spec.completion.tolist()]
        credit = spec.completion.size + spec.credit_tokens
        state = "reserved" if spec.mode == "decode" else "running"
        self.sequences[spec.key] = _Sequence(spec, tokens, num_prompt, credit, state)
        return Admission(accepted=True)

    def activate(
        self, key: SequenceKey, num_computed_tokens: int, num_cached_tokens: int | None = None
    ) -> bool:
        sequence = self.sequences.get(key)
        if sequence is None or sequence.state != "reserved":
            return False
        for position in range(num_computed_tokens):
            if sequence.kv.get(position) != kv_of(sequence.tokens, position):
                self.fail(AssertionError(f"wrong KV at {position}"))
        self.num_recomputed += len(sequence.tokens) - 1 - num_computed_tokens
        sequence.state = "running"
        return True

    def abort(self, key: SequenceKey) -> bool:
        return self.sequences.pop(key, None) is not None

    async def abort_and_wait(self, key: SequenceKey) -> bool:
        return self.abort(key)

    def finish(self, key: SequenceKey, num_tokens: int) -> SequenceCounts | None:
        sequence = self.sequences.pop(key, None) or self.ended.get(key)
        if sequence is None:
            return None
        self.ended[key] = sequence
        return SequenceCounts(
            num_prompt_tokens=sequence.num_prompt,
            num_cached_tokens=sequence.num_cached,
            num_completion_tokens=num_tokens,
            num_draft_tokens=sequence.num_drafted,
            num_accepted_tokens=sequence.num_accepted,
            num_steps=sequence.num_steps,
        )

    def grant(self, key: SequenceKey, up_to_offset: int) -> None:
        if key in self.sequences:
            self.sequences[key].credit = max(self.sequences[key].credit, up_to_offset)

    def release(self, key: SequenceKey) -> None:
        self.sequences.pop(key, None)

    def provide_mask(
        self,
        key: SequenceKey,
        position: int,
        masks: tuple[bytes, ...],
        token_ids: object = None,
    ) -> None:
        if key in self.sequences:
            self.sequences[key].mask = (position, masks[0])

    def provide_draft(self, key: SequenceKey, position: int, token_ids: TokenIds) -> None:
        if key in self.sequences:
            self.sequences[key].draft = (position, token_ids.tolist())

    def tokens(self, key: SequenceKey) -> TokenIds | None:
        found = self.sequences.get(key) or self.ended.get(key)
        return None if found is None else np.array(found.completion, dtype=np.int32)

    def forget(self, key: SequenceKey) -> None:
        self.ended.pop(key, None)

    async def export_block(self, key: SequenceKey, block_index: int, out: memoryview) -> int:
        sequence = self.sequences.get(key)
        if sequence is None:
            raise NotFound("gone")
        start = block_index * BLOCK_SIZE
        end = min(start + BLOCK_SIZE, sequence.num_computed)
        data = b"".join(kv_of(sequence.tokens, p) for p in range(start, end))
        out[: len(data)] = data
        return end - start

    async def import_block(self, key: SequenceKey, block_index: int, data: memoryview) -> None:
        sequence = self.sequences.get(key)
        if sequence is None or sequence.state != "reserved":
            raise NotFound("gone")
        for i in range(len(data) // TOKEN_BYTES):
            part = bytes(data[i * TOKEN_BYTES : (i + 1) * TOKEN_BYTES])
            sequence.kv[block_index * BLOCK_SIZE + i] = part

    def touch_ahead(self) -> None:
        return None

    @property
    def step_times(self) -> tuple[StepTime, ...]:
        return ()

    def load(self) -> EngineLoad:
        return EngineLoad(
            num_running=len(self.sequences),
            num_waiting=0,
            num_blocks=self.num_blocks,
            num_free_blocks=self.num_blocks,
            num_waiting_tokens=0,
            step_time_ms=1.0,
            tokens_per_s=1.0,
        )

    # -- steps

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._step_s)
            self._step()

    def _step(self) -> None:
        started_s = monotonic_s()
        outputs: dict[str, list[Any]] = {"rows": [], "prefilled": [], "masks": [], "drafts": []}
        for key, sequence in list(self.sequences.items()):
            if sequence.state == "running":
                self._advance(key, sequence, outputs)
        if not any(outputs.values()):
            return
        self.progress += 1
        self._on_step(
            StepOutput(
                step=self.progress,
                rows=tuple(outputs["rows"]),
                prefilled=tuple(outputs["prefilled"]),
                want_masks=tuple(outputs["masks"]),
                want_drafts=tuple(outputs["drafts"]),
                num_rows=len(outputs["rows"]),
                started_s=started_s,
                duration_ms=1.0,
            )
        )

    def _advance(
        self, key: SequenceKey, sequence: _Sequence, outputs: dict[str, list[Any]]
    ) -> None:
        if sequence.spec.mode == "prefill":
            target = len(sequence.tokens) - 1
            sequence.num_computed = min(target, sequence.num_computed + self._chunk)
            is_last = sequence.num_computed == target
            if is_last:
                sequence.state = "held"
            outputs["prefilled"].append(
                PrefillProgress(
                    key=key,
                    attempt=sequence.spec.attempt,
                    num_computed_tokens=sequence.num_computed,
                    is_last=is_last,
                )
            )
            return
        offset = len(sequence.completion)
        if offset >= sequence.credit:
            return
        if sequence.spec.has_grammar and (sequence.mask is None or sequence.mask[0] != offset):
            if sequence.asked_mask != offset:
                sequence.asked_mask = offset
                outputs["masks"].append((key, offset))
            return
        outputs["rows"].append(self._sample(key, sequence, offset))
        if sequence.spec.drafting and key in self.sequences:
            outputs["drafts"].append((key, len(sequence.tokens)))

    def _sample(self, key: SequenceKey, sequence: _Sequence, offset: int) -> SequenceOutput:
        drafts = self._aligned(sequence)
        limit = sequence.spec.sampling.max_tokens - offset
        new: list[int] = []
        num_accepted = 0
        for i in range(min(1 + len(drafts), limit)):
            token = self._pick(sequence)
            sequence.tokens.append(token)
            new.append(token)
            if i >= len(drafts) or drafts[i] != token:
                break
            num_accepted += 1
        sequence.num_steps += 1
        sequence.num_drafted += len(drafts)
        sequence.num_accepted += num_accepted
        end = None
        if len(sequence.completion) >= sequence.spec.sampling.max_tokens:
            end = EndInfo(
                finish_reason="length",
                num_prompt_tokens=sequence.num_prompt,
                num_cached_tokens=sequence.num_cached,
                num_completion_tokens=len(sequence.completion),
                num_draft_tokens=sequence.num_drafted,
                num_accepted_tokens=sequence.num_accepted,
                num_steps=sequence.num_steps,
            )
            self.ended[key] = self.sequences.pop(key)
        wants = sequence.spec.sampling.num_logprobs is not None
        return SequenceOutput(
            key=key,
            attempt=sequence.spec.attempt,
            offset=offset,
            token_ids=np.array(new, dtype=np.int32),
            logprobs=tuple(TokenLogprob(logprob=-0.5) for _ in new) if wants else None,
            end=end,
            num_drafted=len(drafts),
            num_accepted=num_accepted,
        )

    def _pick(self, sequence: _Sequence) -> int:
        token = next_token(sequence.tokens, sequence.spec.seed)
        if sequence.mask is not None:
            bits = np.unpackbits(np.frombuffer(sequence.mask[1], np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits)
            token = int(allowed[token % len(allowed)])
            sequence.mask = None
        return token

    def _aligned(self, sequence: _Sequence) -> list[int]:
        draft, sequence.draft = sequence.draft, None
        if draft is None:
            return []
        skip = len(sequence.tokens) - draft[0]
        if skip < 0 or draft[1][:skip] != sequence.tokens[draft[0] :]:
            return []
        return draft[1][skip : skip + 4]
