"""The Responses API: create, retrieve, follow, cancel, delete, list input items, count."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from finback.services.gateway.body import parse_object
from finback.services.gateway.caller import Caller
from finback.services.gateway.exchange import Exchange
from finback.services.gateway.grammar import blame
from finback.services.gateway.openai_format import to_json
from finback.services.gateway.query_values import typed
from finback.services.gateway.responses_attempt import new_protocol
from finback.services.gateway.responses_conversation import conversation_of
from finback.services.gateway.responses_follow import Follower
from finback.services.gateway.responses_jobs import Jobs
from finback.services.gateway.responses_keep import KeepingSink, kept_of
from finback.services.gateway.responses_object import skeleton
from finback.services.gateway.responses_plan import Plan, context_of, make_plan
from finback.services.gateway.responses_schema import (
    CountRequest,
    InputItemsRequest,
    ResponseRef,
    ResponsesRequest,
    RetrieveRequest,
)
from finback.services.gateway.responses_sealed import Seals
from finback.services.gateway.responses_work import encode, responses_work
from finback.services.gateway.sink import Sink
from finback.services.gateway.store import Store
from finback.services.gateway.store_limits import Item
from finback.services.gateway.store_rows import Stored
from finback.services.gateway.validation import check
from finback.shared.errors import InvalidRequest, NotFound, ServingError
from finback.shared.telemetry.metrics import Metrics

DEFAULT_LIMIT = 20


class ResponsesApi:
    """The handlers; every one is given a JSON object, whichever door it came through."""

    def __init__(
        self,
        *,
        exchange: Exchange,
        store: Store,
        jobs: Jobs,
        seals: Seals,
        metrics: Metrics,
        log: Any,
    ) -> None:
        self._exchange = exchange
        self._store = store
        self._jobs = jobs
        self._seals = seals
        self._metrics = metrics
        self._log = log

    async def create(self, body: bytes, caller: Caller, sink: Sink) -> None:
        """`POST /v1/responses`."""
        request = check(parse_object(body), ResponsesRequest)
        if request.model is not None:
            self._exchange.model.check_name(request.model)
            caller.grant.check_model(request.model, self._exchange.model.name)
        unseal = partial(self._seals.unseal, tenant=caller.tenant)
        plan = await make_plan(request, self._store, caller.tenant, unseal)
        if request.background:
            await self._in_background(plan, caller, sink)
        else:
            await self._at_once(plan, caller, sink)

    async def retrieve(self, body: bytes, caller: Caller, sink: Sink) -> None:
        """`GET /v1/responses/{response_id}`, with `stream` the events of a background stream."""
        fields = typed(
            parse_object(body),
            booleans=("stream", "include_obfuscation"),
            numbers=("starting_after",),
            lists=("include",),
        )
        request = check(fields, RetrieveRequest)
        if not request.stream and request.starting_after is not None:
            raise InvalidRequest("starting_after needs stream=true", param="starting_after")
        stored = await self._require(request.response_id, caller)
        if not request.stream:
            return await sink.reply(200, to_json(stored.body))
        after = -1 if request.starting_after is None else request.starting_after
        await self._follow(stored.response_id, after, caller, sink)

    async def delete(self, body: bytes, caller: Caller, sink: Sink) -> None:
        """`DELETE /v1/responses/{response_id}`: it, its input and its events are gone."""
        name = check(parse_object(body), ResponseRef).response_id
        if not await self._store.responses.delete(caller.tenant, name):
            raise not_found(name)
        self._jobs.forget(name)
        gone = {"id": name, "object": "response.deleted", "deleted": True}
        await sink.reply(200, to_json(gone))

    async def cancel(self, body: bytes, caller: Caller, sink: Sink) -> None:
        """`POST /v1/responses/{response_id}/cancel`: a finished one is given back as it is."""
        name = check(parse_object(body), ResponseRef).response_id
        stored = await self._store.leases.cancel(caller.tenant, name)
        if stored is None:
            raise not_found(name)
        if not stored.is_background:
            raise InvalidRequest(
                "Cannot cancel a synchronous response: only background responses can be cancelled.",
                param="response_id",
                reason="invalid_value",
            )
        self._jobs.forget(name)
        await sink.reply(200, to_json(stored.body))

    async def input_items(self, body: bytes, caller: Caller, sink: Sink) -> None:
        """`GET /v1/responses/{response_id}/input_items`, earlier turns included."""
        fields = typed(parse_object(body), numbers=("limit",), lists=("include",))
        request = check(fields, InputItemsRequest)
        stored = await self._require(request.response_id, caller, with_items=True)
        items = list(stored.items)
        if request.order != "asc":
            items.reverse()
        limit = request.limit or DEFAULT_LIMIT
        await sink.reply(200, to_json(page_json(_behind(items, request.after), limit)))

    async def count(self, body: bytes, caller: Caller, sink: Sink) -> None:
        """`POST /v1/responses/input_tokens`: equal to the usage of such a request.

        What creating would refuse is refused: a count that came back can be relied on.
        """
        request = check(parse_object(body), CountRequest)
        model = self._exchange.model
        if request.model is not None:
            model.check_name(request.model)
            caller.grant.check_model(request.model, model.name)
        context = await context_of(request, self._store, caller.tenant)
        unseal = partial(self._seals.unseal, tenant=caller.tenant)
        conversation = conversation_of(request, context.items, unseal)
        with self._exchange.opened():
            grammar = model.grammar(conversation)
            prompt = await encode(conversation, model, caller.tenant)
            await self._exchange.compile(grammar, blame(conversation), caller)
        found = {"object": "response.input_tokens", "input_tokens": prompt.num_tokens}
        await sink.reply(200, to_json(found))

    async def _at_once(self, plan: Plan, caller: Caller, sink: Sink) -> None:
        exchange, request = self._exchange, plan.request
        body = skeleton(plan, exchange.model.name)
        protocol = new_protocol(plan, body, exchange, self._seals, caller.tenant)
        keep = partial(self._keep, plan, caller)
        make_work = partial(
            responses_work,
            plan,
            exchange.model,
            protocol,
            tenant=caller.tenant,
            is_stream=bool(request.stream),
        )
        keeping = KeepingSink(sink, protocol, keep)
        await exchange.serve(
            "responses", make_work, caller, keeping, asked_model=request.model or ""
        )

    async def _in_background(self, plan: Plan, caller: Caller, sink: Sink) -> None:
        body = await self._jobs.submit(plan, caller)
        if plan.request.stream:
            await self._follow(plan.response_id, -1, caller, sink)
        else:
            await sink.reply(200, to_json(body))

    async def _follow(self, response_id: str, after: int, caller: Caller, sink: Sink) -> None:
        follower = Follower(
            self._store,
            caller.tenant,
            response_id,
            sink,
            wait=self._jobs.wait_news,
            tick_s=self._exchange.keep_alive_s,
        )
        await follower.follow(after)

    async def _keep(self, plan: Plan, caller: Caller, final: dict[str, Any]) -> bool:
        """Whether the store holds what it was asked to hold."""
        if not plan.is_stored and plan.context.conversation_id is None:
            return True
        try:
            await self._store.responses.keep(kept_of(plan, final, caller.tenant))
        except ServingError as error:
            self._metrics.count("finback.gateway.unstored_responses", code=error.code)
            self._log.warning(
                "a response was not stored", id=plan.response_id, error=error.public_message
            )
            return not plan.is_stored
        return True

    async def _require(
        self, response_id: str, caller: Caller, *, with_items: bool = False
    ) -> Stored:
        found = await self._store.responses.get(caller.tenant, response_id, with_items=with_items)
        if found is None:
            raise not_found(response_id)
        return found


def not_found(response_id: str) -> NotFound:
    """Nobody's, or somebody else's."""
    return NotFound(f"Response with id '{response_id}' not found.", param="response_id")


def _behind(items: Sequence[Item], after: str | None) -> Sequence[Item]:
    if after is None:
        return items
    at = next((at for at, item in enumerate(items) if item["id"] == after), None)
    if at is None:
        raise NotFound(f"Item with id '{after}' not found.", param="after")
    return items[at + 1 :]


def page_json(items: Sequence[Item], limit: int) -> dict[str, Any]:
    """A page as lists have it; give one item more than the limit if there is one."""
    shown = list(items[:limit])
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(items) > limit,
    }
