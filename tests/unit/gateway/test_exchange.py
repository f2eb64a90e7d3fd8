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


@pytest.mark.parametrize("tenant", ["", "key-1"])
async def test_prefixes_are_kept_apart_by_tenant(tenant: str) -> None:
    """Else the time to the first token would tell what others have sent."""
    parts: Any = Mock(instance="gateway-1")  # only looked at for names
    exchange = Exchange(
        model=Mock(name="m"),
        desk=parts,
        lifecycle=parts,
        accounts=parts,
        config=StackConfig(),
        max_open=1,
    )
    prompt = Prompt(b"\0\0\0\0", b"")
    work = Work(
        is_stream=False,
        prompts=(prompt, prompt),
        samplings=(SamplingSpec(), SamplingSpec()),
        choices=(ChoiceSpec(index=0, seed=1),),
        stops=(),
        protocol=Mock(),
    )
    caller = Caller(request_id="r", tenant=tenant)
    made = exchange._generations(work, None, caller, asyncio.Event())
    assert [(g.request_id, g.spec.cache_salt) for g in made] == [("r", tenant), ("r.1", tenant)]
