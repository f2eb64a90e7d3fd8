"""What a model's files say about it, without reading a weight. Torch-free."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from finback.shared.errors import ConfigError
from finback.shared.kv.layout import ITEM_BYTES
from finback.shared.models.config import ModelConfig
from finback.shared.models.coverage import coverage_problems
from finback.shared.models.deepseek_v4.config import CSA_RATIO, HCA_RATIO, V4Config
from finback.shared.models.deepseek_v4.inventory import take_inventory
from finback.shared.models.held_weights import Tensor, dense_held_bytes, v4_held_bytes
from finback.shared.models.kept_state import kept_state
from finback.shared.models.safetensors_header import headers_of
from finback.shared.models.source import ModelSource
from finback.shared.models.weight_names import HEAD, ROPE_FACTORS, gguf_name, hf_name, shapes

_KINDS: Final = {0: "window", CSA_RATIO: "compressed by 4", HCA_RATIO: "compressed by 128"}
_DENSE_TYPES: Final = ("F32", "F16", "BF16")
# Refused drafts that a state slot has room for, as an engine's default, and the token behind them.
ROLLBACK_TOKENS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What running takes with one `kv_dtype`: `state_bytes` a snapshot, `slot_bytes` a running sequence."""

    kv_bytes_per_token: float
    state_bytes: int
    slot_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """`formats`: bytes by stored type, `held`: bytes by `weights_dtype`, both of the model proper.

    `problems`: why it cannot be served. `notes`: what is odd and does no harm.
    """

    name: str
    path: str
    kind: str
    architecture: str
    layers: Mapping[str, int]
    vocab_size: int
    max_model_len: int
    num_weights: int
    formats: Mapping[str, int]
    held: Mapping[str, int]
    draft_stages: Mapping[str, int]
    draft_kind: str
    block_tokens: int
    kept: Mapping[str, Kept]
    has_tokenizer: bool
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """What the two families tell in their own ways."""

    num_weights: int
    formats: Mapping[str, int]
    held: Mapping[str, int]
    problems: tuple[str, ...]
    notes: tuple[str, ...] = ()
    draft_stages: Mapping[str, int] = field(default_factory=dict)


def inspect_source(source: ModelSource) -> Inspection:
    """Raises `ConfigError` for files that cannot be read at all."""
    config = source.config
    weights = _v4(source.path, config) if isinstance(config, V4Config) else _dense(source, config)
    return Inspection(
        name=source.name,
        path=str(source.path),
        kind=source.kind,
        architecture=config.architecture,
        layers=_layers(config),
        vocab_size=config.vocab_size,
        max_model_len=config.max_model_len,
        num_weights=weights.num_weights,
        formats=dict(sorted(weights.formats.items(), key=lambda item: -item[1])),
        held=weights.held,
        draft_stages=weights.draft_stages,
        draft_kind=_draft_kind(config),
        block_tokens=config.block_tokens(0),
        kept={dtype: _kept(config, dtype) for dtype in ITEM_BYTES},
        has_tokenizer=source.text.has_tokenizer,
        problems=(*weights.problems, *_text_problems(source)),
        notes=(*weights.notes, *_text_notes(source)),
    )


def _layers(config: ModelConfig | V4Config) -> dict[str, int]:
    if isinstance(config, V4Config):
        found = {name: len(config.layers_of(ratio)) for ratio, name in _KINDS.items()}
        hashed = config.num_hash_layers
        found |= {"experts by hash": hashed, "experts by score": config.num_layers - hashed}
    else:
        found = {"whole context": config.num_kv_layers, "window": len(config.window_layers)}
    return {name: count for name, count in found.items() if count}


def _draft_kind(config: ModelConfig | V4Config) -> str:
    if not isinstance(config, V4Config) or not config.num_draft_stages:
        return ""
    return "DSpark" if config.is_dspark else "MTP"


def _kept(config: ModelConfig | V4Config, kv_dtype: str) -> Kept:
    geometry = config.kv_geometry(config.block_tokens(0), kv_dtype)
    state = kept_state(config, kv_dtype)
    return Kept(
        kv_bytes_per_token=geometry.block_bytes / geometry.block_size,
        state_bytes=0 if state is None else state.payload_bytes,
        slot_bytes=0 if state is None else state.slot_bytes(ROLLBACK_TOKENS),
    )


def _v4(folder: Path, config: V4Config) -> _Weights:
    inventory = take_inventory(folder, config)
    stages, notes = inventory.draft_stages, []
    if len(stages) != config.num_draft_stages:
        notes.append(
            f"config.json tells of {config.num_draft_stages} draft stages, the files hold {len(stages)}"
        )
    if stages:
        notes.append("the draft stages are recognised and not used")
    if not config.expert_dtype and "I8" in inventory.formats():
        notes.append("config.json has no expert_dtype; the tensors say fp4")
    return _Weights(
        num_weights=sum(inventory.num_elements()),
        formats=inventory.formats(),
        held=v4_held_bytes(inventory),
        problems=inventory.problems,
        notes=tuple(notes),
        draft_stages=stages,
    )


def _dense(source: ModelSource, config: ModelConfig) -> _Weights:
    tensors, sizes = _dense_tensors(source)
    name_of = gguf_name if source.gguf is not None else hf_name
    wanted = {name_of(name): shape for name, shape in shapes(config).items()}
    spare = [name_of(ROPE_FACTORS)] if source.gguf is not None else []
    if source.gguf is None:
        spare += [name for name in tensors if name.endswith("rotary_emb.inv_freq")]
        spare += [hf_name(HEAD)] if config.tie_word_embeddings else []
    found = {name: shape for name, (_, shape) in tensors.items()}
    problems = list(coverage_problems(wanted, found, spare))
    odd = (
        []
        if source.gguf is not None
        else [n for n, t in tensors.items() if t[0] not in _DENSE_TYPES]
    )
    if odd:
        problems.append(f"tensor {odd[0]} has the unsupported type {tensors[odd[0]][0]}")
    used = {name: tensor for name, tensor in tensors.items() if name in wanted}
    formats: dict[str, int] = {}
    for name, (kind, _) in tensors.items():
        formats[kind] = formats.get(kind, 0) + sizes[name]
    return _Weights(
        num_weights=sum(math.prod(shape) for _, shape in used.values()),
        formats=formats,
        held=dense_held_bytes(config, used),
        problems=tuple(f"{source.path}: {problem}" for problem in problems),
    )


def _dense_tensors(source: ModelSource) -> tuple[dict[str, Tensor], dict[str, int]]:
    """(type and shape by name, bytes by name)."""
    if source.gguf is not None:
        infos = source.gguf.tensors
        kinds = {name: (info.type_name, info.shape) for name, info in infos.items()}
        return kinds, {name: info.num_bytes for name, info in infos.items()}
    stored = dict(headers_of(source.path))
    kinds = {name: (found.dtype, found.shape) for name, found in stored.items()}
    return kinds, {name: found.num_bytes for name, found in stored.items()}


def _text_problems(source: ModelSource) -> tuple[str, ...]:
    """The tokenizer is read, but not built: that takes a second for a large vocabulary."""
    if source.text.hf is None or not source.text.has_tokenizer:
        return ()
    try:
        source.text.hf.read_tokenizer_json()
    except ConfigError as error:
        return (str(error),)
    return ()


def _text_notes(source: ModelSource) -> tuple[str, ...]:
    if not source.text.has_tokenizer:
        return ("no tokenizer: prompts and answers are token ids",)
    if source.text.chat_template is None and not isinstance(source.config, V4Config):
        return ("no chat template: completions only",)
    return ()
