"""`POST /v1/completions`: a checked request to its work."""

from functools import partial
from typing import Any, Final

from finback.services.gateway.answer_formats import asked_of
from finback.services.gateway.body import parse_object
from finback.services.gateway.caching import caching_of
from finback.services.gateway.caller import Caller
from finback.services.gateway.completions import CompletionProtocol
from finback.services.gateway.exchange import Exchange
from finback.services.gateway.grammar import Asked
from finback.services.gateway.openai_format import Spelling
from finback.services.gateway.sampling import (
    AnswerLimits,
    check_stream_options,
    choices_of,
    sampling_of,
    stops_of,
)
from finback.services.gateway.schema import MAX_CHOICES, CompletionRequest
from finback.services.gateway.served_model import Params, Prompt, ServedModel
from finback.services.gateway.sink import Sink
from finback.services.gateway.validation import check
from finback.services.gateway.work import Work
from finback.shared.errors import InvalidRequest
from finback.shared.kv.cache_salt import cache_salt_of

COMPLETION_MAX_TOKENS: Final = 16
_PARAMS: Final = Params("prompt", "max_tokens")


async def answer_completion(exchange: Exchange, body: bytes, caller: Caller, sink: Sink) -> None:
    """`POST /v1/completions`."""
    request = check(parse_object(body), CompletionRequest)
    make_work = partial(
        completion_work,
        request,
        exchange.model,
        request_id=caller.request_id,
        tenant=caller.tenant,
    )
    await exchange.serve("completions", make_work, caller, sink, asked_model=request.model)


async def completion_work(
    request: CompletionRequest, model: ServedModel, *, request_id: str, tenant: str
) -> Work:
    """Check and encode a text completion request."""
    model.check_name(request.model)
    check_stream_options(request)
    if request.echo and request.logprobs is not None:
        raise InvalidRequest(
            "logprobs of the prompt are not available: echo and logprobs exclude each other",
            param="echo",
        )
    if request.return_token_ids and request.stop:
        raise InvalidRequest(
            "ids of text behind a stop string are not told: return_token_ids and stop exclude each "
            "other; stop_token_ids may be given",
            param="return_token_ids",
        )
    choices = choices_of(request)
    asked = asked_of(request)
    if not model.has_text:
        _check_needs_no_text(request, model, asked)
    has_ids = bool(request.return_token_ids) or not model.has_text
    caching = caching_of(request)
    prompts, texts = await _prompts(request, model, cache_salt_of(tenant, caching.cache_salt))
    if len(prompts) * len(choices) > MAX_CHOICES:
        raise InvalidRequest(f"prompts times n must be at most {MAX_CHOICES}", param="n")
    wanted = request.max_tokens
    samplings = []
    for prompt in prompts:
        room = model.check_length(prompt.num_tokens, wanted, _PARAMS)
        limit = min(room, COMPLETION_MAX_TOKENS) if wanted is None else wanted
        limits = AnswerLimits(max_tokens=limit, num_logprobs=request.logprobs, seed=choices[0].seed)
        samplings.append(sampling_of(request, model, limits))
    echoes = [text if request.echo else "" for text in texts for _ in choices]
    protocol = CompletionProtocol(
        request,
        request_id=request_id,
        model=model.name,
        fingerprint=model.fingerprint,
        spelling=Spelling(model.tokenizer),
        echoes=echoes,
        has_token_ids=has_ids,
    )
    return Work(
        is_stream=bool(request.stream),
        prompts=tuple(prompts),
        samplings=tuple(samplings),
        choices=choices,
        stops=stops_of(request.stop),
        protocol=protocol,
        has_token_ids=has_ids,
        grammar=model.as_asked(asked.spec if asked is not None else None),
        grammar_param=asked.param if asked is not None else "",
        caching=caching,
    )


def _check_needs_no_text(
    request: CompletionRequest, model: ServedModel, asked: Asked | None
) -> None:
    """Without a tokenizer nothing can be compared with text, kept to a grammar or shown."""
    for name in ("stop", "echo"):
        if getattr(request, name):
            model.check_text(name)
    if asked is not None:
        model.check_text(asked.param)


async def _prompts(
    request: CompletionRequest, model: ServedModel, salt: str
) -> tuple[list[Prompt], list[str]]:
    """The prompts, and each as text for `echo`."""
    given = request.prompt
    is_many = isinstance(given, list) and not isinstance(given[0], int)
    items: list[Any] = list(given) if is_many else [given]
    prompts, texts = [], []
    for index, item in enumerate(items):
        param = f"prompt.{index}" if is_many else "prompt"
        if isinstance(item, str):
            prompts.append(await model.encode_text(item, salt, param))
            texts.append(item)
        else:
            prompts.append(model.from_ids(item, salt, param))
            raw = b"".join(map(model.tokenizer.token_bytes, item)) if request.echo else b""
            texts.append(raw.decode("utf-8", errors="replace"))
    return prompts, texts
