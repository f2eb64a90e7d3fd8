"""What `SamplingParams` takes, and what it says about what it does not."""

from typing import Any

import pytest

from finback.shared.errors import InvalidRequest
from finback.shared.offline.errors import InvalidInput
from finback.shared.offline.params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("temperature", -0.1, "[0.0, 2.0]"),
        ("temperature", float("nan"), "[0.0, 2.0]"),
        ("temperature", "hot", "a number"),
        ("temperature", True, "a number"),
        ("top_p", 0.0, "(0.0, 1.0]"),
        ("top_k", -1, "[0, "),
        ("top_k", 1.5, "a whole number"),
        ("min_p", 1.1, "[0.0, 1.0]"),
        ("max_tokens", 0, "[1, "),
        ("max_tokens", "16", "a whole number"),
        ("min_tokens", 17, "[0, 16]"),
        ("seed", -1, "[0, "),
        ("seed", 2**63, "[0, "),
        ("logprobs", 21, "[0, 20]"),
        ("presence_penalty", 2.1, "[-2.0, 2.0]"),
        ("frequency_penalty", -2.1, "[-2.0, 2.0]"),
        ("repetition_penalty", 0.0, "(0.0, 10.0]"),
        ("ignore_eos", 1, "True or False"),
        ("stop", "", "not empty"),
        ("stop", ["a", ""], "not empty"),
        ("stop", 7, "a text or a list of texts"),
        ("stop_token_ids", 7, "a list of token ids"),
        ("stop_token_ids", [1.5], "a whole number"),
        ("stop_token_ids", [-1], "at least 0"),
        ("logit_bias", [1], "map token ids"),
        ("logit_bias", {1: 101.0}, "[-100.0, 100.0]"),
        ("logit_bias", {1: "x"}, "a number"),
        ("logit_bias", {"x": 1.0}, "a whole number"),
    ],
)
def test_a_wrong_field_is_named_with_its_limit(field: str, value: Any, told: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        SamplingParams(**{field: value})
    assert str(caught.value).startswith(field)
    assert told in str(caught.value)
    assert caught.value.param == field
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, InvalidRequest)


def test_the_engine_gets_what_was_said() -> None:
    params = SamplingParams(
        temperature=0, top_k=5, max_tokens=None, stop="end", stop_token_ids=[3], logit_bias={7: 1}
    )
    spec = params.spec(30)
    assert (spec.temperature, spec.top_k, spec.max_tokens) == (0.0, 5, 30)
    assert (spec.stop_token_ids, spec.logit_bias, spec.num_logprobs) == ((3,), {7: 1.0}, None)
    assert params.stops == ("end",)
    assert SamplingParams(stop=["a", "b"]).stops == ("a", "b")
