"""Records of a stream, as clients split them into lines."""

import json
from collections.abc import MutableMapping
from typing import Any

import httpx
import pytest

from finback.services.gateway.http_sink import HttpSink
from finback.services.gateway.openai_format import to_json

# Every end of a line that `str.splitlines` knows, a backslash and a line break spelled out between them.
TEXT = "a\n\rb\v\f\x1c\x1d\x1e\x85c\\\u2028\u2029\\u2028\\n \u2018quoted\u2019 \U0001f600"


@pytest.mark.parametrize("names_events", [False, True])
async def test_a_document_is_one_line_to_every_client(names_events: bool) -> None:
    sent = bytearray()

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.extend(message.get("body", b""))

    sink = HttpSink(send, "r1", names_events=names_events)
    await sink.open_stream()
    await sink.send([to_json({"type": "delta", "text": TEXT})] * 2)
    await sink.send_error(to_json({"type": "error", "message": TEXT}))
    lines = [*httpx.Response(200, content=bytes(sent)).iter_lines()]
    documents = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert [document.get("text") for document in documents] == [TEXT, TEXT, None]
    assert documents[2]["message"] == TEXT
    assert all(line.startswith(("data: ", "event: ")) or not line for line in lines)
