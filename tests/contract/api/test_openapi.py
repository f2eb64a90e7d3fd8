"""What schemathesis makes of the OpenAPI document: no request is answered with a server's fault.

Bounded: a few examples an operation, with a context that keeps answers short.
"""

import os
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from support.gateway_stack import GatewayStack
from support.nats_server import NatsServer
from support.request_bodies import CHAT, MESSAGES, bodies
from support.thinking_folder import NAME, thinking_folder

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its dependencies announce their own changes
    import schemathesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

EXAMPLES = int(os.environ.get("FINBACK_FUZZ_EXAMPLES", "5"))
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def fuzzed(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayStack]:
    folder: Path = tmp_path_factory.mktemp("fuzzed")
    env = {"FINBACK_MODEL": str(thinking_folder(folder)), "FINBACK_MAX_MODEL_LEN": "400"}
    made = GatewayStack(nats_server.url, "fuzz", folder, env)
    try:
        made.spawn("sampler")
        yield made.start()
    finally:
        made.stop()


def operations(stack: GatewayStack) -> Any:
    document = httpx.get(f"{stack.url}/openapi.json").json()
    loaded: Any = schemathesis.openapi.from_dict(document)
    loaded.config.update(base_url=stack.url)
    return loaded


def test_no_request_is_answered_with_a_servers_fault(fuzzed: GatewayStack) -> None:
    statuses: Counter[str] = Counter()
    num_operations = 0
    for result in operations(fuzzed).get_all_operations():
        operation = result.ok()

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @operation_given(operation)  # type: ignore[untyped-decorator]  # hypothesis' over Any
        def ask(case: Any) -> None:
            if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
                case.body["model"] = NAME  # no other gets beyond its name
            response = case.call(timeout=20)
            statuses[f"{case.operation.label} {response.status_code}"] += 1
            case.validate_response(response, checks=CHECKS)

        ask()
        num_operations += 1
    assert num_operations >= 12
    assert {"200", "400", "404"} <= {label[-3:] for label in statuses}
    assert "request failed" not in fuzzed.logs()


@pytest.mark.parametrize(
    ("path", "valid"), [("/v1/chat/completions", CHAT), ("/v1/messages", MESSAGES)]
)
def test_spoiled_requests(fuzzed: GatewayStack, path: str, valid: dict[str, Any]) -> None:
    """A good request with a few things wrong is answered, or refused in the API's own form."""
    statuses: Counter[int] = Counter()

    @settings(max_examples=EXAMPLES * 10, deadline=None, database=None, derandomize=True)
    @given(body=bodies(valid, 1), is_stream=st.booleans())
    def ask(body: Any, is_stream: bool) -> None:
        if isinstance(body, dict) and is_stream:
            body = {**body, "stream": True}
        reply = httpx.post(fuzzed.url + path, json=body, timeout=20)
        statuses[reply.status_code] += 1
        assert reply.status_code in (200, 400, 404), reply.text
        if reply.status_code != 200:
            assert reply.json()["error"]["message"]

    assert httpx.post(fuzzed.url + path, json=valid, timeout=20).status_code == 200
    ask()
    assert statuses[200]
    assert statuses[400]
    assert "request failed" not in fuzzed.logs()


def operation_given(operation: Any) -> Any:
    """Hypothesis' decorator with valid cases, and with ones that break the schema."""
    positive = operation.as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE)
    if operation.body or list(operation.query):
        negative = operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE)
        return given(case=st.one_of(positive, negative))
    return given(case=positive)
