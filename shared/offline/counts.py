"""What an offline engine has done so far."""

from dataclasses import dataclass

from finback.shared.engine.engine import Engine
from finback.shared.offline.outputs import LLMStats
from finback.shared.offline.track import Track


@dataclass(slots=True)
class Counts:
    """Sums over the answers that have ended, and over all steps."""

    num_completions: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    busy_ms: float = 0.0

    def add(self, track: Track) -> None:
        """An answer has ended."""
        self.num_completions += 1
        self.num_prompt_tokens += len(track.request.token_ids)
        self.num_completion_tokens += track.num_tokens
        self.num_cached_tokens += track.num_cached
        self.num_draft_tokens += track.num_draft
        self.num_accepted_tokens += track.num_accepted

    def stats(self, engine: Engine) -> LLMStats:
        """With what the engine knows itself."""
        memory, load = engine.sizes.memory, engine.load()
        return LLMStats(
            num_steps=engine.progress,
            num_preemptions=load.num_preemptions,
            num_completions=self.num_completions,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_completion_tokens=self.num_completion_tokens,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            device_busy_s=self.busy_ms / 1e3,
            weights_bytes=memory.weights_bytes,
            kv_bytes=memory.kv_bytes,
            num_kv_blocks=memory.num_blocks,
            num_free_kv_blocks=load.num_free_blocks,
        )
