"""`GET /v1/models`: one document that the clients of all APIs can read."""

from datetime import UTC, datetime
from typing import Any

from finback.services.gateway.body import parse_object
from finback.services.gateway.caller import Caller
from finback.services.gateway.openai_format import to_json
from finback.services.gateway.served_model import ServedModel
from finback.services.gateway.sink import Sink
from finback.shared.errors import InvalidRequest


class ModelsList:
    """The served model under its name and its aliases."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    async def all(self, body: bytes, caller: Caller, sink: Sink) -> None:
        """OpenAI's list, with the paging fields of Anthropic's: all is always on one page."""
        model = self._model
        names = [model.name, *(name for name in model.aliases if name != model.name)]
        page = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        cards = [self._card(name) for name in names]
        await sink.reply(200, to_json({"object": "list", "data": cards, **page}))

    async def one(self, body: bytes, caller: Caller, sink: Sink) -> None:
        """One model."""
        name = parse_object(body).get("model")
        if not isinstance(name, str):
            raise InvalidRequest("name a model", param="model", reason="invalid_value")
        self._model.check_name(name)
        await sink.reply(200, to_json(self._card(name)))

    def _card(self, name: str) -> dict[str, Any]:
        created = datetime.fromtimestamp(self._model.created, UTC)
        return {
            **self._model.card(name),
            "type": "model",
            "display_name": name,
            "created_at": created.isoformat().replace("+00:00", "Z"),
            "lifecycle": "active",
            "max_input_tokens": self._model.max_model_len,
        }
