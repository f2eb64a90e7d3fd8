"""The peer of `against_llama_cpp.py`: llama.cpp on the same GGUF file, one workload a line on stdin.

Reads `prefill N` or `decode SEQS STEPS` lines and answers each with one JSON line, so that both
engines can take turns within one run. Workloads as in the file it is compared with.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

PROMPT_TOKENS = 128
MAX_BATCH = 2048


class Peer:
    """One loaded model; contexts are made a workload."""

    def __init__(self, path: Path, num_threads: int) -> None:
        llama_cpp.llama_backend_init()
        self._num_threads = num_threads
        parameters = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = int(llama_cpp.llama_vocab_n_tokens(vocabulary))
        self._batch = llama_cpp.llama_batch_init(MAX_BATCH, 0, 1)
        self._rng = np.random.default_rng(0)

    def prefill(self, num_tokens: int) -> float:
        """Tokens per second of one prompt, logits of its last token included."""
        context = self._context(1, num_tokens + 8)
        prompt = self._rng.integers(10, self._vocab_size, num_tokens)
        started = time.perf_counter()
        self._run(context, prompt, range(num_tokens), [0] * num_tokens, last_only=True)
        np.ctypeslib.as_array(
            llama_cpp.llama_get_logits_ith(context, num_tokens - 1), (self._vocab_size,)
        ).argmax()
        elapsed = time.perf_counter() - started
        llama_cpp.llama_free(context)
        return num_tokens / elapsed

    def decode(self, num_seqs: int, num_steps: int) -> float:
        """Tokens per second over `num_steps` greedy steps of `num_seqs` sequences."""
        context = self._context(num_seqs, PROMPT_TOKENS + num_steps + 8)
        for seq in range(num_seqs):
            prompt = self._rng.integers(10, self._vocab_size, PROMPT_TOKENS)
            self._run(context, prompt, range(PROMPT_TOKENS), [seq] * PROMPT_TOKENS, last_only=True)
        tokens = [11] * num_seqs
        durations = []
        for step in range(num_steps):
            started = time.perf_counter()
            positions = [PROMPT_TOKENS + step] * num_seqs
            self._run(context, tokens, positions, list(range(num_seqs)), last_only=False)
            tokens = [
                int(
                    np.ctypeslib.as_array(
                        llama_cpp.llama_get_logits_ith(context, row), (self._vocab_size,)
                    ).argmax()
                )
                for row in range(num_seqs)
            ]
            durations.append(time.perf_counter() - started)
        llama_cpp.llama_free(context)
        return num_seqs / float(np.median(durations))

    def _context(self, num_seqs: int, tokens_a_seq: int) -> Any:
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = tokens_a_seq * num_seqs
        parameters.n_batch = MAX_BATCH
        parameters.n_ubatch = 512
        parameters.n_seq_max = num_seqs
        parameters.n_threads = parameters.n_threads_batch = self._num_threads
        return llama_cpp.llama_init_from_model(self._model, parameters)

    def _run(
        self, context: Any, tokens: Any, positions: Any, seqs: list[int], *, last_only: bool
    ) -> None:
        batch = self._batch
        batch.n_tokens = len(tokens)
        for row, token in enumerate(tokens):
            batch.token[row] = int(token)
            batch.pos[row] = positions[row]
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = seqs[row]
            batch.logits[row] = int(not last_only or row == len(tokens) - 1)
        status = llama_cpp.llama_decode(context, batch)
        if status != 0:
            raise SystemExit(f"llama_decode returned {status}")


def main() -> None:
    """Serve workloads until stdin ends."""
    peer = Peer(Path(sys.argv[1]), int(sys.argv[2]))
    print(json.dumps({"version": llama_cpp.__version__}), flush=True)
    for line in sys.stdin:
        kind, *numbers = line.split()
        sizes = [int(number) for number in numbers]
        rate = peer.prefill(*sizes) if kind == "prefill" else peer.decode(*sizes)
        print(json.dumps({"tokens_per_s": rate}), flush=True)


if __name__ == "__main__":
    main()
