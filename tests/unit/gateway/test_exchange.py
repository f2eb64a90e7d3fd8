"""What engines are told of a request."""

import asyncio
from typing import Any
from unittest.mock import Mock

import pytest

from finback.services.gateway.caller import Caller
from finback.services.gateway.exchange import Exchange
from finback.services.gateway.served_model import Prompt
from finback.services.gateway.work import Work
from finback.shared.config import StackConfig
from finback.shared.wire.messages.generate import ChoiceSpec, SamplingSpec


def exchange_of() -> Exchange:
    parts: Any = Mock(instance="gateway-1")  # only looked at for names
    return Exchange(
        model=Mock(name="m"),
        desk=parts,
        lifecycle=parts,
        accounts=parts,
        config=StackConfig(),
        max_open=1,
    )


def two_prompts() -> Work:
    prompt = Prompt(b"\0\0\0\0", b"")
    return Work(
        is_stream=False,
        prompts=(prompt, prompt),
        samplings=(SamplingSpec(), SamplingSpec()),
        choices=(ChoiceSpec(index=0, seed=1),),
        stops=(),
        protocol=Mock(),
    )


@pytest.mark.parametrize("tenant", ["", "key-1"])
async def test_prefixes_are_kept_apart_by_tenant(tenant: str) -> None:
    """Else the time to the first token would tell what others have sent."""
    exchange, work = exchange_of(), two_prompts()
    caller = Caller(request_id="r", tenant=tenant)
    made = exchange._generations(work, None, caller, asyncio.Event())
    assert [g.spec.cache_salt for g in made] == [tenant, tenant]


def test_no_two_generations_have_the_same_id() -> None:
    """Not those of one request, of the same request again, nor of a gateway that was started again."""
    caller = Caller(request_id="r", tenant="")
    made = [
        generation
        for exchange in (exchange_of(), exchange_of())
        for _ in range(2)
        for generation in exchange._generations(two_prompts(), None, caller, asyncio.Event())
    ]
    ids = {generation.request_id for generation in made}
    assert len(ids) == 8
    assert {name.partition("~")[0] for name in ids} == {"r"}
