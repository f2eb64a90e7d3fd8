"""What became of one request, as its client saw it. Pure."""

from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Times are seconds from the start of the repetition, on one clock for all processes.

    `due_s`: when the request was to be sent (latencies count from here, so that a client that falls
    behind hides nothing). `first_s`, `last_s`: when the first and the last tokens arrived; None: none
    did. `gaps_s`: between arrivals. `num_tokens`: completion tokens that came back. `num_refusals`:
    answers "too many requests". `error`: why it failed, empty if it did not.
    """

    index: int
    due_s: float
    sent_s: float
    first_s: float | None
    last_s: float | None
    gaps_s: tuple[float, ...]
    num_wanted: int
    num_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_refusals: int = 0
    is_refused: bool = False
    is_cut: bool = False
    error: str = ""

    @property
    def is_whole(self) -> bool:
        """Every token that was asked for came back."""
        return not self.error and not self.is_cut and self.num_tokens == self.num_wanted

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token."""
        return None if self.first_s is None else self.first_s - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None of answers of one token."""
        if self.first_s is None or self.last_s is None or self.num_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.num_tokens - 1)

    @property
    def e2e_s(self) -> float | None:
        """From its due time to its last token."""
        return None if self.last_s is None else self.last_s - self.due_s

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Self:
        return cls(**{**raw, "gaps_s": tuple(raw["gaps_s"])})
