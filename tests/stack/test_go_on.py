"""Answers go on in another decode process, with the very tokens of an undisturbed run."""

import random
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support.kills import Engines, Whole, disturbed
from support.stack import Stack, StreamFailed

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

NAMES = ("decode", "decode2")
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "minLength": 30, "maxLength": 40},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
LONG: dict[str, Any] = {"max_tokens": 48, "ignore_eos": True}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": LONG,
    "seeded": LONG | {"temperature": 0.9, "top_p": 0.9, "seed": 7},
    "penalties": LONG
    | {"temperature": 0.7, "seed": 3, "presence_penalty": 0.9, "frequency_penalty": 0.5},
    "three choices": LONG | {"n": 3, "temperature": 0.8, "seed": 5},
    "logprobs": LONG | {"logprobs": True, "top_logprobs": 3, "temperature": 0.8, "seed": 11},
    # Little of it is forced: tokens come one by one.
    "constrained": {"max_tokens": 80, "structured_outputs": {"regex": "([a-z]{3} ){25}"}},
    "a tool call": {"max_tokens": 120, "tools": [WEATHER], "tool_choice": "required"},
    # Stops that are found again and again where the answer may not end, and once where it may.
    "stops beside a grammar": {
        "max_tokens": 80,
        "structured_outputs": {"regex": "([a-z]{3} ){12}[a-z]{3}( [a-z]{3}){12}"},
        "stop": [" a", "e", " t"],
    },
    "stop string": LONG | {"stop": ["qqq"], "temperature": 1.0, "seed": 2},
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    made = Stack(tmp_path_factory.mktemp("go_on") / "run")
    settings = (
        "decode_processes=2",
        "max_model_len=2048",
        f"kv_pool_bytes={2**27}",
        "drain_grace_s=0.1",
    )
    sets = [word for setting in settings for word in ("--set", setting)]
    made.up("--cohost", "--deterministic", "--drafting", *sets)
    yield made
    made.down()


@pytest.fixture
def engines(stack: Stack) -> Engines:
    made = Engines(stack, NAMES)
    made.wait_whole()
    return made


@pytest.fixture(scope="module")
def expected(stack: Stack) -> dict[str, Whole]:
    """What comes undisturbed."""
    return all_kinds(stack)


def ask(stack: Stack, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return stack.stream("Count upwards from one, one number a line: 1 2 3 4", **options)


def all_kinds(stack: Stack, disturb: Callable[[], None] | None = None) -> dict[str, Whole]:
    """All kinds at once; `disturb` is called somewhere within one of them."""
    chosen = random.choice(sorted(KINDS))

    def run(kind: str) -> Whole:
        at = (random.randrange(2, 12),) if disturb and kind == chosen else ()
        return disturbed(ask(stack, KINDS[kind]), at, lambda _: disturb() if disturb else None)

    with ThreadPoolExecutor(len(KINDS)) as pool:
        return dict(zip(KINDS, pool.map(run, KINDS), strict=True))


def test_a_killed_process_is_not_noticed(
    stack: Stack, engines: Engines, expected: dict[str, Whole]
) -> None:
    log = stack.run_dir / "logs" / "gateway.log"
    before = log.read_text().count('"retry"')
    engines.mark()
    got = all_kinds(stack, lambda: engines.send(engines.busiest(), signal.SIGKILL))
    for kind, whole in got.items():
        assert whole == expected[kind], kind
        assert all(told.num_finishes == 1 for told in whole.choices.values())
    assert log.read_text().count('"retry"') > before
    assert got["greedy"].usage["completion_tokens"] == LONG["max_tokens"]
    assert len(got["logprobs"].choices[0].logprobs) > 1
    assert len(got["three choices"].choices) == 3
    assert got["a tool call"].choices[0].calls[0][0] == "weather"


def test_a_process_that_stands_still_is_left(
    stack: Stack, engines: Engines, expected: dict[str, Whole]
) -> None:
    """And when it goes on, nothing of what it then says is used."""
    stopped: list[str] = []

    def stop(_: int) -> None:
        if stopped:
            engines.send(stopped[0], signal.SIGCONT)
        else:
            stopped.append(engines.busiest())
            engines.send(stopped[0], signal.SIGSTOP)

    engines.mark()
    assert disturbed(ask(stack, KINDS["seeded"]), (10, 20), stop) == expected["seeded"]
    assert all_kinds(stack) == expected


def test_a_drained_process_hands_its_streams_on(
    stack: Stack, engines: Engines, expected: dict[str, Whole]
) -> None:
    log = stack.run_dir / "logs" / "gateway.log"
    got = all_kinds(stack, lambda: engines.send("decode", signal.SIGTERM))
    assert got == expected
    assert "the decode instance is draining" in log.read_text()


def test_helpers_may_die_under_seeded_and_constrained_streams(
    stack: Stack, engines: Engines, expected: dict[str, Whole]
) -> None:
    victims = ("router", "sampler", "drafter", "cache")
    at = tuple(range(4, 4 + 4 * len(victims), 4))

    def kill(number: int) -> None:
        stack.kill(victims[number])

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(disturbed, ask(stack, KINDS["seeded"]), (), lambda _: None)
        got = disturbed(ask(stack, KINDS["constrained"]), at, kill)
        assert other.result(120) == expected["seeded"]
    assert got == expected["constrained"]


def test_the_bus_may_die_under_streams(
    stack: Stack, engines: Engines, expected: dict[str, Whole]
) -> None:
    assert all_kinds(stack, stack.kill_nats) == expected


def test_a_whole_answer_goes_on_too(stack: Stack, engines: Engines) -> None:
    options = KINDS["seeded"] | {"max_tokens": 80}
    whole = stack.whole("Count upwards.", **options)
    engines.mark()
    got = stack.whole(
        "Count upwards.",
        meanwhile=(0.3, lambda: engines.send(engines.busiest(), signal.SIGKILL)),
        **options,
    )
    assert got["choices"] == whole["choices"]
    assert got["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_two_kills_at_the_same_request_are_poison(stack: Stack, engines: Engines) -> None:
    def kill(_: int) -> None:
        victim = engines.busiest()
        engines.send(victim, signal.SIGKILL)
        del engines.pids[victim]
        engines.mark()

    engines.mark()
    with pytest.raises(StreamFailed, match="two crashes"):
        disturbed(ask(stack, LONG), (5, 25), kill)
    log = (stack.run_dir / "logs" / "gateway.log").read_text()
    assert '"poison"' in log and "prompt_hash" in log
