"""Which network a source becomes, and starts that must not happen."""

from pathlib import Path
from typing import Any

import pytest

from finback.kernels import dispatch
from finback.shared.errors import BackendUnavailable, ConfigError
from finback.shared.models.cpu_stack import CpuStack
from finback.shared.models.loader import load_model
from finback.shared.models.source import ModelSource, open_source
from finback.shared.models.transformer import Transformer
from support.forward_batches import Chunk, flat_batch
from support.tiny_folders import save_hf, tiny_hf_model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return open_source(save_hf(tiny_hf_model("llama"), tmp_path_factory.mktemp("tiny")))


@pytest.mark.parametrize(
    ("mode", "backend", "kind"),
    [
        ("fast", "auto", CpuStack),
        ("deterministic", "auto", CpuStack),
        ("reference", "auto", Transformer),
        ("fast", "reference", Transformer),
    ],
)
def test_network_by_mode_and_backend(
    mode: Any, backend: str, kind: type, source: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(dispatch.ENVIRONMENT, backend)
    model = load_model(source, mode=mode, num_threads=2)
    assert type(model) is kind
    assert model.weights_bytes > 0
    model.close()


@pytest.mark.parametrize("backend", ["nonsense", "cuda", "sample_tokens=cuda", "linear=cpu"])
def test_impossible_backends_stop_the_start(
    backend: str, source: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(dispatch.ENVIRONMENT, backend)
    with pytest.raises(BackendUnavailable) as caught:
        load_model(source)
    assert "\n" not in str(caught.value)
    assert dispatch.ENVIRONMENT in str(caught.value)


def test_other_settings_that_cannot_be(source: ModelSource) -> None:
    with pytest.raises(ConfigError, match="weights_dtype is 'int3'"):
        load_model(source, weights_dtype="int3")
    model = load_model(source, num_threads=1)
    with pytest.raises(ConfigError, match="block_size is 5"):
        model.new_pool(4, 5)
    model.close()


def test_foreign_token_ids_are_refused(source: ModelSource) -> None:
    model = load_model(source, num_threads=1)
    pool = model.new_pool(4, 32)
    for token_id in (-1, 96):
        with pytest.raises(ValueError, match="within 0 to 95"):
            model.forward(flat_batch([Chunk(token_ids=[token_id])], 32), pool)
    model.close()


def test_close_ends_the_helper_threads(source: ModelSource) -> None:
    import threading

    before = threading.active_count()
    model = load_model(source, num_threads=4)
    assert threading.active_count() == before + 3
    model.close()
    model.close()
    assert threading.active_count() == before


def test_missing_embedded_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from finback.shared.models import source as module

    monkeypatch.setattr(module, "_EMBEDDED_PACKAGE", "no_such_package_here")
    with pytest.raises(ConfigError, match="the embedded model is not installed; run `make setup`"):
        open_source("embedded")
