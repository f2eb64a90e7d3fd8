"""A plan to the generation that makes it: prompt, sampling, grammar."""

from typing import Final

from finback.services.gateway.caching import caching_of
from finback.services.gateway.grammar import blame
from finback.services.gateway.responses_conversation import droppable, without_first_turns
from finback.services.gateway.responses_plan import Plan
from finback.services.gateway.responses_protocol import ResponsesProtocol
from finback.services.gateway.sampling import top_p_of
from finback.services.gateway.served_model import Params, Prompt, ServedModel
from finback.services.gateway.work import Work
from finback.shared.codec.dialogue import Conversation
from finback.shared.errors import InvalidRequest
from finback.shared.kv.cache_salt import cache_salt_of
from finback.shared.wire.messages.generate import ChoiceSpec, SamplingSpec

PARAMS: Final = Params("input", "max_output_tokens")
TOO_LONG: Final = "context_length_exceeded"


async def responses_work(
    plan: Plan, model: ServedModel, protocol: ResponsesProtocol, *, tenant: str, is_stream: bool
) -> Work:
    """Encode and check; raises `InvalidRequest` for what does not fit."""
    request = plan.request
    caching = caching_of(request, conversation=_name_of(plan), cache_salt=plan.cache_salt)
    salt = cache_salt_of(tenant, caching.cache_salt)
    conversation, prompt = await _fitting(plan, model, salt)
    room = model.check_length(prompt.num_tokens, request.max_output_tokens, PARAMS)
    grammar = model.grammar(conversation)
    return Work(
        is_stream=is_stream,
        prompts=(prompt,),
        samplings=(_sampling(plan, model, request.max_output_tokens or room),),
        choices=(ChoiceSpec(index=0, seed=plan.seed),),
        stops=(),
        protocol=protocol,
        grammar=grammar,
        grammar_param=blame(conversation),
        is_open_ended=request.max_output_tokens is None,
        output=model.output(conversation),
        caching=caching,
    )


def _name_of(plan: Plan) -> str:
    """The conversation's id, or that of the first item of a chain of responses."""
    context = plan.context
    if context.conversation_id is not None:
        return f"conversation:{context.conversation_id}"
    first = context.items[0].get("id") if context.items else None
    return f"chain:{first}" if isinstance(first, str) else ""


async def encode(conversation: Conversation, model: ServedModel, salt: str) -> Prompt:
    """The prompt of a conversation; errors name this API's fields."""
    try:
        return await model.encode_conversation(conversation, salt)
    except InvalidRequest as error:
        if error.param != "messages":
            raise
        raise InvalidRequest(error.public_message, param="input", reason=error.reason) from error


async def _fitting(plan: Plan, model: ServedModel, salt: str) -> tuple[Conversation, Prompt]:
    """The conversation, or with `truncation: auto` as much of its end as fits."""
    whole = plan.conversation
    if plan.request.truncation != "auto":
        return whole, await encode(whole, model, salt)
    found = await _try(whole, plan, model, salt)
    cuts = [0, *droppable(whole)]
    low, high = 1, len(cuts) - 1  # the fewest turns dropped, by bisection
    while found is None and low <= high:
        middle = (low + high) // 2
        shorter = without_first_turns(whole, cuts[middle])
        tried = await _try(shorter, plan, model, salt)
        if tried is None:
            low = middle + 1
        elif middle == low:
            found = tried
        else:
            high = middle
    if found is None:
        shortest = without_first_turns(whole, cuts[-1])
        return shortest, await encode(shortest, model, salt)
    return found


async def _try(
    conversation: Conversation, plan: Plan, model: ServedModel, salt: str
) -> tuple[Conversation, Prompt] | None:
    try:
        prompt = await encode(conversation, model, salt)
        model.check_length(prompt.num_tokens, plan.request.max_output_tokens, PARAMS)
    except InvalidRequest as error:
        if error.reason != TOO_LONG:
            raise
        return None
    return conversation, prompt


def _sampling(plan: Plan, model: ServedModel, max_tokens: int) -> SamplingSpec:
    request = plan.request
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is above the {max_tokens} tokens that the answer may have",
            param="min_tokens",
        )
    return SamplingSpec(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_k=max(0, request.top_k or 0),
        top_p=top_p_of(request.top_p),
        seed=plan.seed,
        num_logprobs=(request.top_logprobs or 0) if wants_logprobs(plan) else None,
        stop_token_ids=() if request.ignore_eos else tuple(model.tokenizer.eos_ids),
        ignore_eos=bool(request.ignore_eos),
        min_tokens=min_tokens,
        max_tokens=max_tokens,
    )


def wants_logprobs(plan: Plan) -> bool:
    """Asked for by name, or by a number of alternatives."""
    request = plan.request
    return "message.output_text.logprobs" in (request.include or ()) or bool(request.top_logprobs)


def wants_sealed(plan: Plan) -> bool:
    """Whether thoughts are to be given sealed as well."""
    return "reasoning.encrypted_content" in (plan.request.include or ())
