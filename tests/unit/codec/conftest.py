"""The embedded model's codec, built once."""

import pytest

from finback.shared.codec.conversation import ConversationRenderer
from finback.shared.codec.load import load_renderer, load_tokenizer
from finback.shared.codec.tokenizer import Tokenizer
from finback.shared.models.source import ModelSource, open_source


@pytest.fixture(scope="session")
def smollm_source() -> ModelSource:
    return open_source("embedded")


@pytest.fixture(scope="session")
def smollm(smollm_source: ModelSource) -> Tokenizer:
    return load_tokenizer(smollm_source.text)


@pytest.fixture(scope="session")
def smollm_renderer(smollm_source: ModelSource, smollm: Tokenizer) -> ConversationRenderer:
    renderer = load_renderer(smollm_source.text, smollm)
    assert renderer is not None
    return renderer
