"""The embedded model's vocabulary, read once."""

import pytest

from finback.services.sampler.compiler import Vocabulary
from finback.services.sampler.model_vocabulary import load_engine_tokenizer
from finback.shared.codec.load import load_tokenizer
from finback.shared.codec.tokenizer import Tokenizer
from finback.shared.models.source import open_source


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    return Vocabulary(*load_engine_tokenizer("embedded"))


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer(open_source("embedded").text)
