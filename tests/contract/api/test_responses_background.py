"""Background responses: made beside everything, followed from anywhere, and made again after kills."""

import contextlib
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from support.gateway_stack import GatewayStack, free_port
from support.nats_server import NatsServer
from support.response_events import Checker, check_stream

MODEL = "gpt-4o"
LONG = " ".join(["word"] * 60)
UNFINISHED = ("queued", "in_progress")


@pytest.fixture(scope="module")
def pair(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator["Pair"]:
    """Two gateways that share a store."""
    env = {"ECHO_STEP_MS": "15", "FINBACK_KEEP_ALIVE_S": "0.2", "FINBACK_LEASE_TTL_S": "1"}
    folder = tmp_path_factory.mktemp("background")
    stack = GatewayStack(nats_server.url, "background", folder, env)
    made = Pair(stack, free_port())
    try:
        stack.start()
        made.mend()
        yield made
    finally:
        stack.stop()


class Pair:
    """`gateway` on the stack's port and `gateway2` on another."""

    def __init__(self, stack: GatewayStack, port: int) -> None:
        self.stack = stack
        self.port = port

    @property
    def urls(self) -> tuple[str, str]:
        return f"{self.stack.url}/v1", f"http://127.0.0.1:{self.port}/v1"

    def mend(self) -> "Pair":
        self.stack.mend()
        if "gateway2" not in self.stack.processes:
            self.stack.spawn("gateway2", FINBACK_HTTP_PORT=str(self.port))
        until(lambda: _is_up(f"http://127.0.0.1:{self.port}/readyz"))
        return self

    @contextmanager
    def clients(self) -> Iterator[tuple[openai.OpenAI, openai.OpenAI]]:
        made = [
            openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=20)
            for url in self.urls
        ]
        try:
            yield made[0], made[1]
        finally:
            for client in made:
                client.close()


def _is_up(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).status_code == 200
    except httpx.TransportError:
        return False


def until(is_so: Callable[[], Any], timeout_s: float = 20.0) -> Any:
    """Poll until it is so."""
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        if found := is_so():
            return found
        time.sleep(0.05)
    raise AssertionError("it did not come to be so in time")


def finished(client: openai.OpenAI, response_id: str) -> Any:
    """The response, once it is finished."""

    def found() -> Any:
        made = client.responses.retrieve(response_id)
        return made if made.status not in UNFINISHED else None

    return until(found)


def _until_in_progress(client: openai.OpenAI, response_id: str) -> None:
    until(lambda: client.responses.retrieve(response_id).status == "in_progress")


def begin(client: openai.OpenAI, text: str = LONG, **fields: Any) -> Any:
    create: Any = client.responses.create
    return create(model=MODEL, input=text, background=True, **fields)


def plain(event: Any) -> dict[str, Any]:
    found: dict[str, Any] = event.model_dump(mode="json", exclude_unset=True)
    return found


def test_made_in_the_background_and_found_at_any_gateway(pair: Pair) -> None:
    with pair.mend().clients() as (one, two):
        schema = {"type": "object", "properties": {"x": {"default": None}}}
        fields: dict[str, Any] = {
            "tools": [{"type": "function", "name": "f", "parameters": schema}],
            "instructions": "be brief",
            "metadata": {"k": "v"},
            "temperature": 0,
        }
        made = begin(one, "hello there", **fields)
        assert made.status == "queued" and made.background is True and made.output == []
        done = finished(two, made.id)
        assert (done.status, done.output_text) == ("completed", "hello there")
        same = ("tools", "instructions", "metadata", "temperature", "created_at", "tool_choice")
        assert all(getattr(done, name) == getattr(made, name) for name in same)
        assert done.tools[0].parameters == schema
        at_once: Any = one.responses.create
        usage = at_once(model=MODEL, input="hello there", **fields).usage
        assert done.usage == usage
        more = two.responses.create(model=MODEL, input="and", previous_response_id=made.id)
        assert more.output_text == "and"
        with pytest.raises(openai.BadRequestError, match="no event stream"):
            two.responses.retrieve(made.id, stream=True)


def test_what_is_no_stream_cannot_be_followed_even_while_it_is_made(pair: Pair) -> None:
    with pair.mend().clients() as (one, two):
        made = begin(one)
        with pytest.raises(openai.BadRequestError, match="no event stream"):
            two.responses.retrieve(made.id, stream=True)
        assert one.responses.retrieve(made.id).status in ("queued", "in_progress")
        one.responses.cancel(made.id)


def test_a_stream_can_be_left_and_taken_up_again(pair: Pair) -> None:
    with pair.mend().clients() as (one, two):
        seen = []
        with begin(one, stream=True) as stream:
            for event in stream:
                seen.append(plain(event))
                if len(seen) == 12:
                    break
        name = seen[0]["response"]["id"]
        assert [event["type"] for event in seen[:3]] == [
            "response.created", "response.queued", "response.in_progress",
        ]  # fmt: skip
        rest: Any = two.responses.retrieve(name, stream=True, starting_after=11)
        events = [*seen, *map(plain, rest)]
        final = check_stream(events)
        assert final["output"][0]["content"][0]["text"] == LONG
        again: Any = one.responses.retrieve(name, stream=True)
        assert [plain(event) for event in again] == events
        stream_of: Any = two.responses.stream
        with stream_of(response_id=name, starting_after=20) as helper:
            assert helper.get_final_response().output_text == LONG
        assert list(one.responses.retrieve(name, stream=True, starting_after=10_000)) == []


def test_cancelled_by_either_gateway(pair: Pair) -> None:
    with pair.mend().clients() as (one, two):
        for canceller in (one, two):
            made = begin(one, LONG * 5)
            _until_in_progress(one, made.id)
            cancelled = canceller.responses.cancel(made.id)
            assert cancelled.status == "cancelled" and cancelled.output == []
            assert one.responses.cancel(made.id).status == "cancelled"
            assert two.responses.retrieve(made.id).status == "cancelled"
            until(lambda: _open_requests(pair) == 0)
        whole = one.responses.create(model=MODEL, input="x")
        with pytest.raises(openai.BadRequestError, match="synchronous"):
            one.responses.cancel(whole.id)


def _open_requests(pair: Pair) -> float:
    text = httpx.get(f"{pair.stack.url}/metrics").text
    lines = [line for line in text.splitlines() if line.startswith("finback_gateway_open_requests")]
    return float(lines[0].split()[-1])


def test_followers_hear_of_a_cancel_and_of_a_delete(pair: Pair) -> None:
    with pair.mend().clients() as (one, two):
        for verb, code in (("cancel", "response_cancelled"), ("delete", "response_deleted")):
            events = []
            for event in begin(one, LONG * 5, stream=True):
                events.append(plain(event))
                if len(events) == 8:
                    getattr(two.responses, verb)(events[0]["response"]["id"])
            assert events[-1]["type"] == "error" and events[-1]["code"] == code
            numbers = [event["sequence_number"] for event in events]
            assert numbers == list(range(len(events)))


def test_a_killed_gateways_work_is_made_by_the_other(pair: Pair) -> None:
    """Numbers go on, so nobody takes the second attempt's text for the rest of the first's."""
    with pair.mend().clients() as (one, two):
        quiet = begin(one)
        with begin(one, stream=True) as stream:
            name = next(iter(stream)).response.id
        events = []
        follower: Any = two.responses.retrieve(name, stream=True)
        for event in follower:
            events.append(plain(event))
            if len(events) == 12:
                pair.stack.kill("gateway")
        assert events[-1]["type"] == "error" and events[-1]["code"] == "response_restarted"
        checker = Checker()
        for event in events[:-1]:
            checker.take(event)
        last = events[-2]["sequence_number"]
        again = until(lambda: _rest(two, name, last))
        assert again[0]["sequence_number"] > last
        final = check_stream(again, first_number=again[0]["sequence_number"])
        assert final["output"][0]["content"][0]["text"] == LONG
        assert two.responses.retrieve(name).status == "completed"
        assert finished(two, quiet.id).output_text == LONG


def _rest(client: openai.OpenAI, name: str, last: int) -> Any:
    """The events after `last` once the response is made anew; what the dead one left is skipped."""
    found: Any = client.responses.retrieve(name, stream=True, starting_after=last)
    events = [plain(event) for event in found]
    starts = [at for at, event in enumerate(events) if event["type"] == "response.created"]
    return events[starts[-1] :] if starts else None


def test_everything_dies_and_is_made_after_the_restart(pair: Pair) -> None:
    with pair.mend().clients() as (one, _):
        names = [begin(one, f"{LONG} {at}").id for at in range(4)]
        _until_in_progress(one, names[0])
        pair.stack.kill("gateway")
        pair.stack.kill("gateway2")
    with pair.mend().clients() as (one, _):
        for at, name in enumerate(names):
            assert finished(one, name).output_text == f"{LONG} {at}"


def _stop_between_writes(pair: Pair) -> None:
    """Stop the first gateway where it does not hold the store's lock: nobody could write then."""
    process, path = pair.stack.processes["gateway"], pair.stack.folder / "responses.sqlite"

    def is_stopped() -> bool:
        process.send_signal(signal.SIGSTOP)
        with contextlib.closing(sqlite3.connect(path, timeout=0.5)) as store:
            try:
                store.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                process.send_signal(signal.SIGCONT)
                return False
            store.rollback()
        return True

    until(is_stopped)


def test_a_gateway_that_was_only_taken_for_dead_changes_nothing(pair: Pair) -> None:
    """Stopped, adopted, woken: its own attempt is fenced off and the other's stays."""
    with pair.mend().clients() as (one, two):
        with begin(one, LONG * 2, stream=True) as stream:
            name = next(iter(stream)).response.id
        _stop_between_writes(pair)
        try:
            done = finished(two, name)
        finally:
            pair.stack.processes["gateway"].send_signal(signal.SIGCONT)
        assert done.output_text == LONG * 2
        until(lambda: _open_requests(pair) == 0)
        events: Any = one.responses.retrieve(name, stream=True)
        told = [plain(event) for event in events]
        final = check_stream(told, first_number=told[0]["sequence_number"])
        assert final == plain(one.responses.retrieve(name))


def test_a_stopped_gateway_gives_its_work_back(pair: Pair) -> None:
    with pair.mend().clients() as (one, two):
        made = begin(one, LONG * 3)
        _until_in_progress(one, made.id)
        process = pair.stack.processes.pop("gateway")
        process.terminate()
        assert process.wait(20) == 0
        assert finished(two, made.id).output_text == LONG * 3


def test_one_that_ends_its_gateways_is_given_up(pair: Pair) -> None:
    with pair.mend().clients() as (one, two):
        made = begin(one, LONG * 5, stream=True)
        name = next(iter(made)).response.id
        made.close()
        store = str(pair.stack.folder / "responses.sqlite")
        with sqlite3.connect(store, timeout=5) as file:
            file.execute("UPDATE responses SET num_attempts = 3 WHERE id = ?", (name,))
        file.close()
        pair.stack.kill("gateway")
        done = finished(two, name)
        assert done.status == "failed" and "3 times" in done.error.message
        events: Any = two.responses.retrieve(name, stream=True)
        assert [event.type for event in events] == ["response.created", "response.failed"]


def test_what_cannot_be_made_fails(pair: Pair) -> None:
    with pair.mend().clients() as (one, _):
        made = begin(one, "word " * 9000)
        done = finished(one, made.id)
        assert done.status == "failed" and done.error.code == "invalid_prompt"
        assert "maximum context length" in done.error.message
