"""Writes tensors in the published number formats, for tests of the reader."""

from typing import Final

import torch

_E2M1: Final = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_FP8: Final = (
    "attn.wq_a",
    "attn.wq_b",
    "attn.wkv",
    "attn.wo_a",
    "attn.wo_b",
    "attn.indexer.wq_b",
    "ffn.shared_experts.w1",
    "ffn.shared_experts.w2",
    "ffn.shared_experts.w3",
)


def quantised(
    tensors: dict[str, torch.Tensor], *, fp8_experts: bool = False
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(what a file holds, what a reader must recover as float32) of published tensors."""
    stored: dict[str, torch.Tensor] = {}
    recovered: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        is_expert = ".ffn.experts." in name
        if is_expert and not fp8_experts:
            stored[name], stored[f"{stem}.scale"], recovered[name] = fp4(tensor)
        elif is_expert or stem.split(".", 2)[-1] in _FP8:
            stored[name], stored[f"{stem}.scale"], recovered[name] = fp8(tensor)
        elif "hc_" in name or name.endswith(("attn_sink", "ape", "gate.bias", "tid2eid")):
            stored[name] = recovered[name] = tensor
        else:
            stored[name] = tensor.bfloat16()
            recovered[name] = stored[name].float()
    return stored, recovered


def fp8(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(e4m3, e8m0 [ceil / 128, ceil / 128], float32), block by block."""
    rows, columns = tensor.shape
    codes = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn)
    scale = torch.empty((-(-rows // 128), -(-columns // 128)))
    values = torch.empty(tensor.shape)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            scale[i, j] = _power_of_two(tensor[part].abs().max() / 448.0)
            codes[part] = (tensor[part] / scale[i, j]).to(torch.float8_e4m3fn)
            values[part] = codes[part].float() * scale[i, j]
    return codes, scale.to(torch.float8_e8m0fnu), values


def fp4(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(int8 pairs, the even column low; e8m0 [rows, columns / 32]; float32)."""
    rows, columns = tensor.shape
    groups = tensor.view(rows, columns // 32, 32)
    scale = _power_of_two(groups.abs().amax(dim=-1) / 6.0)
    scaled = (groups / scale[..., None]).view(rows, columns)
    magnitude = (scaled.abs()[..., None] - _E2M1).abs().argmin(dim=-1)
    sign = torch.where(scaled < 0, -1.0, 1.0)
    values = (_E2M1[magnitude] * sign).view(groups.shape) * scale[..., None]
    code = magnitude + 8 * (scaled < 0)
    packed = (code[:, 0::2] | (code[:, 1::2] << 4)).to(torch.uint8).view(torch.int8)
    return packed, scale.to(torch.float8_e8m0fnu), values.reshape(rows, columns)


def _power_of_two(value: torch.Tensor) -> torch.Tensor:
    return torch.exp2(torch.ceil(torch.log2(value.clamp(min=2.0**-120))))
