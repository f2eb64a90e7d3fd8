"""The main job on a running stack: HTTP by the official client, NATS, the command line, a trace."""

import json
import re
import time
from pathlib import Path

import openai
import pytest

from support.stack import Stack

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

SERVICES = {"gateway", "router", "cache", "sampler", "drafter", "prefill", "decode"}


def client(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.http}/v1", api_key="none", max_retries=0)


def test_status_has_the_shape_that_scripts_read(stack: Stack) -> None:
    told = stack.status()
    assert set(told) == {"http", "nats", "model", "services"}
    assert set(told["services"]) == SERVICES
    for each in told["services"].values():
        assert set(each) == {"state", "pid", "instance"}
        assert each["state"] == "serving"
    assert len({each["pid"] for each in told["services"].values()}) == len(SERVICES)


def test_the_openai_client_streams_an_answer(stack: Stack) -> None:
    with client(stack) as api:
        stream = api.chat.completions.create(
            model="gpt-4o",
            messages=[{"role": "user", "content": "Say hello."}],
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text.strip()
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] in ("stop", "length")
    assert chunks[-1].usage is not None
    assert 0 < chunks[-1].usage.completion_tokens <= 24


def test_a_constrained_answer_matches(stack: Stack) -> None:
    regex = r"(London|Paris|Rome), (19|20)[0-9]{2}"
    answer = stack.ask(
        "Which city held the Olympics of 2012?", max_tokens=32, structured_outputs={"regex": regex}
    )
    assert re.fullmatch(regex, answer.text)


def test_the_command_line_chats_over_http_and_nats_alike(stack: Stack) -> None:
    options = ("--max-tokens", "16", "--temperature", "0")
    over_http = stack.command("chat", "Name a colour.", *options)
    over_nats = stack.command("chat", "Name a colour.", "--nats", *options)
    assert over_http.returncode == over_nats.returncode == 0, over_http.stderr + over_nats.stderr
    assert over_http.stdout.strip()
    assert over_nats.stdout == over_http.stdout
    piped = stack.command("chat", *options, "--json", stdin="Name a colour.")
    assert json.loads(piped.stdout)["choices"][0]["message"]["content"].strip()


def test_a_trace_shows_every_service(stack: Stack) -> None:
    answer = stack.command("chat", "Repeat: a b c a b c a b c", "--max-tokens", "40", "--json")
    request_id = json.loads(answer.stdout)["id"].removeprefix("chatcmpl-")
    wanted, deadline = SERVICES - {"sampler"}, time.monotonic() + 60
    while True:  # processes write their spans by and by
        spans = json.loads(stack.command("trace", "last", "--json").stdout or "[]")
        services = {span["service"] for span in spans}
        if services >= wanted or time.monotonic() > deadline:
            break
        time.sleep(0.3)
    assert services >= wanted
    assert any(request_id in json.dumps(span["attributes"]) for span in spans)
    drawn = stack.command("trace", request_id)
    assert drawn.returncode == 0, drawn.stderr
    assert "prefill" in drawn.stdout


def test_models_and_logs_and_kernels(stack: Stack) -> None:
    models = json.loads(stack.command("models", "--json").stdout)
    assert stack.status()["model"] in [each["id"] for each in models["data"]]
    assert '"serving"' in stack.command("logs", "router").stdout


def usage_of(stack: Stack, tenant: str) -> dict[str, tuple[int, int]]:
    """(requests, completion tokens) by outcome."""
    used: dict[str, tuple[int, int]] = {}
    for row in json.loads(stack.command("usage", "--tenant", tenant, "--json").stdout or "[]"):
        requests, tokens = used.get(row["outcome"], (0, 0))
        counts = (requests + row["requests"], tokens + row["completion_tokens"])
        used[row["outcome"]] = counts
    return used


def test_keys_take_effect_without_a_restart(run_dir: Path) -> None:
    stack = Stack(run_dir)  # one that once had keys stays closed
    stack.up("--cohost")
    try:
        options = ("--tenant", "acme", "--rpm", "1", "--tpm", "9999", "--concurrency", "4")
        made = json.loads(stack.command("keys", "create", "tester", *options, "--json").stdout)
        assert stack.command("chat", "Hi", "--max-tokens", "2").returncode == 2
        keyed = stack.command("chat", "Hi", "--max-tokens", "2", "--key", made["key"])
        assert keyed.returncode == 0, keyed.stderr
        limited = stack.command("chat", "Hi", "--key", made["key"])
        assert "Rate limit reached for tenant acme: 1 requests per minute" in limited.stderr
        assert stack.command("keys", "set", made["id"], "--rpm", "0").returncode == 0
        again = stack.command("chat", "Hi", "--max-tokens", "2", "--key", made["key"], "--nats")
        assert again.returncode == 0, again.stderr
        assert stack.command("keys", "revoke", made["id"]).returncode == 0
        assert stack.command("chat", "Hi", "--key", made["key"]).returncode == 2
        wanted = {"completed": (2, 4), "refused": (1, 0)}
        deadline = time.monotonic() + 60
        while (used := usage_of(stack, "acme")) != wanted and time.monotonic() < deadline:
            time.sleep(0.3)  # the gateway writes every second
        assert used == wanted
    finally:
        stack.down()
