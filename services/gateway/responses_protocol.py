"""The Responses API's answer: lifecycle events around the output, or one body."""

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from finback.services.gateway.answer_events import ChoiceEvent, Usage
from finback.services.gateway.openai_format import Spelling
from finback.services.gateway.responses_output import OutputBuilder, text_logprobs
from finback.services.gateway.responses_output_items import Logprob, Numbering
from finback.shared.errors import InvalidRequest, ServingError

Opening = Sequence[str]
FRESH: Final[Opening] = ("response.created", "response.in_progress")


def usage_json(usage: Usage) -> dict[str, Any]:
    """The usage object; the newest SDK needs every field of it."""
    total = usage.num_prompt_tokens + usage.num_completion_tokens
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.num_cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": usage.num_completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
        "total_tokens": total,
    }


class ResponsesProtocol:
    """One response. `skeleton`: the response object before anything of it is there.

    `final` is set with the last document: the response as it is to be kept.
    """

    def __init__(
        self,
        skeleton: dict[str, Any],
        *,
        spelling: Spelling,
        with_logprobs: bool,
        seal: Callable[[str], str] | None,
        opening: Opening = FRESH,
        first_number: int = 0,
    ) -> None:
        self.final: dict[str, Any] | None = None
        self._skeleton = skeleton
        self._spelling = spelling
        self._with_logprobs = with_logprobs
        self._seal = seal
        self._opening = opening
        self._numbering = Numbering(first_number)
        self._builder = self._new_builder()
        self._is_cut = False
        self._last_number = 0

    @property
    def numbering(self) -> Numbering:
        """Of the stream's events."""
        return self._numbering

    # -- streamed

    def opening(self) -> list[bytes]:
        """`created` and `in_progress`, or what is left of them."""
        response = {**self._skeleton, "status": "in_progress"}
        return [self._numbering.document(kind, response=response) for kind in self._opening]

    def chunks(self, events: Sequence[ChoiceEvent]) -> list[bytes]:
        """The documents of some events."""
        documents: list[bytes] = []
        for event in events:
            documents.extend(self._builder.push(event))
            if event.finish_reason is not None:
                self._is_cut = event.finish_reason == "length"
                documents.extend(self._builder.finish(is_cut=self._is_cut))
        return documents

    def last_chunks(self, usage: Usage) -> list[bytes]:
        """`completed` or `incomplete`, with everything in it."""
        self.final = self._response(usage)
        return [self._last(self._numbering.take())]

    def failure(self, error: ServingError) -> list[bytes]:
        """`failed`, with what was there until then."""
        self.final = {
            **self._skeleton,
            "status": "failed",
            "error": error_of(error),
            "output": self._builder.items,
        }
        return [self._last(self._numbering.take())]

    def ping(self) -> None:
        """A comment is enough."""

    def rewritten(self) -> list[bytes]:
        """The last document once more, after a change to `final`."""
        return [self._last(self._last_number)]

    # -- whole

    def add(self, events: Sequence[ChoiceEvent]) -> None:
        """Keep events for the body."""
        self.chunks(events)

    def body(self, usage: Usage) -> dict[str, Any]:
        """The whole response."""
        self.final = self._response(usage)
        return self.final

    def _new_builder(self) -> OutputBuilder:
        logprobs = self._logprobs if self._with_logprobs else None
        return OutputBuilder(self._numbering, seal=self._seal, logprobs=logprobs)

    def _logprobs(self, event: ChoiceEvent) -> list[Logprob]:
        return text_logprobs(self._spelling.chat(event.logprobs))

    def _response(self, usage: Usage) -> dict[str, Any]:
        status = "incomplete" if self._is_cut else "completed"
        return {
            **self._skeleton,
            "status": status,
            "completed_at": None if self._is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if self._is_cut else None,
            "output": self._builder.items,
            "usage": usage_json(usage),
        }

    def _last(self, number: int) -> bytes:
        assert self.final is not None
        self._last_number = number
        kind = f"response.{self.final['status']}"
        return Numbering(number).document(kind, response=self.final)


def error_of(error: ServingError) -> dict[str, Any]:
    """A response's `error`, in the words that the API has."""
    code = "server_error"
    if error.http_status == 429:
        code = "rate_limit_exceeded"
    elif isinstance(error, InvalidRequest):
        code = "invalid_prompt"
    return {"code": code, "message": error.public_message}
