"""Routing in Triton: one program a row takes the best expert `top_k` times."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# (a Triton kernel's arguments have no Python types, and its decorator has none at all)

import torch
import triton
import triton.language as tl


@triton.jit
def _route(
    logits_ptr, bias_ptr, given_ptr, experts_ptr, weights_ptr, num_experts, scaling,
    TOP_K: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
    IS_GIVEN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < num_experts
    logits = tl.load(logits_ptr + row * num_experts + at, mask=inside, other=0.0)
    scores = tl.maximum(logits, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(logits)))
    scores = tl.sqrt(scores)
    ranked = scores
    if HAS_BIAS:
        ranked += tl.load(bias_ptr + at, mask=inside, other=0.0)
    ranked = tl.where(inside, ranked, float("-inf"))
    slots = tl.arange(0, PADDED)
    chosen = tl.zeros([PADDED], dtype=tl.float32)
    for slot in tl.static_range(TOP_K):
        if IS_GIVEN:
            expert = tl.load(given_ptr + row * TOP_K + slot)
        else:
            expert = tl.argmax(ranked, axis=0).to(tl.int64)
            ranked = tl.where(at == expert, float("-inf"), ranked)
        score = tl.sum(tl.where(at == expert, scores, 0.0), axis=0)
        chosen = tl.where(slots == slot, score, chosen)
        tl.store(experts_ptr + row * TOP_K + slot, expert)
    weights = chosen / tl.sum(chosen, axis=0) * scaling
    tl.store(weights_ptr + row * TOP_K + slots, weights, mask=slots < TOP_K)


def route_experts(
    logits: torch.Tensor,
    *,
    top_k: int,
    scaling: float,
    bias: torch.Tensor | None = None,
    experts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See reference.py; logits are contiguous float32."""
    num_rows, num_experts = logits.shape
    found = torch.empty((num_rows, top_k), dtype=torch.int64, device=logits.device)
    weights = torch.empty((num_rows, top_k), dtype=torch.float32, device=logits.device)
    if num_rows:
        _route[(num_rows,)](
            logits, logits if bias is None else bias, found if experts is None else experts,
            found, weights, num_experts, scaling, TOP_K=top_k,
            PADDED=triton.next_power_of_2(top_k), BLOCK=triton.next_power_of_2(num_experts),
            HAS_BIAS=bias is not None, IS_GIVEN=experts is not None, num_warps=2,
        )  # fmt: skip
    return found, weights
