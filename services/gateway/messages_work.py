"""`/v1/messages` and its `count_tokens`: a checked request to a conversation, and that to its work."""

from collections.abc import Iterable
from functools import partial

from finback.services.gateway.answer_formats import from_structured
from finback.services.gateway.body import parse_object
from finback.services.gateway.caller import Caller
from finback.services.gateway.endpoints import Endpoint
from finback.services.gateway.exchange import Exchange
from finback.services.gateway.grammar import Asked, blame, one_of, schema_asked
from finback.services.gateway.messages_protocol import MessagesProtocol
from finback.services.gateway.messages_schema import (
    RULES,
    CountTokensRequest,
    MessagesRequest,
    OutputFormat,
)
from finback.services.gateway.messages_tools import tool_choice_of, tools_of
from finback.services.gateway.messages_turns import message_turns, system_turns
from finback.services.gateway.openai_format import to_json
from finback.services.gateway.sampling import AnswerLimits, new_seed, sampling_of
from finback.services.gateway.schema import GenerationRequest
from finback.services.gateway.served_model import Params, ServedModel
from finback.services.gateway.sink import Sink
from finback.services.gateway.tool_rules import invalid_value, missing
from finback.services.gateway.tool_schema import schema_fault
from finback.services.gateway.validation import check
from finback.services.gateway.work import Work
from finback.shared.codec.dialogue import Conversation
from finback.shared.errors import InvalidRequest
from finback.shared.wire.messages.generate import ChoiceSpec

_PARAMS = Params("messages", "max_tokens")


def messages_endpoints(exchange: Exchange) -> Iterable[Endpoint]:
    """The Messages API."""
    yield Endpoint(
        name="messages",
        path="/v1/messages",
        handler=partial(answer_messages, exchange),
        dialect="anthropic",
        names_events=True,
        operation="chat",
        summary="Answer a conversation (Anthropic's form)",
        request=MessagesRequest,
    )
    yield Endpoint(
        name="messages.count_tokens",
        path="/v1/messages/count_tokens",
        handler=partial(count_tokens, exchange),
        dialect="anthropic",
        summary="What a conversation's prompt will cost",
        request=CountTokensRequest,
    )


async def answer_messages(exchange: Exchange, body: bytes, caller: Caller, sink: Sink) -> None:
    """`POST /v1/messages`."""
    request = check(parse_object(body), MessagesRequest, RULES)
    make_work = partial(
        messages_work,
        request,
        exchange.model,
        request_id=caller.request_id,
        tenant=caller.tenant,
    )
    await exchange.serve("messages", make_work, caller, sink, asked_model=request.model)


async def count_tokens(exchange: Exchange, body: bytes, caller: Caller, sink: Sink) -> None:
    """`POST /v1/messages/count_tokens`: exactly what the usage of the same message will say."""
    request = check(parse_object(body), CountTokensRequest, RULES)
    model = exchange.model
    model.check_name(request.model)
    caller.grant.check_model(request.model, model.name)
    conversation = conversation_of(request)
    with exchange.opened():
        prompt = await model.encode_conversation(conversation, caller.tenant)
    await sink.reply(200, to_json({"input_tokens": prompt.num_tokens}))


async def messages_work(
    request: MessagesRequest, model: ServedModel, *, request_id: str, tenant: str
) -> Work:
    """Check and encode a Messages request. A limit above the room is lowered, as Anthropic does."""
    model.check_name(request.model)
    _check(request)
    conversation = conversation_of(request)
    grammar = model.grammar(conversation)
    prompt = await model.encode_conversation(conversation, tenant)
    room = model.check_length(prompt.num_tokens, None, _PARAMS)
    seed = new_seed()
    limits = AnswerLimits(max_tokens=min(room, request.max_tokens), num_logprobs=None, seed=seed)
    sampling = GenerationRequest(
        model=request.model,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
    )
    protocol = MessagesProtocol(
        message_id=f"msg_{request_id}",
        model=model.name,
        num_prompt_tokens=prompt.num_tokens,
        is_capped=request.max_tokens > room,
        shows_thinking=request.thinking is None or request.thinking.display != "omitted",
        request_id=request_id,
    )
    return Work(
        is_stream=bool(request.stream),
        prompts=(prompt,),
        samplings=(sampling_of(sampling, model, limits),),
        choices=(ChoiceSpec(index=0, seed=seed),),
        stops=tuple(request.stop_sequences or ()),
        protocol=protocol,
        grammar=grammar,
        grammar_param=blame(conversation),
        output=model.output(conversation),
    )


def conversation_of(request: CountTokensRequest) -> Conversation:
    """What the prompt depends on. Reasoning is off unless it is asked for."""
    tools = tools_of(request)
    turns = message_turns(request.messages)
    thinking, config = request.thinking, request.output_config
    asked = _asked(request)
    return Conversation(
        turns=(*system_turns(request.system), *turns),
        tools=tools,
        tool_choice=tool_choice_of(request, tools),
        is_thinking=thinking is not None and thinking.type != "disabled",
        effort=config.effort if config is not None else None,
        continues_last=bool(turns) and turns[-1].role == "assistant",
        answer=asked.spec if asked is not None else None,
        answer_param=asked.param if asked is not None else "",
    )


def _asked(request: CountTokensRequest) -> Asked | None:
    """What the text is kept to; `output_format` is the older name of `output_config.format`."""
    config = request.output_config
    return one_of(
        _schema(config.format if config is not None else None, "output_config.format"),
        _schema(request.output_format, "output_format"),
        from_structured(request.structured_outputs),
    )


def _schema(found: OutputFormat | None, field: str) -> Asked | None:
    if found is None:
        return None
    param = f"{field}.schema"
    if found.json_schema is None:
        raise missing(param)
    fault = schema_fault(found.json_schema, param)
    if fault is not None:
        raise invalid_value(*fault)
    return schema_asked(found.json_schema, field, param)


def _check(request: MessagesRequest) -> None:
    """What concerns several fields, or the inside of one."""
    if request.thread is not None:
        raise InvalidRequest(
            "conversations of the Messages API are not kept here: send all messages",
            param="thread",
            reason="thread_unsupported_request",
        )
    thinking = request.thinking
    if thinking is not None and thinking.type == "enabled":
        if thinking.budget_tokens is None:
            raise missing("thinking.budget_tokens")
        if thinking.budget_tokens >= request.max_tokens:
            raise invalid_value("thinking.budget_tokens", "less than max_tokens")
    for at, stop in enumerate(request.stop_sequences or ()):
        if not stop.strip():
            raise invalid_value(f"stop_sequences.{at}", "more than whitespace")
