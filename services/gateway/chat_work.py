"""`POST /v1/chat/completions`: a checked request to a conversation, and that to its work."""

from functools import partial
from typing import Any, Final

from finback.services.gateway.answer_formats import asked_of
from finback.services.gateway.body import parse_object
from finback.services.gateway.caching import caching_of
from finback.services.gateway.caller import Caller
from finback.services.gateway.chat import ChatProtocol
from finback.services.gateway.chat_schema import ChatRequest
from finback.services.gateway.chat_tools import tool_choice_of, tools_of
from finback.services.gateway.chat_turns import turns_of
from finback.services.gateway.exchange import Exchange
from finback.services.gateway.grammar import blame
from finback.services.gateway.openai_format import Spelling
from finback.services.gateway.sampling import (
    AnswerLimits,
    check_stream_options,
    choices_of,
    sampling_of,
    stops_of,
)
from finback.services.gateway.served_model import Params, ServedModel
from finback.services.gateway.sink import Sink
from finback.services.gateway.template_values import template_values
from finback.services.gateway.tool_rules import invalid_value
from finback.services.gateway.validation import check
from finback.services.gateway.work import Work
from finback.shared.codec.dialogue import Conversation
from finback.shared.errors import InvalidRequest
from finback.shared.kv.cache_salt import cache_salt_of

_PARAMS: Final = Params("messages", "max_tokens")
_NEW_PARAMS: Final = Params("messages", "max_completion_tokens")
_MAX_METADATA: Final = 16
_MAX_KEY_CHARS: Final = 64
_MAX_VALUE_CHARS: Final = 512


async def answer_chat(exchange: Exchange, body: bytes, caller: Caller, sink: Sink) -> None:
    """`POST /v1/chat/completions`."""
    request = check(parse_object(body), ChatRequest)
    make_work = partial(
        chat_work,
        request,
        exchange.model,
        request_id=caller.request_id,
        tenant=caller.tenant,
    )
    await exchange.serve("chat.completions", make_work, caller, sink, asked_model=request.model)


async def chat_work(
    request: ChatRequest, model: ServedModel, *, request_id: str, tenant: str
) -> Work:
    """Check and encode a chat request."""
    model.check_name(request.model)
    _check(request)
    conversation = conversation_of(request)
    grammar = model.grammar(conversation)
    caching = caching_of(request)
    salt = cache_salt_of(tenant, caching.cache_salt)
    prompt = await model.encode_conversation(conversation, salt)
    asked = request.max_completion_tokens or request.max_tokens
    is_new = request.max_completion_tokens is not None
    room = model.check_length(prompt.num_tokens, asked, _NEW_PARAMS if is_new else _PARAMS)
    choices = choices_of(request)
    limits = AnswerLimits(
        max_tokens=asked or room,
        num_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        seed=choices[0].seed,
    )
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
        samplings=(sampling_of(request, model, limits),),
        choices=choices,
        stops=stops_of(request.stop),
        protocol=protocol,
        grammar=grammar,
        grammar_param=blame(conversation),
        output=model.output(conversation),
        is_open_ended=asked is None,
        caching=caching,
    )


def conversation_of(request: ChatRequest) -> Conversation:
    """What the prompt depends on."""
    tools = tools_of(request)
    turns = turns_of(request.messages)
    asked = asked_of(request)
    return Conversation(
        turns=turns,
        tools=tools,
        tool_choice=tool_choice_of(request, tools),
        is_thinking=_is_thinking(request),
        effort=request.reasoning_effort,
        variables=template_values(request.chat_template_kwargs),
        continues_last=turns[-1].role == "assistant",
        answer=asked.spec if asked is not None else None,
        answer_param=asked.param if asked is not None else "",
    )


def _is_thinking(request: ChatRequest) -> bool | None:
    if request.thinking is not None:
        return request.thinking.type != "disabled"
    if request.reasoning_effort is not None:
        return request.reasoning_effort != "none"
    return None


def _check(request: ChatRequest) -> None:
    """What concerns several fields, or the inside of one."""
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    if len({request.max_tokens, request.max_completion_tokens} - {None}) > 1:
        raise InvalidRequest(
            "max_tokens is the old name of max_completion_tokens: give one of them",
            param="max_tokens",
        )
    check_stream_options(request)
    check_metadata(request.metadata)


def check_metadata(metadata: dict[str, Any] | None) -> None:
    """Up to 16 short strings by name."""
    if metadata is None:
        return
    if len(metadata) > _MAX_METADATA:
        raise invalid_value("metadata", f"at most {_MAX_METADATA} pairs")
    for key, value in metadata.items():
        if len(key) > _MAX_KEY_CHARS:
            raise invalid_value("metadata", f"pairs with keys of at most {_MAX_KEY_CHARS}")
        if not isinstance(value, str) or len(value) > _MAX_VALUE_CHARS:
            raise invalid_value(
                f"metadata.{key}", f"a string of at most {_MAX_VALUE_CHARS} characters"
            )
