"""`finback models inspect` over folders of every family, whole and broken."""

import json
from pathlib import Path
from typing import Any

import pytest

from finback.services.supervisor.cli_inspect import inspect, size
from finback.services.supervisor.fitting import Place, fit_one, parse_devices, ways
from finback.shared.models.inspection import Kept
from support import v4_tiny
from support.windowed import windowed_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = v4_tiny.tiny_model()
    return v4_tiny.write_folder(
        tmp_path_factory.mktemp("inspect") / "v4",
        v4_tiny.published_tensors(model),
        v4_tiny.published_config(model.config),
    )


def told(model: Path | str, capsys: pytest.CaptureFixture[str], code: int = 0) -> dict[str, Any]:
    assert inspect(str(model), as_json=True) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_embedded_model(capsys: pytest.CaptureFixture[str]) -> None:
    found = told("embedded", capsys)
    assert found["architecture"] == "llama"
    assert found["layers"] == {"whole context": 30}
    assert found["kept"]["f16"]["kv_bytes_per_token"] == 2 * 2 * 30 * 3 * 64
    assert found["has_tokenizer"]
    assert found["is_servable"]
    assert inspect("embedded", as_json=False) == 0
    assert "SmolLM2" in capsys.readouterr().out


def test_a_v4_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(folder, capsys)
    assert found["layers"] == {
        "window": 1,
        "compressed by 4": 2,
        "compressed by 128": 1,
        "experts by hash": 1,
        "experts by score": 3,
    }
    # Per token: two layers with an entry and an index key a fourth of them, one with a 128th.
    kept = found["kept"]["f32"]["kv_bytes_per_token"]
    assert 4 * (2 * (32 + 32) / 4 + 32 / 128) <= kept <= 4 * (2 * (32 + 32) / 4 + 2)
    assert found["kept"]["f32"]["state_bytes"] < found["kept"]["f32"]["slot_bytes"]
    assert "no tokenizer: prompts and answers are token ids" in found["notes"]
    weights = sum(
        tensor.numel() for tensor in v4_tiny.published_tensors(v4_tiny.tiny_model()).values()
    )
    assert found["num_weights"] == weights


def test_a_windowed_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(windowed_folder(tmp_path / "w"), capsys)
    assert found["layers"] == {"whole context": 1, "window": 3}


def test_what_is_missing_is_told(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = v4_tiny.tiny_model()
    tensors = v4_tiny.published_tensors(model)
    del tensors["layers.2.attn.compressor.ape"]
    raw = v4_tiny.published_config(model.config)
    found = told(v4_tiny.write_folder(tmp_path / "v4", tensors, raw), capsys, code=1)
    assert not found["is_servable"]
    assert "layers.2.attn.compressor.ape" in found["problems"][0]
    found = told(tmp_path / "nothing", capsys, code=1)
    assert "no such model" in found["problems"][0]


def test_what_fits_is_arithmetic() -> None:
    place = Place(name="host memory", free_bytes=1000)
    kept = Kept(kv_bytes_per_token=2.0, state_bytes=5, slot_bytes=10)
    fit = fit_one(place, "f32", 450, "bf16", kept, 20)
    assert (fit.kv_tokens, fit.num_sequences) == ((950 - 450 - 10) // 2, (950 - 450) // 50)
    fit = fit_one(place, "f32", 2000, "bf16", kept, 20)
    assert (fit.kv_tokens, fit.num_sequences) == (0, 0)
    assert ways({"f32": 1, "bf16": 1, "stored": 1}, place) == ["f32", "bf16", "stored"]
    assert ways({"auto": 1, "bf16": 1}, place) == ["auto"]
    devices = parse_devices("NVIDIA H200, 142000\nodd line\n")
    assert devices == [Place(name="NVIDIA H200 0", free_bytes=142000 << 20, is_device=True)]
    assert [size(n) for n in (512, 2048, 3 << 30)] == ["512 B", "2.0 KiB", "3.0 GiB"]
