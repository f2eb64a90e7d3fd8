"""The end of an answer is stored before it is told; what could not be stored says so."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from finback.services.gateway.answer_events import ChoiceEvent, Usage
from finback.services.gateway.openai_format import to_json
from finback.services.gateway.responses_keep import KeepingSink
from finback.services.gateway.responses_protocol import ResponsesProtocol
from finback.services.gateway.sink import Outcome
from finback.shared.codec.output import TextPart


class Told:
    """A sink that notes what it is given, and what was stored by then."""

    def __init__(self, stored: list[dict[str, Any]]) -> None:
        self.stored = stored
        self.seen: list[tuple[dict[str, Any], int]] = []

    async def reply(
        self, status: int, body: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        self.seen.append((json.loads(body), len(self.stored)))

    async def open_stream(self) -> None:
        return

    async def send(self, documents: Sequence[bytes]) -> None:
        self.seen.extend((json.loads(document), len(self.stored)) for document in documents)

    async def keep_alive(self) -> None:
        return

    async def close_stream(self, final: Outcome) -> None:
        return


@pytest.mark.parametrize("is_stored", [True, False])
@pytest.mark.parametrize("is_stream", [True, False])
async def test_the_end_comes_after_the_store(is_stored: bool, is_stream: bool) -> None:
    skeleton = {"id": "resp_1", "status": "in_progress", "store": True, "output": []}
    spelling: Any = None  # only used for logprobs
    protocol = ResponsesProtocol(skeleton, spelling=spelling, with_logprobs=False, seal=None)
    stored: list[dict[str, Any]] = []

    async def keep(final: dict[str, Any]) -> bool:
        stored.append(dict(final))
        return is_stored

    told = Told(stored)
    sink = KeepingSink(told, protocol, keep)
    event = ChoiceEvent(0, "hi", finish_reason="stop", parts=[TextPart("hi")])
    if is_stream:
        await sink.send(protocol.opening())
        await sink.send(protocol.chunks([event]))
        await sink.send(protocol.last_chunks(Usage()))
        await sink.close_stream("end")
        assert {count for document, count in told.seen[:-1]} == {0}
        assert [d["sequence_number"] for d, _ in told.seen] == list(range(len(told.seen)))
        assert told.seen[-1][0]["type"] == "response.completed"
        last = told.seen[-1][0]["response"]
    else:
        protocol.add([event])
        await sink.reply(200, to_json(protocol.body(Usage())))
        last = told.seen[-1][0]
    assert told.seen[-1][1] == len(stored) == 1
    assert last["store"] is is_stored
    assert last["output"][0]["content"][0]["text"] == "hi"
