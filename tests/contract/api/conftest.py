"""One gateway with the real router and the echo engine, for all API tests."""

from collections.abc import Iterator

import openai
import pytest

from support.gateway_stack import GatewayStack
from support.nats_server import NatsServer

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
