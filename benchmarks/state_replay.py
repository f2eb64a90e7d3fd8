"""What replaying fewer tokens than exactness needs does to a sliding-window model's answers.

    python benchmarks/state_replay.py --window 16 --layers 8 --hit 256 --suffix 256

A network with drawn weights, window layers but for every fourth. Its state at `hit` is lost, block KV is not;
for each number R of tokens computed again: the largest error of the first logits behind the hit, how many of the
suffix's likeliest tokens change, and the mean KL divergence. A last table compares the times: to
replay exactly, to put a snapshot into a slot, to take one.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch

from finback.kernels import dispatch
from finback.shared.models.batch import ForwardBatch, StateBatch
from finback.shared.models.config import ModelConfig
from finback.shared.models.random_weights import RandomWeights
from finback.shared.models.windowed import WindowedTransformer

BLOCK = 64


def config_of(num_layers: int, window: int) -> ModelConfig:
    """A small Qwen3; the layers 3, 7, ... see everything."""
    return ModelConfig(
        architecture="qwen3",
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=512,
        num_layers=num_layers,
        num_heads=8,
        num_kv_heads=2,
        head_dim=32,
        rope_theta=10000.0,
        rms_norm_eps=1e-6,
        max_model_len=4096,
        qk_norm=True,
        window_layers=tuple(layer for layer in range(num_layers) if layer % 4 != 3),
        sliding_window=window,
    )


class Run:
    """One sequence through a pool and two slots: 0 undisturbed, 1 replayed."""

    def __init__(self, config: ModelConfig, num_tokens: int) -> None:
        kernels = dispatch.select_all("cpu", "fast")
        self.model = WindowedTransformer(
            config, RandomWeights(config), kernels, device="cpu", mode="fast", dtype=torch.float32
        )
        self.num_blocks = -(-num_tokens // BLOCK)
        self.pool = self.model.new_pool(self.num_blocks, BLOCK)
        self.state = self.model.new_state(2, 1)
        generator = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(0, config.vocab_size, (num_tokens,), generator=generator)

    def step(
        self, start: int, end: int, *, slot: int = 0, floor: int = 0, kept: int = 0
    ) -> torch.Tensor:
        """Logits of the tokens from `start` on; those below `kept` leave their blocks as they are."""
        positions = torch.arange(start, end, dtype=torch.int32)
        batch = ForwardBatch(
            token_ids=self.tokens[start:end],
            positions=positions,
            slot_mapping=positions,
            block_tables=torch.arange(self.num_blocks, dtype=torch.int32)[None],
            cu_seqlens=torch.tensor([0, end - start], dtype=torch.int32),
            context_lens=torch.tensor([end], dtype=torch.int32),
            max_q=end - start,
            max_context=end,
            logit_rows=torch.arange(end - start),
            state=StateBatch(
                pool=self.state,
                slots=torch.tensor([slot]),
                floors=torch.tensor([floor]),
                stored_rows=torch.nonzero(positions >= kept)[:, 0],
            ),
        )
        return self.model.logits(self.model.forward(batch, self.pool))


def quality(run: Run, hit: int, num_replayed: list[int]) -> None:
    """The table of errors by replay length. The suffix's own blocks are approximate too, as in a service."""
    end = run.tokens.numel()
    run.step(0, hit)
    exact = run.step(hit, end)
    sys.stdout.write(f"{'R':>6} {'first error':>12} {'changed':>8} {'mean KL':>9}\n")
    for count in num_replayed:
        start = hit - count
        if count:
            run.step(start, hit, slot=1, floor=start, kept=hit)
        found = run.step(hit, end, slot=1, floor=start, kept=hit)
        error = float((found[0] - exact[0]).abs().max())
        changed = int((found.argmax(-1) != exact.argmax(-1)).sum())
        kl = torch.nn.functional.kl_div(
            found.log_softmax(-1), exact.log_softmax(-1), log_target=True, reduction="none"
        )
        divergence = float(kl.sum(-1).mean())
        sys.stdout.write(f"{count:>6} {error:>12.2g} {changed:>8} {divergence:>9.1e}\n")


def times(run: Run, hit: int, exact: int) -> None:
    """Milliseconds, medians of 9."""
    run.step(0, hit)
    payload = run.state.pack(0, hit, 0, hit)
    start = max(0, hit - exact)
    rows = {
        f"exact replay of {hit - start}": lambda: run.step(
            start, hit, slot=1, floor=start, kept=hit
        ),
        f"restore {len(payload) / 1024:.0f} KiB": lambda: run.state.unpack(1, payload),
        f"snapshot {len(payload) / 1024:.0f} KiB": lambda: run.state.pack(0, hit, 0, hit),
    }
    for name, work in rows.items():
        sys.stdout.write(f"{name:<24} {_median_ms(work):8.3f} ms\n")


def _median_ms(work: Callable[[], object]) -> float:
    took = []
    for _ in range(9):
        started = time.perf_counter()
        work()
        took.append(1e3 * (time.perf_counter() - started))
    return statistics.median(took)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("window", 16), ("layers", 8), ("hit", 256), ("suffix", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    config = config_of(given.layers, given.window)
    run = Run(config, given.hit + given.suffix)
    exact = run.model.state_spec().replay_tokens
    window = given.window
    steps = sorted({0, window // 2, window, 2 * window, 3 * window, 4 * window, exact - 1, exact})
    quality(run, given.hit, [count for count in steps if count <= given.hit])
    times(run, given.hit, exact)


if __name__ == "__main__":
    main()
