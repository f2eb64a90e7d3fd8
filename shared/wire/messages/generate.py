"""Nouns that several owners share: sampling, grammars, placements, and how a generation ends."""

import math

from finback.shared.wire.codec import message


@message("generate.SamplingSpec/1")
class SamplingSpec:
    """How the next token is chosen. Ranges are checked here, once, for every way in.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1.0 and `min_p` 0.0 switch those filters off.
    `seed` keys the noise together with the absolute position, so one seed gives one text.
    `num_logprobs` None: no logprobs; 0: the sampled token's only; n: the n likeliest as well.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int = 0
    num_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int = 16

    def __post_init__(self) -> None:
        _within("temperature", self.temperature, 0.0, 2.0)
        _within("top_k", self.top_k, 0, 2**31 - 1)
        _within("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("repetition_penalty", self.repetition_penalty, 0.0, 10.0, open_low=True)
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _within("seed", self.seed, 0, 2**63 - 1)
        _within("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _within("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.num_logprobs is not None:
            _within("num_logprobs", self.num_logprobs, 0, 20)
        for bias in (self.logit_bias or {}).values():
            _within("logit_bias", bias, -100.0, 100.0)


def _within(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    if math.isnan(value) or value > high or value < low or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise ValueError(f"{name} must be within {bracket}{low}, {high}], not {value}")


@message("generate.GrammarSpec/1")
class GrammarSpec:
    """What the sampler service constrains an answer to.

    `kind` is `json_object`, `json_schema`, `regex`, `choice`, `lark`, `structural_tag` or `structural`;
    `text` is the schema, the expression, the JSON list of choices (empty for json_object), the tag's
    JSON, or `{lark, parts}`, where the Lark text names parts (`@p0`) that are grammars of the other
    kinds: {kind, text, is_lenient, param, at} (`param`, `at`: where in the request it stands).
    `grammar_id` is the content hash that the sampler answered to `sampler.CompileRequest`.
    `strictness`: `strict` refuses what cannot be enforced exactly, `lenient` lets that part go and
    says so (`CompileReply.widened`).
    """

    kind: str
    text: str = ""
    grammar_id: str = ""
    strictness: str = "strict"


@message("generate.ChoiceSpec/1")
class ChoiceSpec:
    """One of the n completions of a request: its index and its own seed.

    `token_ids` (int32 LE) is what the client has of it already: a stream that goes on elsewhere.
    Offsets, seeds' positions, penalties and `max_tokens` count from the completion's first token.
    """

    index: int
    seed: int
    token_ids: bytes = b""


@message("generate.GenerationSpec/1")
class GenerationSpec:
    """A whole generation, as the gateway hands it to the engines. It names no text, only ids.

    `token_ids`: int32 little-endian, [num_prompt_tokens]. `gateway` is the instance that gets the
    tokens (on `stream.<gateway>.<decode>`). `credit_tokens`: how many tokens a choice may run ahead
    before the gateway grants more. `timeout_ms`: what was left of the request's time when this was
    sent; 0 means the stack's `request_timeout_s`. `retention_s`: how long its blocks are worth
    keeping; None: as its traffic class says. `session` names the conversation, for affinity.
    """

    request_id: str
    attempt: int
    model: str
    token_ids: bytes
    sampling: SamplingSpec
    choices: tuple[ChoiceSpec, ...]
    gateway: str
    tenant: str = ""
    traffic_class: str = "chat"
    grammar: GrammarSpec | None = None
    credit_tokens: int = 1024
    drafting: bool = True
    cache_salt: str = ""
    timeout_ms: int = 0
    retention_s: float | None = None
    session: str = ""


@message("generate.EndInfo/1")
class EndInfo:
    """How one choice ended: exactly one a choice and attempt.

    `finish_reason` is `stop`, `length`, `cancelled` or `error`; `stop_token_id` the token that
    ended it. Counts are of this choice, `num_completion_tokens` with what an earlier attempt made.
    `error_instance`: whose failure an error is, if one's; a retry avoids it. `error_reason` is
    `draining` when an instance hands its streams on before it stops.
    """

    finish_reason: str
    stop_token_id: int | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_steps: int = 0
    error_code: str = ""
    error_message: str = ""
    error_instance: str = ""
    error_reason: str = ""


@message("generate.TokenLogprob/1")
class TokenLogprob:
    """Logprobs at one position: the sampled token's, then the likeliest (ids and values)."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@message("generate.TokenRow/1")
class TokenRow:
    """New tokens of one choice. `offset` is the index of the first one in the completion.

    `token_ids`: int32 little-endian, possibly empty when only `end` is told. `num_cached_tokens`:
    with the first row of a choice and attempt, prompt tokens that needed no computing.
    """

    request_id: str
    choice: int
    attempt: int
    offset: int
    token_ids: bytes = b""
    logprobs: tuple[TokenLogprob, ...] | None = None
    end: EndInfo | None = None
    num_cached_tokens: int | None = None


@message("generate.TokenBatch/1")
class TokenBatch:
    """One step of one decode instance for one gateway; without rows it is a heartbeat."""

    epoch: int
    step: int
    rows: tuple[TokenRow, ...] = ()
