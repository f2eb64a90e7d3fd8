"""The options of `LLM`."""

from typing import Any

import pytest

from finback.shared.errors import ConfigError
from finback.shared.offline.errors import InvalidOption
from finback.shared.offline.options import LLMOptions


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"model": 7}, "model must be a GGUF file"),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda"),
        ({"weights_dtype": "f64"}, "weights_dtype must be one of"),
        ({"max_num_seqs": -1}, "max_num_seqs must be within [0, 65536]"),
        ({"max_num_seqs": 2.0}, "max_num_seqs must be a whole number"),
        ({"max_draft_tokens": 17}, "max_draft_tokens must be within [0, 16]"),
        ({"deterministic": "yes"}, "deterministic must be True or False"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, "at least max_num_seqs (8)"),
    ],
)
def test_a_wrong_option_is_named_with_its_limit(options: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        LLMOptions(**options)
    assert told in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, ConfigError)


def test_few_rows_mean_few_sequences() -> None:
    assert LLMOptions(max_num_batched_tokens=16).num_seqs == 16
    assert LLMOptions(max_num_seqs=3).window == 6
    assert LLMOptions().source == "embedded"
