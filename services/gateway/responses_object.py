"""The response object before anything of it is there: ids, and the request's values echoed."""

from typing import Any

from finback.services.gateway.responses_plan import Plan
from finback.services.gateway.responses_schema import ResponsesRequest
from finback.services.gateway.responses_tools import strict_of


def skeleton(plan: Plan, model: str) -> dict[str, Any]:
    """Everything but status, output and usage, which are as at the beginning."""
    request, context = plan.request, plan.context
    conversation_id = context.conversation_id
    return {
        "id": plan.response_id,
        "object": "response",
        "created_at": plan.created_at,
        "completed_at": None,
        "status": "queued" if request.background else "in_progress",
        "background": bool(request.background),
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "conversation": {"id": conversation_id} if conversation_id is not None else None,
        "prompt_cache_key": request.prompt_cache_key,
        "prompt_cache_retention": request.prompt_cache_retention,
        "reasoning": _reasoning(request),
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": plan.is_stored,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": _text(request),
        "tool_choice": request.tool_choice if request.tool_choice is not None else "auto",
        "tools": [_tool(tool, f"tools.{at}") for at, tool in enumerate(request.tools or ())],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": request.truncation or "disabled",
        "usage": None,
        "user": request.user,
        # Not OpenAI's: only there where it is used.
        **({"cache_salt": plan.cache_salt} if plan.cache_salt else {}),
    }


def _reasoning(request: ResponsesRequest) -> dict[str, Any]:
    given = request.reasoning
    summary = given.summary or given.generate_summary if given is not None else None
    return {"effort": given.effort if given is not None else None, "summary": summary}


def _text(request: ResponsesRequest) -> dict[str, Any]:
    given = request.text
    chosen = given.format if given is not None else None
    verbosity = given.verbosity if given is not None else None
    return {"format": chosen or {"type": "text"}, "verbosity": verbosity or "medium"}


def _tool(tool: dict[str, Any], param: str) -> dict[str, Any]:
    if tool["type"] != "function":
        return {"description": None, "format": {"type": "text"}, **tool}
    strict = strict_of(tool, param)
    return {"description": None, "parameters": None, **tool, "strict": strict}
