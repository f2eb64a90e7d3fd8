"""A GGUF file as a model source: its config and its text side. Torch-free."""

from pathlib import Path
from typing import Any

from finback.shared.errors import ConfigError
from finback.shared.models.config import ARCHITECTURES, ModelConfig, RopeScaling
from finback.shared.models.gguf_metadata import ArrayField, GgufHeader
from finback.shared.models.text_files import GgufVocabulary, TextFiles


def read_config(header: GgufHeader) -> ModelConfig:
    """`ModelConfig` from the architecture's own keys."""
    arch = _required(header, "general.architecture", str)
    if arch not in ARCHITECTURES:
        raise ConfigError(
            f"{header.path}: architecture {arch!r} is not supported; "
            f"use one of {', '.join(ARCHITECTURES)}"
        )
    hidden_size = _required(header, f"{arch}.embedding_length", int)
    num_heads = _required(header, f"{arch}.attention.head_count", int)
    head_dim = int(header.fields.get(f"{arch}.attention.key_length", hidden_size // num_heads))
    rope_dim = int(header.fields.get(f"{arch}.rope.dimension_count", head_dim))
    if rope_dim != head_dim:
        raise ConfigError(f"{header.path}: rotation of {rope_dim} of {head_dim} is not supported")
    return ModelConfig(
        architecture=arch,
        vocab_size=_vocab_size(header, arch),
        hidden_size=hidden_size,
        intermediate_size=_required(header, f"{arch}.feed_forward_length", int),
        num_layers=_required(header, f"{arch}.block_count", int),
        num_heads=num_heads,
        num_kv_heads=int(header.fields.get(f"{arch}.attention.head_count_kv", num_heads)),
        head_dim=head_dim,
        rope_theta=float(header.fields.get(f"{arch}.rope.freq_base", 10_000.0)),
        rope_scaling=_rope_scaling(header, arch),
        rms_norm_eps=float(_required(header, f"{arch}.attention.layer_norm_rms_epsilon", float)),
        max_model_len=_required(header, f"{arch}.context_length", int),
        tie_word_embeddings="output.weight" not in header.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in header.tensors,
        attention_bias="blk.0.attn_q.bias" in header.tensors,
        output_bias="blk.0.attn_output.bias" in header.tensors,
    )


def read_text(header: GgufHeader) -> TextFiles:
    """The tokenizer keys; the big arrays are read when asked for."""
    fields = header.fields
    prefix = "tokenizer.ggml."
    templates = (
        {"default": fields["tokenizer.chat_template"]}
        if "tokenizer.chat_template" in fields
        else {}
    )
    for key, value in fields.items():
        if key.startswith("tokenizer.chat_template.") and isinstance(value, str):
            templates[key.removeprefix("tokenizer.chat_template.")] = value
    tokens = fields.get(f"{prefix}tokens")
    if not isinstance(tokens, ArrayField):
        raise ConfigError(f"{header.path}: holds no tokenizer; use a complete GGUF file")
    eos_ids = [fields.get(f"{prefix}{name}_token_id") for name in ("eos", "eot", "eom")]
    return TextFiles(
        kind="gguf",
        vocab_size=tokens.count,
        bos_id=fields.get(f"{prefix}bos_token_id"),
        eos_ids=tuple(dict.fromkeys(int(item) for item in eos_ids if item is not None)),
        pad_id=fields.get(f"{prefix}padding_token_id"),
        chat_templates=templates,
        gguf=GgufVocabulary(
            model=str(fields.get(f"{prefix}model", "")),
            pre=str(fields.get(f"{prefix}pre", "default")),
            add_bos=fields.get(f"{prefix}add_bos_token"),
            read_tokens=lambda: header.strings(f"{prefix}tokens"),
            read_merges=lambda: header.strings(f"{prefix}merges"),
            read_token_types=lambda: header.numbers(f"{prefix}token_type").astype("int32"),
        ),
    )


def default_name(header: GgufHeader) -> str:
    """The file's name without its quantisation: SmolLM2-135M-Instruct.Q4_1.gguf -> SmolLM2-135M-Instruct."""
    stem = Path(header.path).name.removesuffix(".gguf")
    base, dot, quantisation = stem.rpartition(".")
    if dot and quantisation[:1] in "QFBI" and any(c.isdigit() for c in quantisation):
        return base
    return stem


def _vocab_size(header: GgufHeader, arch: str) -> int:
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError(
            f"{header.path}: tensor token_embd.weight is missing; use a complete GGUF file"
        )
    return embedding.shape[0]


def _rope_scaling(header: GgufHeader, arch: str) -> RopeScaling | None:
    kind = header.fields.get(f"{arch}.rope.scaling.type", "none")
    factor = float(header.fields.get(f"{arch}.rope.scaling.factor", 1.0))
    if kind in ("none", "") or factor == 1.0:
        return None
    if kind != "linear":
        raise ConfigError(
            f"{header.path}: rope scaling {kind!r} is not supported; use linear or none"
        )
    return RopeScaling(kind="linear", factor=factor)


def _required(header: GgufHeader, key: str, kind: type) -> Any:
    value = header.fields.get(key)
    if value is None or isinstance(value, ArrayField):
        raise ConfigError(f"{header.path}: its metadata lacks {key}; use a complete GGUF file")
    try:
        return kind(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{header.path}: {key} is {value!r}, not a {kind.__name__}") from None
