"""The shape of a DeepSeek V4 model, read from config.json. Torch-free.

Two spellings are known: that of the published checkpoints (`compress_ratios`, `rope_scaling`) and
that of transformers (`layer_types`, nested `rope_parameters`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from finback.shared.errors import ConfigError
from finback.shared.kv.layout import BlockGeometry

MODEL_TYPE: Final = "deepseek_v4"
CSA_RATIO: Final = 4
HCA_RATIO: Final = 128
# The smallest number of tokens after which no compressor has a half-filled window.
BLOCK_TOKENS: Final = math.lcm(CSA_RATIO, HCA_RATIO)
_RATIOS: Final = {
    "sliding_attention": 0,
    "compressed_sparse_attention": CSA_RATIO,
    "heavily_compressed_attention": HCA_RATIO,
}
_DSPARK_MARK: Final = "dspark_block_size"


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """YaRN scaling of the compressed layers' rotation; there is no attention factor."""

    factor: float
    original_max_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class V4Config:
    """Sizes in elements. `ratios[i]`: tokens an entry of layer i covers, 0 for a window-only layer.

    `num_draft_stages` and `is_dspark` say what draft layers the files hold besides: one MTP layer,
    or DSpark stages. `expert_dtype` is what the config claims, empty if it says nothing: the tensors
    decide.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    rope_dim: int
    q_rank: int
    num_output_groups: int
    output_rank: int
    window: int
    ratios: tuple[int, ...]
    index_num_heads: int
    index_head_dim: int
    index_top_k: int
    num_experts: int
    num_shared_experts: int
    num_experts_per_token: int
    expert_size: int
    num_hash_layers: int
    routed_scaling: float
    swiglu_limit: float
    num_streams: int
    sinkhorn_iterations: int
    hyper_eps: float
    norm_eps: float
    rope_theta: float
    compress_rope_theta: float
    yarn: Yarn | None
    max_model_len: int
    num_draft_stages: int = 0
    is_dspark: bool = False
    expert_dtype: str = ""

    def describe(self) -> str:
        """A stable text of all that decides the numbers, for the salt of KV blocks."""
        return repr(sorted(asdict(self).items()))

    @property
    def architecture(self) -> str:
        """The family's name."""
        return MODEL_TYPE

    def block_tokens(self, asked: int) -> int:
        """See `ModelFacts`: an entry of an HCA layer is of 128 tokens, and a block holds whole ones."""
        if asked not in (0, BLOCK_TOKENS):
            raise ConfigError(
                f"block_size is {asked}; a {MODEL_TYPE} model has blocks of {BLOCK_TOKENS} tokens"
            )
        return BLOCK_TOKENS

    @property
    def block_elements(self) -> int:
        """Elements of a block's entries and index keys, all layers together."""
        total = 0
        for ratio in filter(None, self.ratios):
            width = self.head_dim + (self.index_head_dim if ratio == CSA_RATIO else 0)
            total += BLOCK_TOKENS // ratio * width
        return total

    def kv_geometry(self, block_size: int, kv_dtype: str) -> BlockGeometry:
        """See `ModelFacts`. Entries do not divide by tokens: a block is so many bytes a token as hold
        them all, so that the first tokens' bytes always hold the entries of those tokens.
        """
        return BlockGeometry(
            block_size=block_size,
            num_layers=1,
            num_kv_heads=1,
            head_dim=max(1, -(-self.block_elements // (2 * BLOCK_TOKENS))),
            kv_dtype=kv_dtype,
        )

    def layers_of(self, ratio: int) -> tuple[int, ...]:
        """The layers of one kind."""
        return tuple(index for index, own in enumerate(self.ratios) if own == ratio)


def read_config(path: Path, raw: Mapping[str, Any]) -> V4Config:
    """`V4Config` of a parsed config.json; `ConfigError` names the field that is missing or odd."""
    read = _Reader(path, raw)
    num_layers = read.integer("num_hidden_layers")
    stages, is_dspark = _draft_stages(raw)
    theta, compress_theta, yarn = _rope(read)
    _check_fixed(read)
    return V4Config(
        vocab_size=read.integer("vocab_size"),
        hidden_size=read.integer("hidden_size"),
        num_layers=num_layers,
        num_heads=read.integer("num_attention_heads"),
        head_dim=read.integer("head_dim"),
        rope_dim=read.integer("qk_rope_head_dim"),
        q_rank=read.integer("q_lora_rank"),
        num_output_groups=read.integer("o_groups"),
        output_rank=read.integer("o_lora_rank"),
        window=read.integer("sliding_window"),
        ratios=_ratios(read, num_layers),
        index_num_heads=read.integer("index_n_heads"),
        index_head_dim=read.integer("index_head_dim"),
        index_top_k=read.integer("index_topk"),
        num_experts=read.integer("n_routed_experts"),
        num_shared_experts=read.integer("n_shared_experts"),
        num_experts_per_token=read.integer("num_experts_per_tok"),
        expert_size=read.integer("moe_intermediate_size"),
        num_hash_layers=_num_hash_layers(read),
        routed_scaling=read.number("routed_scaling_factor"),
        swiglu_limit=read.number("swiglu_limit"),
        num_streams=read.integer("hc_mult"),
        sinkhorn_iterations=read.integer("hc_sinkhorn_iters"),
        hyper_eps=read.number("hc_eps"),
        norm_eps=read.number("rms_norm_eps"),
        rope_theta=theta,
        compress_rope_theta=compress_theta,
        yarn=yarn,
        max_model_len=read.integer("max_position_embeddings"),
        num_draft_stages=stages,
        is_dspark=is_dspark,
        expert_dtype=str(raw.get("expert_dtype") or ""),
    )


class _Reader:
    """Fields of one file, checked as they are read."""

    def __init__(self, path: Path, raw: Mapping[str, Any]) -> None:
        self.path = path
        self.raw = raw

    def integer(self, name: str) -> int:
        value = self.raw.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{self.path}: {name} must be a positive integer, not {value!r}")
        return value

    def number(self, name: str) -> float:
        value = self.raw.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ConfigError(f"{self.path}: {name} must be a positive number, not {value!r}")
        return float(value)


def _draft_stages(raw: Mapping[str, Any]) -> tuple[int, bool]:
    """(stages, are they DSpark's): a DSpark mark wins over the MTP counter, which may lie."""
    if _DSPARK_MARK in raw:
        targets = raw.get("dspark_target_layer_ids") or ()
        return len(targets), True
    return int(raw.get("num_nextn_predict_layers") or 0), False


def _ratios(read: _Reader, num_layers: int) -> tuple[int, ...]:
    """Cut at the layers: the entries behind them are of the draft stages, however many there are."""
    listed = read.raw.get("compress_ratios")
    if listed is None:
        kinds = read.raw.get("layer_types")
        if not isinstance(kinds, Sequence) or not set(kinds) <= set(_RATIOS):
            raise ConfigError(f"{read.path}: neither compress_ratios nor known layer_types")
        listed = [_RATIOS[kind] for kind in kinds]
    if len(listed) < num_layers or not set(listed[:num_layers]) <= set(_RATIOS.values()):
        raise ConfigError(
            f"{read.path}: compress_ratios must have {num_layers} entries or more, each 0, "
            f"{CSA_RATIO} or {HCA_RATIO}, not {listed}"
        )
    return tuple(int(ratio) for ratio in listed[:num_layers])


def _num_hash_layers(read: _Reader) -> int:
    kinds = read.raw.get("mlp_layer_types")
    if "num_hash_layers" not in read.raw and kinds is not None:
        num_hash: int = sum(kind == "hash_moe" for kind in kinds)
        if any(kind == "hash_moe" for kind in kinds[num_hash:]):
            raise ConfigError(f"{read.path}: mlp_layer_types must begin with all of its hash_moe")
        return num_hash
    value = read.raw.get("num_hash_layers", 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{read.path}: num_hash_layers must be a count, not {value!r}")
    return value


def _rope(read: _Reader) -> tuple[float, float, Yarn | None]:
    """(base, base of the compressed layers, their YaRN)."""
    nested = read.raw.get("rope_parameters") or {}
    main, compress = nested.get("main") or {}, nested.get("compress") or {}
    scaling = compress or read.raw.get("rope_scaling") or {}
    theta = float(main.get("rope_theta") or read.number("rope_theta"))
    compress_theta = float(compress.get("rope_theta") or read.number("compress_rope_theta"))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return theta, compress_theta, None
    if kind != "yarn":
        raise ConfigError(f"{read.path}: rope scaling {kind!r} is not supported; only yarn is")
    try:
        yarn = Yarn(
            factor=float(scaling["factor"]),
            original_max_len=int(scaling["original_max_position_embeddings"]),
            beta_fast=float(scaling.get("beta_fast", 32)),
            beta_slow=float(scaling.get("beta_slow", 1)),
        )
    except KeyError as error:
        raise ConfigError(f"{read.path}: the yarn scaling lacks {error.args[0]}") from None
    return theta, compress_theta, yarn


def _check_fixed(read: _Reader) -> None:
    """What every V4 has; another value would be another model."""
    for name, only in (
        ("num_key_value_heads", 1),
        ("scoring_func", "sqrtsoftplus"),
        ("norm_topk_prob", True),
        ("hidden_act", "silu"),
        ("topk_method", "noaux_tc"),
        ("attention_bias", False),
        ("tie_word_embeddings", False),
    ):
        value = read.raw.get(name, only)
        if value != only:
            raise ConfigError(f"{read.path}: {name} is {value!r}; only {only!r} is supported")
