"""A Hugging Face folder as a model source: config.json and the tokenizer files. Torch-free."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from finback.shared.errors import ConfigError
from finback.shared.models.config import ModelConfig, RopeScaling
from finback.shared.models.text_files import HfTokenizerFiles, TextFiles

_MODEL_TYPES: Final = {"llama": "llama", "qwen3": "qwen3"}
_WINDOWED_TYPES: Final = ("qwen3",)
# One of them without tokenizer.json is an incomplete folder, not one without a tokenizer.
_TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
_FULL: Final = "full_attention"
_WINDOW: Final = "sliding_attention"


def read_json(path: Path, *, required: bool) -> dict[str, Any]:
    """A JSON object; an absent optional file is empty."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        if required:
            raise ConfigError(f"{path}: missing; the model folder must hold it") from None
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return value


def read_config(folder: Path) -> ModelConfig:
    """`ModelConfig` from config.json; both layouts of the rope settings are known."""
    path = folder / "config.json"
    raw = read_json(path, required=True)
    model_type = raw.get("model_type")
    if model_type not in _MODEL_TYPES:
        raise ConfigError(
            f"{path}: model_type {model_type!r} is not supported; use one of {', '.join(_MODEL_TYPES)}"
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(
            f"{path}: hidden_act {raw['hidden_act']!r} is not supported; only silu is"
        )
    num_heads = _integer(path, raw, "num_attention_heads")
    hidden_size = _integer(path, raw, "hidden_size")
    theta, scaling = _rope(path, raw)
    default_head_dim = 128 if model_type == "qwen3" else hidden_size // num_heads
    bias = bool(raw.get("attention_bias", False))
    window_layers, sliding_window = _window(path, raw, str(model_type))
    return ModelConfig(
        architecture=_MODEL_TYPES[model_type],
        vocab_size=_integer(path, raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_integer(path, raw, "intermediate_size"),
        num_layers=_integer(path, raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
        head_dim=int(raw.get("head_dim") or default_head_dim),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        max_model_len=int(raw.get("max_position_embeddings", 2048)),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qk_norm=model_type == "qwen3",
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        window_layers=window_layers,
        sliding_window=sliding_window,
    )


def read_text(folder: Path, vocab_size: int) -> TextFiles:
    """The tokenizer files; tokenizer.json is read when asked for."""
    config = read_json(folder / "config.json", required=True)
    tokenizer_config = read_json(folder / "tokenizer_config.json", required=False)
    generation = read_json(folder / "generation_config.json", required=False)

    def read_tokenizer_json() -> str:
        try:
            return (folder / "tokenizer.json").read_text("utf-8")
        except FileNotFoundError:
            raise ConfigError(
                f"{folder}/tokenizer.json: missing; the model folder must hold it"
            ) from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder}/tokenizer.json: cannot be read: {error}") from None

    return TextFiles(
        kind="hf",
        vocab_size=vocab_size,
        bos_id=_first_id(generation.get("bos_token_id", config.get("bos_token_id"))),
        eos_ids=tuple(
            dict.fromkeys(
                [*_ids(config.get("eos_token_id")), *_ids(generation.get("eos_token_id"))]
            )
        ),
        pad_id=_first_id(config.get("pad_token_id")),
        chat_templates=_templates(folder, tokenizer_config),
        hf=HfTokenizerFiles(
            read_tokenizer_json=read_tokenizer_json,
            tokenizer_config=tokenizer_config,
            is_there=any((folder / name).exists() for name in _TOKENIZER_FILES),
        ),
    )


def _templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    listed = tokenizer_config.get("chat_template")
    if isinstance(listed, str):
        found["default"] = listed
    elif isinstance(listed, list):
        found.update({item["name"]: item["template"] for item in listed})
    if (folder / "chat_template.jinja").is_file():
        found["default"] = (folder / "chat_template.jinja").read_text("utf-8")
    return found


def _rope(path: Path, raw: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Old layout: rope_theta + rope_scaling; new layout: all of it in rope_parameters."""
    parameters = raw.get("rope_parameters") or {}
    scaling = parameters or raw.get("rope_scaling") or {}
    theta = float(parameters.get("rope_theta", raw.get("rope_theta", 10_000.0)))
    if scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ConfigError(f"{path}: partial rotation is not supported")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind in ("default", None):
        return theta, None
    if kind not in ("linear", "llama3"):
        raise ConfigError(
            f"{path}: rope type {kind!r} is not supported; use default, linear or llama3"
        )
    try:
        factor = float(scaling["factor"])
        if kind == "linear":
            return theta, RopeScaling(kind=kind, factor=factor)
        return theta, RopeScaling(
            kind=kind,
            factor=factor,
            low_freq_factor=float(scaling["low_freq_factor"]),
            high_freq_factor=float(scaling["high_freq_factor"]),
            original_max_len=int(scaling["original_max_position_embeddings"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: the rope settings lack or misstate {error}") from None


def _window(path: Path, raw: Mapping[str, Any], model_type: str) -> tuple[tuple[int, ...], int]:
    """(layers with a sliding window, its tokens); of older exports all from max_window_layers on."""
    num_layers = _integer(path, raw, "num_hidden_layers")
    is_on = bool(raw.get("use_sliding_window") and raw.get("sliding_window"))
    kinds = list(raw.get("layer_types") or ())
    if not kinds:
        first = int(raw.get("max_window_layers", 28)) if is_on else num_layers
        kinds = [_WINDOW if layer >= first else _FULL for layer in range(num_layers)]
    unknown = sorted(set(kinds) - {_FULL, _WINDOW})
    if unknown or len(kinds) != num_layers:
        what = f"holds {unknown[0]!r}" if unknown else f"has {len(kinds)} entries"
        raise ConfigError(
            f"{path}: layer_types {what}; it must name {num_layers} layers as {_FULL} or {_WINDOW}"
        )
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind == _WINDOW)
    if not layers and not is_on:
        return (), 0
    if model_type not in _WINDOWED_TYPES:
        raise ConfigError(
            f"{path}: sliding-window attention is supported for {', '.join(_WINDOWED_TYPES)}, "
            f"not for {model_type}; use a dense model"
        )
    if not is_on:
        raise ConfigError(
            f"{path}: layer_types names {_WINDOW} layers, but use_sliding_window or sliding_window "
            "is missing"
        )
    if len(layers) == num_layers:
        raise ConfigError(
            f"{path}: all layers have a sliding window; at least one must be {_FULL}, or nothing "
            "of a prompt could be kept in blocks"
        )
    return layers, _integer(path, raw, "sliding_window") if layers else 0


def _integer(path: Path, raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{path}: {key} must be a positive integer, not {value!r}")
    return value


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(item) for item in value] if isinstance(value, list) else [int(value)]


def _first_id(value: Any) -> int | None:
    ids = _ids(value)
    return ids[0] if ids else None
