"""From an opened source to a network that runs."""

from functools import partial
from pathlib import Path
from typing import Final, Literal

import torch

from finback.kernels import dispatch
from finback.kernels.unavailable import KernelUnavailable
from finback.shared.errors import BackendUnavailable, ConfigError
from finback.shared.models.causal_lm import CausalLM
from finback.shared.models.deepseek_v4.config import V4Config
from finback.shared.models.hf_weights import HfWeights
from finback.shared.models.source import ModelSource
from finback.shared.models.transformer import Transformer
from finback.shared.models.weights import WeightReader

# Kept in the file's own formats, dequantised where they are used.
_STORED: Final = "stored"
_WEIGHT_DTYPES: Final = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def open_weights(source: ModelSource) -> WeightReader:
    """A reader of the source's tensors; checks that all of them are there and known."""
    if source.gguf is not None:
        from finback.shared.models.gguf_weights import GgufWeights

        return GgufWeights(source.gguf, source.dense)
    return HfWeights(source.path, source.dense)


def load_model(
    source: ModelSource,
    device: str = "cpu",
    mode: Literal["fast", "deterministic", "reference"] = "fast",
    *,
    weights_dtype: str = "auto",
    num_threads: int = 0,
    share_in: Path | None = None,
) -> CausalLM:
    """Load the weights and select the kernels. Raises `ConfigError`, also for a bad file.

    `num_threads`: 0 keeps torch's own choice. `share_in`: a folder where engines of one host share
    the compiled network's weights.
    """
    if num_threads:
        torch.set_num_threads(num_threads)
    if weights_dtype not in ("auto", _STORED, *_WEIGHT_DTYPES):
        raise ConfigError(
            f"weights_dtype is {weights_dtype!r}; use auto, {', '.join(_WEIGHT_DTYPES)}, {_STORED}"
        )
    _check_kernels(device, mode)
    config = source.config
    if isinstance(config, V4Config):
        return _load_v4(source.path, config, device, mode, weights_dtype)
    if weights_dtype == _STORED:
        raise ConfigError(
            f"weights_dtype is {_STORED!r}, which is for deepseek_v4 models; of a "
            f"{config.architecture} model the formats that can be kept are kept by 'auto'"
        )
    reader = open_weights(source)
    if config.window_layers:
        return _load_windowed(source, reader, device, mode, weights_dtype)
    if device == "cpu" and mode != "reference":
        threads = num_threads or torch.get_num_threads()
        found = _load_cpu_stack(source, reader, mode, threads, share_in)
        if found is not None:
            if source.gguf is not None:
                source.gguf.release_pages()  # all weights were repacked
            return found
    kernels = dispatch.select_all(device, mode)
    has_fused = dispatch.select("decode_attention", device, mode).chosen.backend == "cuda"
    if has_fused and weights_dtype in ("auto", "bf16"):
        from finback.shared.models import cuda_transformer  # needs Triton

        if cuda_transformer.unsupported(source.dense) is None:
            return cuda_transformer.CudaTransformer(source.dense, reader, kernels)
    dtype = torch.float32 if weights_dtype == "auto" else _WEIGHT_DTYPES[weights_dtype]
    return Transformer(source.dense, reader, kernels, device=device, mode=mode, dtype=dtype)


def _load_v4(path: Path, config: V4Config, device: str, mode: str, weights_dtype: str) -> CausalLM:
    """DeepSeek V4 in plain torch, over blocks and state slots; it serves every mode."""
    from finback.shared.models.deepseek_v4.model import V4Model  # few models need it

    return V4Model(
        path,
        config,
        device=device,
        mode=mode,
        dtype=_WEIGHT_DTYPES.get(weights_dtype, torch.float32),
        keeps_stored=weights_dtype == _STORED,
    )


def _load_windowed(
    source: ModelSource, reader: WeightReader, device: str, mode: str, weights_dtype: str
) -> CausalLM:
    """The layered network over blocks and state slots; it serves every mode."""
    from finback.shared.models.windowed import WindowedTransformer  # few models need it

    dtype = torch.float32 if weights_dtype == "auto" else _WEIGHT_DTYPES[weights_dtype]
    kernels = dispatch.select_all(device, mode)
    return WindowedTransformer(source.dense, reader, kernels, device=device, mode=mode, dtype=dtype)


def _check_kernels(device: str, mode: str) -> None:
    """Every op must have a kernel here, sampling too: say so before anything is loaded."""
    try:
        dispatch.table(device, mode)
    except KernelUnavailable as error:
        raise BackendUnavailable(str(error)) from None


def _load_cpu_stack(
    source: ModelSource, reader: WeightReader, mode: str, num_threads: int, share_in: Path | None
) -> CausalLM | None:
    """The compiled network, or None where it is not selected or cannot hold this model."""
    if dispatch.select("decoder_stack", "cpu", mode).chosen.backend != "cpu":
        return None
    from finback.shared.models import cpu_stack, cpu_weights, shared_weights  # need numba

    reason = cpu_stack.unsupported(source.dense)
    if reason is None:
        weights = None
        if share_in is not None:
            pack = partial(cpu_weights.load_cpu_weights, source.dense, reader)
            weights = shared_weights.shared_weights(share_in, source.digest, pack)
        return cpu_stack.CpuStack(
            source.dense, reader, mode=mode, num_threads=num_threads, weights=weights
        )
    if mode == "deterministic":
        raise ConfigError(
            f"{source.path}: deterministic mode cannot run this model: {reason}; leave it off"
        )
    return None
