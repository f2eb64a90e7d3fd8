"""What a stream of Responses events must obey, as one checker for every test."""

from collections.abc import Sequence
from typing import Any

Event = dict[str, Any]
ENDS = ("response.completed", "response.incomplete", "response.failed")
_TEXTS = {"output_text": "text", "reasoning_text": "text"}
_CALLS = {"function_call_arguments": "arguments", "custom_tool_call_input": "input"}


class Checker:
    """Takes events in order; every rule that is broken is an `AssertionError`."""

    def __init__(self, first_number: int = 0) -> None:
        self.number = first_number
        self.items: list[Event] = []
        self.final: Event | None = None
        self._opened: list[str] = []
        self._open: Event | None = None
        self._part: Event | None = None
        self._text = ""
        self._is_text_done = False

    def take(self, event: Event) -> None:
        """The next event."""
        assert self.final is None, "an event after the last"
        assert event["sequence_number"] == self.number
        self.number += 1
        kind = event["type"].removeprefix("response.")
        if kind in ("created", "queued", "in_progress"):
            self._lifecycle(kind, event["response"])
        elif event["type"] in ENDS:
            self._end(kind, event["response"])
        else:
            assert "created" in self._opened and "in_progress" in self._opened
            self._of_item(kind, event)

    def _lifecycle(self, kind: str, response: Event) -> None:
        assert not self.items and self._open is None
        order = ["created", "queued", "in_progress"]
        assert all(order.index(seen) < order.index(kind) for seen in self._opened)
        assert self._opened or kind == "created"
        assert response["output"] == [] and response["usage"] is None
        self._opened.append(kind)

    def _of_item(self, kind: str, event: Event) -> None:
        assert event["output_index"] == len(self.items)
        if kind == "output_item.added":
            self._added(event["item"])
            return
        assert self._open is not None
        if kind == "output_item.done":
            self._done(event["item"])
            return
        assert event["item_id"] == self._open["id"]
        name, _, verb = kind.rpartition(".")
        if name == "content_part":
            self._content_part(verb, event)
        elif name in _TEXTS:
            assert self._part is not None and self._part["type"] == name
            assert event["content_index"] == 0
            self._grow(verb, event, "text")
        else:
            assert self._open["type"] == (
                "function_call" if name == "function_call_arguments" else "custom_tool_call"
            )
            self._grow(verb, event, _CALLS[name])

    def _added(self, item: Event) -> None:
        assert self._open is None and item["status"] == "in_progress"
        assert all(item["id"] != other["id"] for other in self.items)
        assert item.get("content", []) == [] and not item.get("arguments") and not item.get("input")
        self._open, self._part, self._text, self._is_text_done = item, None, "", False

    def _content_part(self, verb: str, event: Event) -> None:
        assert event["content_index"] == 0
        if verb == "added":
            assert self._part is None and event["part"]["text"] == ""
            self._part = event["part"]
            return
        assert verb == "done" and self._is_text_done
        assert event["part"]["text"] == self._text
        self._part = {**event["part"], "is_done": True}

    def _grow(self, verb: str, event: Event, field: str) -> None:
        assert not self._is_text_done
        if verb == "delta":
            assert event["delta"] != ""
            self._text += event["delta"]
            return
        assert verb == "done" and event[field] == self._text
        self._is_text_done = True

    def _done(self, item: Event) -> None:
        assert self._open is not None and self._is_text_done
        same = ("id", "type", "name", "call_id", "role")
        assert all(item.get(name) == self._open.get(name) for name in same)
        assert item["status"] in ("completed", "incomplete")
        if item["type"] in ("message", "reasoning"):
            assert self._part is not None and self._part.pop("is_done")
            assert item["content"] == [self._part]
        else:
            assert item.get("arguments", item.get("input")) == self._text
        self.items.append(item)
        self._open = None

    def _end(self, kind: str, response: Event) -> None:
        assert response["status"] == kind
        if kind != "failed":
            assert self._open is None
            assert "in_progress" in self._opened
            usage = response["usage"]
            assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        statuses = [item["status"] for item in response["output"]]
        assert kind != "completed" or set(statuses) <= {"completed"}
        assert _without_status(response["output"]) == _without_status(self.items)
        self.final = response


def _without_status(items: Sequence[Event]) -> list[Event]:
    """A cut call is known to be cut only at the very end."""
    return [{**item, "status": None} for item in items]


def check_stream(events: Sequence[Event], first_number: int = 0) -> Event:
    """Check a whole stream; its final response."""
    checker = Checker(first_number)
    for event in events:
        checker.take(event)
    assert checker.final is not None, "no last event"
    return checker.final
