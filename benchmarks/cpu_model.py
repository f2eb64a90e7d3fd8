"""The embedded model against llama.cpp on the same file and threads, in alternating runs.

usage: python benchmarks/cpu_model.py [--threads 2] [--clock wall|cpu] [--rounds 3] [--seqs 1,4,16]
       [--prefill 512]

Model level: no engine, no sampling but argmax. Ratios of neighbouring runs are what counts; on a shared
machine absolute numbers move by a factor of two. `--clock cpu` counts the process's processor time
instead, which neighbours hardly change; use it with one thread. One JSON line a case.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import llama_cpp
import numpy as np
import torch

from finback.shared.models.batch import ForwardBatch
from finback.shared.models.causal_lm import CausalLM
from finback.shared.models.kv_pool import KVPool
from finback.shared.models.loader import load_model
from finback.shared.models.source import open_source

BLOCK = 64
PROMPT = 128
STEPS = 48
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
_clock: list[Callable[[], float]] = [time.perf_counter]
MAX_LEN = 512


def clock() -> float:
    """Seconds by the clock that was chosen."""
    return _clock[0]()


class Ours:
    """Finback's model with one pool."""

    def __init__(self, model: CausalLM, num_seqs: int, max_len: int) -> None:
        self.model = model
        self.blocks = -(-max_len // BLOCK)
        self.pool: KVPool = model.new_pool(num_seqs * self.blocks, BLOCK)
        self.tables = torch.arange(num_seqs * self.blocks, dtype=torch.int32).view(num_seqs, -1)

    def step(self, rows: list[tuple[int, int, list[int]]], outputs: bool) -> torch.Tensor:
        """rows: (sequence, first position, tokens). Logits of each sequence's last row."""
        tokens, positions, slots, cu, lens = [], [], [], [0], []
        for seq, first, ids in rows:
            for offset, token in enumerate(ids):
                position = first + offset
                tokens.append(token)
                positions.append(position)
                slots.append((seq * self.blocks + position // BLOCK) * BLOCK + position % BLOCK)
            cu.append(len(tokens))
            lens.append(first + len(ids))
        batch = ForwardBatch(
            token_ids=torch.tensor(tokens, dtype=torch.int32),
            positions=torch.tensor(positions, dtype=torch.int32),
            slot_mapping=torch.tensor(slots, dtype=torch.int32),
            block_tables=self.tables[[row[0] for row in rows]],
            cu_seqlens=torch.tensor(cu, dtype=torch.int32),
            context_lens=torch.tensor(lens, dtype=torch.int32),
            max_q=max(len(row[2]) for row in rows),
            max_context=max(lens),
            logit_rows=torch.tensor(cu[1:], dtype=torch.int64) - 1,
        )
        hidden = self.model.forward(batch, self.pool)
        return self.model.logits(hidden) if outputs else hidden


def ours_decode(model: CausalLM, num_seqs: int) -> float:
    """Tokens per second, median step."""
    rng = np.random.default_rng(0)
    ours = Ours(model, num_seqs, MAX_LEN)
    for seq in range(num_seqs):
        ours.step([(seq, 0, rng.integers(10, 49152, PROMPT).tolist())], False)
    ids, times = [11] * num_seqs, []
    for step in range(STEPS):
        start = clock()
        logits = ours.step([(seq, PROMPT + step, [ids[seq]]) for seq in range(num_seqs)], True)
        ids = logits.argmax(-1).tolist()
        times.append(clock() - start)
    return num_seqs / statistics.median(times)


def ours_prefill(model: CausalLM, num_tokens: int) -> float:
    """Tokens per second of one prompt, as one chunk."""
    rng = np.random.default_rng(0)
    ours = Ours(model, 1, num_tokens)
    tokens = rng.integers(10, 49152, num_tokens).tolist()
    start = clock()
    ours.step([(0, 0, tokens)], True)
    return num_tokens / (clock() - start)


class Llama:
    """llama.cpp through its C API."""

    def __init__(self, path: str, threads: int) -> None:
        llama_cpp.llama_backend_init()
        self.threads = threads
        params = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        self.batch = llama_cpp.llama_batch_init(2048, 0, 1)

    def context(self, num_seqs: int, max_len: int) -> object:
        """A fresh context."""
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = max_len * num_seqs, 2048, 512
        params.n_seq_max = num_seqs
        params.n_threads = params.n_threads_batch = self.threads
        return llama_cpp.llama_init_from_model(self.model, params)

    def fill(self, tokens: list[int], positions: list[int], seqs: list[int], every: bool) -> None:
        """Describe a batch; logits of the last row or of every row."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, positions[i], 1
            batch.seq_id[i][0] = seqs[i]
            batch.logits[i] = int(every or i == len(tokens) - 1)

    def decode(self, num_seqs: int) -> float:
        """Tokens per second, median step."""
        rng = np.random.default_rng(0)
        context = self.context(num_seqs, MAX_LEN)
        for seq in range(num_seqs):
            tokens = rng.integers(10, 49152, PROMPT).tolist()
            self.fill(tokens, list(range(PROMPT)), [seq] * PROMPT, False)
            llama_cpp.llama_decode(context, self.batch)
        ids, times = [11] * num_seqs, []
        for step in range(STEPS):
            start = clock()
            self.fill(ids, [PROMPT + step] * num_seqs, list(range(num_seqs)), True)
            llama_cpp.llama_decode(context, self.batch)
            ids = [
                int(
                    np.argmax(
                        np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, i), (49152,))
                    )
                )
                for i in range(num_seqs)
            ]
            times.append(clock() - start)
        llama_cpp.llama_free(context)
        return num_seqs / statistics.median(times)

    def prefill(self, num_tokens: int) -> float:
        """Tokens per second of one prompt."""
        rng = np.random.default_rng(0)
        context = self.context(1, num_tokens)
        self.fill(
            rng.integers(10, 49152, num_tokens).tolist(),
            list(range(num_tokens)),
            [0] * num_tokens,
            False,
        )
        start = clock()
        llama_cpp.llama_decode(context, self.batch)
        rate = num_tokens / (clock() - start)
        llama_cpp.llama_free(context)
        return rate


def compare(name: str, rounds: int, ours: Callable[[], float], theirs: Callable[[], float]) -> None:
    """Alternate, print medians and the median of the rounds' ratios."""
    pairs = [(ours(), theirs()) for _ in range(rounds)]
    ratio = statistics.median(a / b for a, b in pairs)
    best = [max(pair[i] for pair in pairs) for i in range(2)]
    print(
        json.dumps(
            {
                "case": name,
                "ratio_median": round(ratio, 2),
                "ratio_of_best": round(best[0] / best[1], 2),
                "ours_tok_s": [round(a) for a, _ in pairs],
                "llama_tok_s": [round(b) for _, b in pairs],
            }
        ),
        flush=True,
    )


def main() -> None:
    """Run all cases."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seqs", default="1,4,16")
    parser.add_argument("--prefill", default="512")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    args = parser.parse_args()
    _clock[0] = CLOCKS[args.clock]
    source = open_source()
    model = load_model(source, num_threads=args.threads)
    llama = Llama(str(source.path), args.threads)
    for num_seqs in [int(part) for part in args.seqs.split(",") if part]:
        compare(
            f"decode x{num_seqs}",
            args.rounds,
            lambda n=num_seqs: ours_decode(model, n),  # type: ignore[misc]  # bound now
            lambda n=num_seqs: llama.decode(n),  # type: ignore[misc]  # bound now
        )
    for num_tokens in [int(part) for part in args.prefill.split(",") if part]:
        compare(
            f"prefill {num_tokens}",
            args.rounds,
            lambda n=num_tokens: ours_prefill(model, n),  # type: ignore[misc]  # bound now
            lambda n=num_tokens: llama.prefill(n),  # type: ignore[misc]  # bound now
        )
    model.close()


if __name__ == "__main__":
    main()
