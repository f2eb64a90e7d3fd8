"""One gateway with the real router and the echo engine, for all API tests.

`thinking_stack` serves a model that reasons and calls tools: it says what the last message says.
"""

from collections.abc import Iterator

import anthropic
import openai
import pytest

from finback.services.supervisor import key_file
from support.gateway_stack import GatewayStack
from support.nats_server import NatsServer
from support.shop import Shop
from support.thinking_folder import thinking_folder

MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="session")
def stack(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayStack]:
    folder = tmp_path_factory.mktemp("gateway")
    made = GatewayStack(nats_server.url, "api", folder, {"ECHO_STEP_MS": "1"})
    try:
        yield made.start()
    finally:
        made.stop()


@pytest.fixture
def client(stack: GatewayStack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="session")
def thinking_stack(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayStack]:
    folder = tmp_path_factory.mktemp("thinking")
    env = {"ECHO_STEP_MS": "1", "FINBACK_MODEL": str(thinking_folder(folder))}
    made = GatewayStack(nats_server.url, "think", folder, env)
    try:
        made.spawn("sampler")
        yield made.start()
    finally:
        made.stop()


@pytest.fixture
def thinker(thinking_stack: GatewayStack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{thinking_stack.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def claude(thinking_stack: GatewayStack) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=thinking_stack.url, api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def breakable_stack(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayStack]:
    """With a slow engine; `slow_stack` mends it for each test."""
    env = {
        "ECHO_STEP_MS": "20",
        "ECHO_PREFILL_MS": "700",
        "FINBACK_KEEP_ALIVE_S": "0.2",
        "FINBACK_MAX_OPEN_REQUESTS": "4",
        "FINBACK_REPLACE_WAIT_S": "6",
    }
    made = GatewayStack(nats_server.url, "slow", tmp_path_factory.mktemp("slow"), env)
    try:
        yield made.start()
    finally:
        made.stop()


@pytest.fixture
def slow_stack(breakable_stack: GatewayStack) -> GatewayStack:
    """Whole and ready, whatever the test before did to it."""
    breakable_stack.mend()
    return breakable_stack


@pytest.fixture(scope="session")
def shop(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    folder = tmp_path_factory.mktemp("shop")
    keys = folder / "keys.jsonl"
    env = {
        "FINBACK_API_KEYS_FILE": str(keys),
        "FINBACK_LEASE_TTL_S": "1",
        "ECHO_STEP_MS": "5",
    }
    stack = GatewayStack(nats_server.url, "shop", folder, env)
    key_file.create(keys, "first")
    try:
        made = Shop(stack.start(), keys)
        yield made
        for client in made.clients:
            client.close()
    finally:
        stack.stop()
