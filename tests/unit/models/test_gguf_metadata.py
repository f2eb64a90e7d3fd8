"""The GGUF reader: what a file says, and files that are broken."""

import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from finback.shared.errors import ConfigError
from finback.shared.models.source import open_source
from support.tiny_folders import save_gguf, tiny_hf_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "Tiny-Test.Q8_0.gguf"
    return save_gguf(tiny_hf_model("llama"), path, "Q8_0")


def test_config_and_text(tiny: Path) -> None:
    source = open_source(tiny)
    assert source.kind == "gguf"
    assert source.name == "Tiny-Test"
    assert (source.dense.hidden_size, source.dense.num_kv_heads) == (64, 2)
    assert source.dense.tie_word_embeddings is False
    vocabulary = source.text.gguf
    assert vocabulary is not None
    assert vocabulary.read_tokens()[:2] == ["t0", "t1"]
    assert vocabulary.read_merges() == ["t 1"]
    assert vocabulary.read_token_types().tolist() == [1] * 96
    assert (source.text.eos_ids, source.text.vocab_size) == ((2,), 96)


def test_digest_depends_on_the_weights(tiny: Path, tmp_path: Path) -> None:
    data = bytearray(tiny.read_bytes())
    data[-5] ^= 1
    other = tmp_path / tiny.name
    other.write_bytes(data)
    assert open_source(other).digest != open_source(tiny).digest


def test_every_truncation_is_a_config_error(tiny: Path, tmp_path: Path) -> None:
    data = tiny.read_bytes()
    path = tmp_path / "cut.gguf"
    for size in [*range(64), *range(64, len(data), 997), len(data) - 1]:
        path.write_bytes(data[:size])
        with pytest.raises(ConfigError) as caught:
            open_source(path)
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)


def test_flipped_header_bytes_never_crash(tiny: Path, tmp_path: Path) -> None:
    data = tiny.read_bytes()
    path = tmp_path / "flipped.gguf"
    for position in range(0, 2500, 7):
        broken = bytearray(data)
        broken[position] ^= 0xFF
        path.write_bytes(broken)
        try:
            open_source(path)
        except ConfigError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty"),
        (b"PK\x03\x04 something", "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "version 9"),
    ],
)
def test_other_files(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        open_source(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such model"):
        open_source(tmp_path / "nothing.gguf")


def test_unsupported_architecture_and_type(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(tiny.read_bytes().replace(b"llama", b"mamba"))
    with pytest.raises(ConfigError, match="'mamba' is not supported; use one of llama, qwen3"):
        open_source(path)


def test_embedded_metadata_is_cheap_and_torch_free() -> None:
    program = (
        "import sys, time\n"
        "from finback.shared.models.source import open_source\n"
        "start = time.process_time()\n"
        "source = open_source('embedded')\n"
        "assert time.process_time() - start < 0.3\n"
        "assert source.name == 'SmolLM2-135M-Instruct', source.name\n"
        "assert not {'torch', 'gguf', 'llm', 'numba'} & set(sys.modules)\n"
    )
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", program], check=True)
    assert time.monotonic() - start < 30
