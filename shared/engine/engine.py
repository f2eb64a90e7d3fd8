"""The engine: the one object of `shared/engine` that a worker service talks to.

All methods are for the event-loop thread and none of them blocks. Lifecycle: `start`, any calls,
`stop`. A failure of the device thread is final: `on_failure` is called, `failed()` raises, and the
process is expected to die and be started again.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from finback.shared.engine.config import EngineConfig
from finback.shared.engine.output import Admission, EngineLoad, StepOutput
from finback.shared.engine.sequence import SequenceCounts, SequenceKey, SequenceSpec, TokenIds
from finback.shared.wire.messages.control import CacheSpec

if TYPE_CHECKING:
    from finback.shared.models.causal_lm import CausalLM


class Engine:
    """One model, one KV pool, one scheduler, one device thread."""

    cache_spec: CacheSpec
    num_blocks: int
    max_model_len: int

    def __init__(
        self,
        model: "CausalLM",
        config: EngineConfig,
        *,
        on_step: Callable[[StepOutput], None],
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        raise NotImplementedError

    async def start(self) -> None:
        """Start the device thread; results go to the running event loop."""
        raise NotImplementedError

    async def stop(self) -> None:
        """Let the running step end, drop all sequences (no ends are told), stop the thread."""
        raise NotImplementedError

    async def failed(self) -> None:
        """Wait until the device thread fails, then raise; returns when the engine was stopped."""
        raise NotImplementedError

    def add(self, spec: SequenceSpec) -> Admission:
        """Queue a sequence, or refuse it with a reason. A newer attempt replaces an older one."""
        raise NotImplementedError

    def activate(self, key: SequenceKey, num_computed_tokens: int) -> bool:
        """Mode decode: the KV of the first tokens was imported; compute the rest here and go on."""
        raise NotImplementedError

    def abort(self, key: SequenceKey) -> bool:
        """End a sequence silently; False if it is not known. Its blocks go with the running step."""
        raise NotImplementedError

    async def abort_and_wait(self, key: SequenceKey) -> bool:
        """`abort`, and return when no running step uses its blocks any more."""
        raise NotImplementedError

    def finish(self, key: SequenceKey, num_tokens: int) -> SequenceCounts | None:
        """End a choice (silently) with its first `num_tokens` completion tokens; also an ended one."""
        raise NotImplementedError

    def grant(self, key: SequenceKey, up_to_offset: int) -> None:
        """Let a choice run up to this completion length."""
        raise NotImplementedError

    def release(self, key: SequenceKey) -> None:
        """Mode prefill: the hand-over is done, its blocks may go."""
        raise NotImplementedError

    def provide_mask(self, key: SequenceKey, position: int, bitmask: bytes) -> None:
        """The tokens allowed at completion index `position` (int32 LE [ceil(vocab / 32)])."""
        raise NotImplementedError

    def provide_draft(self, key: SequenceKey, position: int, token_ids: TokenIds) -> None:
        """A guess for absolute positions `position`, `position` + 1, ...; may be late or wrong."""
        raise NotImplementedError

    def tokens(self, key: SequenceKey) -> TokenIds | None:
        """The completion so far; of an ended choice until `forget`."""
        raise NotImplementedError

    def forget(self, key: SequenceKey) -> None:
        """An ended choice needs no `tokens` and no `finish` any more."""
        raise NotImplementedError

    async def export_block(self, key: SequenceKey, block_index: int, out: memoryview) -> int:
        """Copy a block (host layout) into `out` between steps; returns the tokens it holds.

        A partial last block is written as its computed tokens only. Raises `NotFound` when the
        sequence is gone or the block is not computed.
        """
        raise NotImplementedError

    async def import_block(self, key: SequenceKey, block_index: int, data: memoryview) -> None:
        """Mode decode, before `activate`: copy a block (host layout) into the pool between steps.

        `data` holds a whole number of tokens, at most a block. Raises `NotFound` when the sequence
        is gone or active.
        """
        raise NotImplementedError

    def load(self) -> EngineLoad:
        """How busy the engine is."""
        raise NotImplementedError

    @property
    def progress(self) -> int:
        """Rises with every retired step; for ping."""
        raise NotImplementedError
