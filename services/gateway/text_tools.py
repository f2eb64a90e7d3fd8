"""`/tokenize` and `/detokenize`: what the codec makes of a text, without generating."""

from finback.services.gateway.body import parse_object
from finback.services.gateway.caller import Caller
from finback.services.gateway.chat_schema import ChatRequest
from finback.services.gateway.chat_work import conversation_of
from finback.services.gateway.exchange import Exchange
from finback.services.gateway.openai_format import to_json
from finback.services.gateway.sink import Sink
from finback.services.gateway.text_schema import DetokenizeRequest, TokenizeRequest
from finback.services.gateway.validation import check
from finback.shared.errors import InvalidRequest


class TextTools:
    """Ids of a text or a conversation, and back."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._model = exchange.model

    async def tokenize(self, body: bytes, caller: Caller, sink: Sink) -> None:
        """`{count, max_model_len, tokens}`."""
        request = check(parse_object(body), TokenizeRequest)
        if request.model is not None:
            self._model.check_name(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequest("give prompt or messages, one of them", param="prompt")
        if request.messages is not None:
            chat = ChatRequest(
                model=self._model.name,
                messages=request.messages,
                tools=request.tools,
                chat_template_kwargs=request.chat_template_kwargs,
            )
            with self._exchange.opened():
                prompt = await self._model.encode_conversation(conversation_of(chat), "")
        else:
            with self._exchange.opened():
                prompt = await self._model.encode_text(request.prompt or "", "", "prompt")
        tokens = memoryview(prompt.token_ids).cast("i").tolist()
        limit = self._model.max_model_len
        found = {"count": len(tokens), "max_model_len": limit, "tokens": tokens}
        await sink.reply(200, to_json(found))

    async def detokenize(self, body: bytes, caller: Caller, sink: Sink) -> None:
        """`{prompt}`; control tokens are not shown."""
        request = check(parse_object(body), DetokenizeRequest)
        if request.model is not None:
            self._model.check_name(request.model)
        self._model.check_text("tokens")
        self._model.check_ids(request.tokens, "tokens")
        tokenizer = self._model.tokenizer
        raw = b"".join(map(tokenizer.token_bytes, request.tokens))
        await sink.reply(200, to_json({"prompt": raw.decode("utf-8", errors="replace")}))
