"""A checked request to the generations that answer it: prompts, sampling, seeds, limits."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from finback.services.gateway.answer import ChoiceEvent, Output, Usage
from finback.services.gateway.chat import ChatProtocol
from finback.services.gateway.completions import CompletionProtocol
from finback.services.gateway.grammar import grammar_of, grammar_param
from finback.services.gateway.openai_format import Spelling
from finback.services.gateway.schema import (
    MAX_CHOICES,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
)
from finback.services.gateway.served_model import Params, Prompt, ServedModel
from finback.shared.errors import InvalidRequest, ServingError
from finback.shared.wire.messages.generate import ChoiceSpec, GrammarSpec, SamplingSpec

COMPLETION_MAX_TOKENS: Final = 16
_SEED_BITS: Final = 63
# Longer ones are no token ids, and from some length on not even converted.
MAX_ID_DIGITS: Final = 10
_CHAT_PARAMS: Final = Params("messages", "max_tokens")
_COMPLETION_PARAMS: Final = Params("prompt", "max_tokens")


class AnswerProtocol(Protocol):
    """Turns events into documents of one API."""

    def opening(self) -> list[bytes]:
        """What a stream begins with, before any event; nothing of the answer is in it."""

    def chunks(self, events: Sequence[ChoiceEvent]) -> list[bytes]:
        """The documents of some events of a stream."""

    def last_chunks(self, usage: Usage) -> list[bytes]:
        """What follows the last event of a stream."""

    def failure(self, error: ServingError) -> list[bytes]:
        """How a stream that has begun says that it failed."""

    def ping(self) -> bytes | None:
        """A document that is a sign of life; None: the sink has a better one."""

    def add(self, events: Sequence[ChoiceEvent]) -> None:
        """Keep events for the body."""

    def restart(self, index: int) -> None:
        """A choice starts over: nothing of it was sent."""

    def body(self, usage: Usage) -> dict[str, Any]:
        """The whole answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a request comes to: `samplings[i]` and `choices` apply to `prompts[i]`.

    `grammar` is not compiled yet; `grammar_param` is the request field to blame for it. `output`:
    how the text of each choice is parsed, None: not at all. `is_open_ended`: nobody asked for a
    limit to the answer, so that it is as much as the model has room for.
    """

    is_stream: bool
    prompts: tuple[Prompt, ...]
    samplings: tuple[SamplingSpec, ...]
    choices: tuple[ChoiceSpec, ...]
    stops: tuple[str, ...]
    protocol: AnswerProtocol
    grammar: GrammarSpec | None = None
    grammar_param: str = ""
    is_open_ended: bool = False
    output: Output | None = None


async def chat_work(
    request: ChatRequest, model: ServedModel, *, request_id: str, tenant: str
) -> Work:
    """Check and encode a chat request."""
    model.check_name(request.model)
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise InvalidRequest(
            "max_tokens is the old name of max_completion_tokens: give one of them",
            param="max_tokens",
        )
    _check_stream_options(request)
    messages = [message.model_dump(exclude_none=True) for message in request.messages]
    prompt = await model.encode_chat(messages, request.chat_template_kwargs, tenant)
    asked = request.max_completion_tokens or request.max_tokens
    is_new = request.max_completion_tokens is not None
    params = Params("messages", "max_completion_tokens") if is_new else _CHAT_PARAMS
    room = model.check_length(prompt.num_tokens, asked, params)
    num_logprobs = (request.top_logprobs or 0) if request.logprobs else None
    choices = _choices(request)
    grammar = grammar_of(request)
    protocol = ChatProtocol(
        request,
        request_id=request_id,
        model=model.name,
        fingerprint=model.fingerprint,
        spelling=Spelling(model.tokenizer),
        num_choices=len(choices),
    )
    return Work(
        is_stream=bool(request.stream),
        prompts=(prompt,),
        samplings=(_sampling(request, model, asked or room, num_logprobs, choices[0].seed),),
        choices=choices,
        stops=_stops(request),
        protocol=protocol,
        grammar=grammar,
        grammar_param=grammar_param(grammar, request) if grammar is not None else "",
        is_open_ended=asked is None,
    )


async def completion_work(
    request: CompletionRequest, model: ServedModel, *, request_id: str, tenant: str
) -> Work:
    """Check and encode a text completion request."""
    model.check_name(request.model)
    _check_stream_options(request)
    if request.echo and request.logprobs is not None:
        raise InvalidRequest(
            "logprobs of the prompt are not available: echo and logprobs exclude each other",
            param="echo",
        )
    choices = _choices(request)
    grammar = grammar_of(request)
    prompts, texts = await _prompts(request, model, tenant)
    if len(prompts) * len(choices) > MAX_CHOICES:
        raise InvalidRequest(f"prompts times n must be at most {MAX_CHOICES}", param="n")
    asked = request.max_tokens
    samplings = []
    for prompt in prompts:
        room = model.check_length(prompt.num_tokens, asked, _COMPLETION_PARAMS)
        limit = min(room, COMPLETION_MAX_TOKENS) if asked is None else asked
        samplings.append(_sampling(request, model, limit, request.logprobs, choices[0].seed))
    echoes = [text if request.echo else "" for text in texts for _ in choices]
    protocol = CompletionProtocol(
        request,
        request_id=request_id,
        model=model.name,
        fingerprint=model.fingerprint,
        spelling=Spelling(model.tokenizer),
        echoes=echoes,
    )
    return Work(
        is_stream=bool(request.stream),
        prompts=tuple(prompts),
        samplings=tuple(samplings),
        choices=choices,
        stops=_stops(request),
        protocol=protocol,
        grammar=grammar,
        grammar_param=grammar_param(grammar, request) if grammar is not None else "",
    )


async def _prompts(
    request: CompletionRequest, model: ServedModel, tenant: str
) -> tuple[list[Prompt], list[str]]:
    """The prompts, and each as text for `echo`."""
    given = request.prompt
    is_many = isinstance(given, list) and not isinstance(given[0], int)
    items: list[Any] = list(given) if is_many else [given]
    prompts, texts = [], []
    for index, item in enumerate(items):
        param = f"prompt.{index}" if is_many else "prompt"
        if isinstance(item, str):
            prompts.append(await model.encode_text(item, tenant, param))
            texts.append(item)
        else:
            prompts.append(model.from_ids(item, tenant, param))
            raw = b"".join(map(model.tokenizer.token_bytes, item)) if request.echo else b""
            texts.append(raw.decode("utf-8", errors="replace"))
    return prompts, texts


def _sampling(
    request: GenerationRequest,
    model: ServedModel,
    max_tokens: int,
    num_logprobs: int | None,
    seed: int,
) -> SamplingSpec:
    def given(value: Any, default: Any) -> Any:
        return default if value is None else value

    ends = () if request.ignore_eos else model.tokenizer.eos_ids
    own = tuple(request.stop_token_ids or ())
    model.check_ids(own, "stop_token_ids")
    if (request.min_tokens or 0) > max_tokens:
        raise InvalidRequest(
            f"min_tokens is above the {max_tokens} tokens that the answer may have",
            param="min_tokens",
        )
    return SamplingSpec(
        temperature=given(request.temperature, 1.0),
        top_k=max(0, given(request.top_k, 0)),
        top_p=given(request.top_p, 1.0),
        min_p=given(request.min_p, 0.0),
        repetition_penalty=given(request.repetition_penalty, 1.0),
        presence_penalty=given(request.presence_penalty, 0.0),
        frequency_penalty=given(request.frequency_penalty, 0.0),
        logit_bias=_logit_bias(request, model),
        seed=seed,
        num_logprobs=num_logprobs,
        stop_token_ids=tuple(dict.fromkeys([*own, *ends])),
        ignore_eos=bool(request.ignore_eos),
        min_tokens=request.min_tokens or 0,
        max_tokens=max_tokens,
    )


def _logit_bias(request: GenerationRequest, model: ServedModel) -> dict[int, float] | None:
    if not request.logit_bias:
        return None
    biases = {}
    for key, bias in request.logit_bias.items():
        param = f"logit_bias.{key[:40]}"
        is_number = key.isascii() and key.isdigit() and len(key) <= MAX_ID_DIGITS
        if not is_number or int(key) >= model.vocab_size:
            raise InvalidRequest(f"'{key[:40]}' is not a token id of this model", param=param)
        if not isinstance(bias, int | float) or isinstance(bias, bool) or not -100 <= bias <= 100:
            raise InvalidRequest("a bias must be a number from -100 to 100", param=param)
        biases[int(key)] = float(bias)
    return biases


def _choices(request: GenerationRequest) -> tuple[ChoiceSpec, ...]:
    seed = secrets.randbits(_SEED_BITS) if request.seed is None else request.seed
    count = request.n or 1
    return tuple(ChoiceSpec(index=index, seed=choice_seed(seed, index)) for index in range(count))


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index`: the request's own for the first, then a mix (splitmix64)."""
    if index == 0:
        return seed
    mixed = (seed + index * 0x9E3779B97F4A7C15) % 2**64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) % 2**64
    return (mixed ^ (mixed >> 31)) >> (64 - _SEED_BITS)


def _stops(request: GenerationRequest) -> tuple[str, ...]:
    stop = request.stop
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _check_stream_options(request: GenerationRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest(
            "stream_options is only allowed when stream is true", param="stream_options"
        )
