"""What the parser finds, as output items and the events that build them up.

One item is open at a time: added, filled by deltas, done. `output_index` counts items; the texts of
`done` events are the joined deltas. The documents begin with their type, as named events must.
"""

import json
from collections.abc import Callable, Sequence
from json.encoder import encode_basestring
from typing import Any

from finback.services.gateway.answer_events import ChoiceEvent
from finback.services.gateway.responses_items import new_id
from finback.services.gateway.responses_output_items import (
    Call,
    Logprob,
    Message,
    Numbering,
    Reasoning,
)
from finback.services.gateway.store_limits import Item
from finback.shared.codec.output import (
    CallArguments,
    CallBegin,
    CallEnd,
    OutputEvent,
    ReasoningPart,
    TextPart,
)


class OutputBuilder:
    """One answer's items. `seal`: makes `encrypted_content` of a thought, None: not asked for.

    `logprobs`: how an event's logprobs are written, None: not asked for.
    """

    def __init__(
        self,
        numbering: Numbering,
        *,
        seal: Callable[[str], str] | None,
        logprobs: Callable[[ChoiceEvent], list[Logprob]] | None,
    ) -> None:
        self.items: list[Item] = []
        self._numbering = numbering
        self._seal = seal
        self._logprobs = logprobs
        self._open: Message | Reasoning | Call | None = None
        self._untold: list[Logprob] = []
        self._num_calls = 0
        self._num_ended = 0

    def push(self, event: ChoiceEvent) -> list[bytes]:
        """The documents of what is new."""
        if self._logprobs is not None and event.logprobs:
            self._untold.extend(self._logprobs(event))
        documents: list[bytes] = []
        for part in event.parts:
            documents.extend(self._part(part))
        return documents

    def finish(self, *, is_cut: bool) -> list[bytes]:
        """Close what is open. An answer without any item gets an empty message.

        `is_cut`: the tokens ran out, so that what is still open is incomplete. Calls are told by the
        parser whether they are whole.
        """
        documents = [] if self.items or self._open is not None else self._begin(Message())
        if self._open is not None:
            documents.extend(self._close("incomplete" if is_cut else "completed"))
        return documents

    def _part(self, part: OutputEvent) -> list[bytes]:
        if isinstance(part, TextPart):
            opened = self._switch_to(Message)
            return [*opened, self._text_delta(part.text)]
        if isinstance(part, ReasoningPart):
            opened = self._switch_to(Reasoning)
            return [*opened, self._reasoning_delta(part.text)]
        if isinstance(part, CallBegin):
            return self._begin_call(part)
        call = self._open
        if not isinstance(call, Call) or call.index != part.index:
            raise ValueError(f"the parser told of call {part.index}, which is not open")
        if isinstance(part, CallArguments):
            call.texts.append(part.text)
            return [self._delta(f"response.{call.event}.delta", call.item_id, part.text)]
        assert isinstance(part, CallEnd)
        return self._close("completed" if part.is_complete else "incomplete")

    def _begin_call(self, part: CallBegin) -> list[bytes]:
        documents = self._close("completed") if self._open is not None else []
        prefix = "ctc" if part.kind == "custom" else "fc"
        call = Call(part.index, part.call_id, part.name, part.kind, new_id(prefix))
        return [*documents, *self._begin(call)]

    def _switch_to(self, kind: type[Message] | type[Reasoning]) -> list[bytes]:
        if isinstance(self._open, kind):
            return []
        documents = self._close("completed") if self._open is not None else []
        made = Message() if kind is Message else Reasoning(self._seal)
        return [*documents, *self._begin(made)]

    def _begin(self, opened: Message | Reasoning | Call) -> list[bytes]:
        self._open = opened
        document, index = self._numbering.document, len(self.items)
        documents = [
            document(
                "response.output_item.added", output_index=index, item=opened.item("in_progress")
            )
        ]
        if not isinstance(opened, Call):
            part = {**opened.part(), "text": ""}
            documents.append(self._content_part("added", opened.item_id, part))
        return documents

    def _close(self, status: str) -> list[bytes]:
        opened, documents = self._open, []
        assert opened is not None
        if isinstance(opened, Call):
            documents = self._close_call(opened)
        else:
            documents = self._close_part(opened)
        item, index = opened.item(status), len(self.items)
        self.items.append(item)
        self._open = None
        done = self._numbering.document("response.output_item.done", output_index=index, item=item)
        return [*documents, done]

    def _close_call(self, call: Call) -> list[bytes]:
        text_field = "input" if call.kind == "custom" else "arguments"
        more = {} if call.kind == "custom" else {"name": call.name}
        done = self._numbering.document(
            f"response.{call.event}.done",
            item_id=call.item_id,
            output_index=len(self.items),
            **{text_field: call.text()},
            **more,
        )
        return [done]

    def _close_part(self, opened: Message | Reasoning) -> list[bytes]:
        if isinstance(opened, Message) and self._untold:
            opened.logprobs.extend(self._take_logprobs())
        part = opened.part()
        is_message = isinstance(opened, Message)
        where = {"item_id": opened.item_id, "output_index": len(self.items), "content_index": 0}
        more = {"logprobs": part["logprobs"]} if is_message else {}
        kind = "output_text" if is_message else "reasoning_text"
        done = self._numbering.document(f"response.{kind}.done", **where, text=part["text"], **more)
        return [done, self._content_part("done", opened.item_id, part)]

    def _content_part(self, verb: str, item_id: str, part: dict[str, Any]) -> bytes:
        return self._numbering.document(
            f"response.content_part.{verb}",
            item_id=item_id,
            output_index=len(self.items),
            content_index=0,
            part=part,
        )

    def _text_delta(self, text: str) -> bytes:
        message = self._open
        assert isinstance(message, Message)
        message.texts.append(text)
        logprobs = self._take_logprobs()
        message.logprobs.extend(logprobs)
        shown = json.dumps(logprobs, ensure_ascii=False) if logprobs else "[]"
        more = f',"content_index":0,"logprobs":{shown}'
        return self._delta("response.output_text.delta", message.item_id, text, more)

    def _reasoning_delta(self, text: str) -> bytes:
        reasoning = self._open
        assert isinstance(reasoning, Reasoning)
        reasoning.texts.append(text)
        more = ',"content_index":0'
        return self._delta("response.reasoning_text.delta", reasoning.item_id, text, more)

    def _delta(self, kind: str, item_id: str, text: str, more: str = "") -> bytes:
        """Built by hand: there is one for nearly every token."""
        return (
            f'{{"type":"{kind}","sequence_number":{self._numbering.take()},"item_id":"{item_id}",'
            f'"output_index":{len(self.items)},"delta":{encode_basestring(text)}{more}}}'
        ).encode()

    def _take_logprobs(self) -> list[Logprob]:
        taken, self._untold = self._untold, []
        return taken


def text_logprobs(entries: Sequence[dict[str, Any]]) -> list[Logprob]:
    """Chat's logprob entries as `output_text` has them: there `bytes` is a list always."""

    def whole(entry: dict[str, Any]) -> dict[str, Any]:
        return {**entry, "bytes": entry["bytes"] or []}

    return [
        {**whole(entry), "top_logprobs": [whole(top) for top in entry["top_logprobs"]]}
        for entry in entries
    ]
