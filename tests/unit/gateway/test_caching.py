"""What a request says about the cache."""

import itertools

import pytest

from finback.services.gateway.caching import Caching, caching_of
from finback.services.gateway.chat_schema import ChatRequest
from finback.services.gateway.validation import check
from finback.shared.errors import InvalidRequest
from finback.shared.kv.cache_salt import cache_salt_of

BODY = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


def caching(**more: object) -> Caching:
    return caching_of(check({**BODY, **more}, ChatRequest), conversation="conversation:c")


def test_nothing_said_is_as_the_key_and_the_class_say() -> None:
    assert caching() == Caching(session="conversation:c")


def test_everything_said() -> None:
    found = caching(
        prompt_cache_key="k", prompt_cache_retention="24h", traffic_class="agent", cache_salt="s"
    )
    assert found == Caching(
        session="key:k", retention_s=86_400.0, traffic_class="agent", cache_salt="s"
    )
    assert caching(prompt_cache_retention="in_memory").retention_s == 3_600.0


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("cache_salt", "x" * 129, "128"),
        ("cache_salt", "", "1"),
        ("cache_salt", 5, "cache_salt"),
        ("prompt_cache_key", "x" * 513, "512"),
        ("prompt_cache_retention", "7d", "in_memory"),
        ("traffic_class", "vip", "agent"),
    ],
)
def test_odd_values_are_refused_by_name(field: str, value: object, words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        caching(**{field: value})
    assert refused.value.param == field and words in refused.value.public_message


def test_no_two_pairs_of_tenant_and_salt_are_alike() -> None:
    tenants = ["", "a", "a:b", "1:a:b", "0::b"]
    salts = [None, "b", "b:", ":b", "a:b"]
    made = {cache_salt_of(t, s) for t, s in itertools.product(tenants, salts)}
    # A tenant may be named as another's salt is spelled; names of keys have no colon.
    plain = {cache_salt_of(t, s) for t, s in itertools.product(["", "a", "b", "ab"], salts)}
    assert len(plain) == 4 * len(salts) and len(made) >= 4 * len(salts)
