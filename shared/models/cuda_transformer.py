"""The network on an NVIDIA device: few fused kernels a layer; a decoding step can be recorded.

With one row a layer is 5 kernels (norm + qkv; norms, rotation, storing and attention; output +
residual; norm + gate, up + activation; down + residual). With more the products are the vendor
library's, with the rest fused between them. The residual stream is float32, all else bfloat16.
"""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from finback.kernels.add_rms_norm.cuda_triton import add_rms_norm
from finback.kernels.decode_attention import (
    DecodeWorkspace,
    SharedPrefixes,
    new_shared,
    new_workspace,
    num_members,
)
from finback.kernels.decode_attention.cuda_triton import decode_attention, launch_shape
from finback.kernels.dispatch import KernelSet
from finback.kernels.embedding.cuda_triton import embedding
from finback.kernels.paged_attention.cuda_triton import paged_attention
from finback.kernels.rotary_store_kv.cuda_triton import rotary_store_kv
from finback.kernels.silu_mul.cuda_triton import silu_mul
from finback.kernels.skinny_linear.cuda_triton import skinny_linear
from finback.shared.models.batch import ForwardBatch
from finback.shared.models.config import ModelConfig
from finback.shared.models.kv_pool import KVPool
from finback.shared.models.transformer import Layer, Transformer
from finback.shared.models.weights import WeightReader

_DTYPE = torch.bfloat16
_MIN_WHOLE_ROWS = 2048
# With 2 to 16 rows the fused products lose to the vendor's on an H200 (docs/LOG.md), so far.
_MAX_FUSED_ROWS = 1

Attend = Callable[[int, Layer, torch.Tensor, torch.Tensor], None]
"""(layer's index, layer, qkv [T, ...], out [T, heads * head_dim])."""


def _are_whole_prompts(batch: ForwardBatch) -> bool:
    """Are all sequences equally long prompts from their first token on, worth a gather?"""
    is_whole = batch.max_q == batch.max_context
    return is_whole and batch.num_rows == batch.num_seqs * batch.max_q >= _MIN_WHOLE_ROWS


def unsupported(config: ModelConfig) -> str | None:
    """Why these kernels cannot run a model, or None; the plain network runs it then."""
    if config.attention_bias or config.output_bias or config.mlp_bias:
        return "the fused kernels take no biases"
    if config.head_dim & (config.head_dim - 1):
        return f"the attention kernels want a power of two as head_dim, not {config.head_dim}"
    return None


class CudaTransformer(Transformer):
    """A `CausalLM`; weights are loaded as the plain network's."""

    # Recorded steps have no place to wait, and nothing copies on a stream of its own yet.
    waits_for_layers: ClassVar[bool] = False

    def __init__(
        self,
        config: ModelConfig,
        reader: WeightReader,
        kernels: KernelSet,
        *,
        device: str = "cuda",
        mode: str = "fast",
    ) -> None:
        super().__init__(config, reader, kernels, device=device, mode=mode, dtype=_DTYPE)
        self.default_kv_dtype = "bf16"
        self.numerics = f"cuda-triton-{mode}-bfloat16"
        # Graphs hold the table's address, so it must never grow.
        self._rope.grow(config.max_model_len)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: KVPool) -> torch.Tensor:
        """See `CausalLM`."""
        if batch.max_q == 1 and batch.num_rows == batch.num_seqs:
            hidden = self.decode(
                batch.token_ids,
                batch.context_lens,
                batch.block_tables,
                kv,
                self.workspace(batch.num_seqs, batch.max_context),
            )
            whole = batch.logit_rows.shape[0] == batch.num_rows
            return hidden if whole else hidden[batch.logit_rows]
        return self._mixed(batch, kv)

    def workspace(self, num_seqs: int, max_context: int) -> DecodeWorkspace:
        """Room for decode attention over so many contexts of up to `max_context` tokens."""
        config = self.config
        return new_workspace(
            num_seqs,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            launch_shape(num_seqs, max_context, config.num_kv_heads, self.device),
            self.device,
        )

    def shared_prefixes(self, num_seqs: int) -> SharedPrefixes | None:
        """Room for prefixes that sequences share; None where sharing would save nothing."""
        config = self.config
        if num_members(config.num_heads, config.num_kv_heads) < 2:
            return None
        return new_shared(
            num_seqs, config.num_heads, config.num_kv_heads, config.head_dim, self.device
        )

    def decode(
        self,
        token_ids: torch.Tensor,
        context_lens: torch.Tensor,
        block_tables: torch.Tensor,
        kv: KVPool,
        workspace: DecodeWorkspace,
        shared: SharedPrefixes | None = None,
    ) -> torch.Tensor:
        """One row a sequence, launches only: normed hidden states, float32 [S, hidden_size].

        Where context_lens is 0 nothing is stored, and the row's result means nothing.
        """
        config = self.config

        def attend(index: int, layer: Layer, qkv: torch.Tensor, out: torch.Tensor) -> None:
            decode_attention(
                qkv, kv.k[index], kv.v[index], q_norm=layer.q_norm, k_norm=layer.k_norm,
                eps=config.rms_norm_eps, cos=self._rope.cos, sin=self._rope.sin,
                block_tables=block_tables, context_lens=context_lens,
                scale=config.head_dim**-0.5, out=out, workspace=workspace, shared=shared,
            )  # fmt: skip

        return self._layers_over(token_ids, attend, None)

    def _mixed(self, batch: ForwardBatch, kv: KVPool) -> torch.Tensor:
        """Any rows: prompt chunks, drafts to verify, single tokens."""
        config = self.config
        q = self._empty(batch.num_rows, config.q_size)
        blocks = None
        if _are_whole_prompts(batch):
            blocks = batch.block_tables[:, : -(-batch.max_q // kv.block_size)].long()

        def attend(index: int, layer: Layer, qkv: torch.Tensor, out: torch.Tensor) -> None:
            rotary_store_kv(
                qkv, kv.k[index], kv.v[index], q_norm=layer.q_norm, k_norm=layer.k_norm,
                eps=config.rms_norm_eps, cos=self._rope.cos, sin=self._rope.sin,
                positions=batch.positions, slot_mapping=batch.slot_mapping, q_out=q,
            )  # fmt: skip
            heads = (batch.num_rows, config.num_heads, config.head_dim)
            if blocks is not None:
                self._whole_prompts(q, kv, index, blocks, batch, out)
                return
            paged_attention(
                q.view(heads), kv.k[index], kv.v[index], batch.block_tables, batch.cu_seqlens,
                batch.context_lens, config.head_dim**-0.5, out=out.view(heads),
            )  # fmt: skip

        return self._layers_over(batch.token_ids, attend, batch.logit_rows)

    def _whole_prompts(
        self,
        q: torch.Tensor,
        kv: KVPool,
        index: int,
        blocks: torch.Tensor,
        batch: ForwardBatch,
        out: torch.Tensor,
    ) -> None:
        """Attention of equally long prompts with nothing before them: cuDNN's, over gathered KV."""
        config, num_seqs, length = self.config, batch.num_seqs, batch.max_q

        def heads(x: torch.Tensor) -> torch.Tensor:
            return x.view(num_seqs, -1, *x.shape[-2:])[:, :length].transpose(1, 2)

        shape = (batch.num_rows, config.num_heads, config.head_dim)
        with sdpa_kernel(
            [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True
        ):
            found = torch.nn.functional.scaled_dot_product_attention(
                heads(q.view(shape)),
                heads(kv.k[index][blocks]),
                heads(kv.v[index][blocks]),
                is_causal=True,
                enable_gqa=True,
            )
        out.view(num_seqs, length, -1).copy_(found.transpose(1, 2).flatten(2))

    def _layers_over(
        self, token_ids: torch.Tensor, attend: Attend, kept: torch.Tensor | None
    ) -> torch.Tensor:
        """Embedding, all layers and the last norm; `kept`: rows that are wanted (None = all)."""
        x = torch.empty(
            (token_ids.shape[0], self.config.hidden_size), dtype=torch.float32, device=self.device
        )
        embedding(token_ids, self._embedding, out=x)
        added = None
        if x.shape[0] <= _MAX_FUSED_ROWS:
            self._few_rows(x, attend)
        else:
            added = self._rows(x, attend)
        if kept is not None:
            x, added = x[kept], None if added is None else added[kept]
        hidden = torch.empty_like(x)
        return add_rms_norm(x, added, self._final_norm, self.config.rms_norm_eps, hidden)

    def _few_rows(self, x: torch.Tensor, attend: Attend) -> None:
        """Layers by fused skinny products; x is updated in place."""
        config, num_rows = self.config, x.shape[0]
        qkv = self._empty(num_rows, config.q_size + 2 * config.kv_size)
        mixed = self._empty(num_rows, config.q_size)
        inner = self._empty(num_rows, config.intermediate_size)
        eps = config.rms_norm_eps
        for index, layer in enumerate(self._layers):
            skinny_linear(x, layer.qkv.weight, out=qkv, norm_weight=layer.attn_norm, eps=eps)
            attend(index, layer, qkv, mixed)
            skinny_linear(mixed, layer.o.weight, out=x, residual=x)
            skinny_linear(
                x, layer.gate_up.weight, out=inner, norm_weight=layer.mlp_norm, eps=eps,
                activation="silu_mul",
            )  # fmt: skip
            skinny_linear(inner, layer.down.weight, out=x, residual=x)

    def _rows(self, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Layers by the vendor's products; returns what is still to be added to x."""
        config, num_rows, eps = self.config, x.shape[0], self.config.rms_norm_eps
        normed = self._empty(num_rows, config.hidden_size)
        qkv = self._empty(num_rows, config.q_size + 2 * config.kv_size)
        mixed = self._empty(num_rows, config.q_size)
        gate_up = self._empty(num_rows, 2 * config.intermediate_size)
        inner = self._empty(num_rows, config.intermediate_size)
        added = self._empty(num_rows, config.hidden_size)
        for index, layer in enumerate(self._layers):
            add_rms_norm(x, added if index else None, layer.attn_norm, eps, normed)
            torch.mm(normed, layer.qkv.weight.t(), out=qkv)
            attend(index, layer, qkv, mixed)
            torch.mm(mixed, layer.o.weight.t(), out=added)
            add_rms_norm(x, added, layer.mlp_norm, eps, normed)
            torch.mm(normed, layer.gate_up.weight.t(), out=gate_up)
            silu_mul(gate_up, out=inner)
            torch.mm(inner, layer.down.weight.t(), out=added)
        return added

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=_DTYPE, device=self.device)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `CausalLM`."""
        shape = (hidden.shape[0], self.config.vocab_size)
        out = torch.empty(shape, dtype=torch.float32, device=self.device)
        self.logits_into(hidden, out)
        return out

    def logits_into(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """float32 [R, vocab_size] logits into `out`, launches only."""
        if hidden.shape[0] > _MAX_FUSED_ROWS:
            torch.mm(hidden.to(_DTYPE), self._head.t(), out_dtype=torch.float32, out=out)
        elif hidden.shape[0]:
            skinny_linear(hidden, self._head, out=out)
