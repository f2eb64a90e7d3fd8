"""`forget`: what a gateway remembers of prompts in its own memory."""

from finback.services.gateway.served_model import ServedModel
from finback.shared.actor.endpoint import Call
from finback.shared.actor.service import Service
from finback.shared.errors import InvalidRequest
from finback.shared.kv.forget_scope import forget_scope
from finback.shared.wire.messages.cache_admin import ForgetPromptsReply, ForgetRequest


class Forgetting:
    """Drops encoded prompts of a tenant, of a conversation, or all."""

    def __init__(self, service: Service, model: ServedModel) -> None:
        self._service = service
        self._model = model

    async def start(self) -> None:
        """Answer from now on."""
        await self._service.add_endpoint(
            "forget", ForgetRequest, self._on_forget, scope="instance", workers=1
        )

    async def _on_forget(self, call: Call[ForgetRequest]) -> ForgetPromptsReply:
        request = call.message
        if not (request.is_all or request.hashes or request.tenant is not None):
            # A salt says whom blocks fit; prompts fit everybody.
            raise InvalidRequest("say whom or what to forget", param="tenant")
        try:
            scope = forget_scope(None if request.is_all else request.tenant, request.hashes)
        except ValueError as error:
            raise InvalidRequest(str(error), param="hashes") from None
        if request.is_all:
            scope = forget_scope(None, b"")
        num_prompts = self._model.forget_prompts(scope)
        self._service.metrics.count("finback.gateway.prompts_forgotten", num_prompts)
        return ForgetPromptsReply(num_prompts=num_prompts)
