"""What deterministic mode costs: the same prompts by a fast and by a deterministic engine, in turns.

    python benchmarks/deterministic_cost.py [--model FILE] [--device cpu] [--rounds 3] [--prompt 512]

Both engines live in this process, and a round runs each workload by one straight after the other (the
order changes from round to round), so that a disturbed machine disturbs both; told is the median over
the rounds of the ratios of their speeds. Workloads: a prompt alone (one token is generated), and
answers of 64 tokens to short prompts, 1, 4 and 16 at once. `equal` is the share of answers that the
fast engine gave token by token like the deterministic one (greedy); `one_numerics_class` says that
both run the same arithmetic, so that there is nothing to pay. Appends a JSON line to
`benchmarks/results/deterministic_cost.jsonl`.
"""

import argparse
import json
import platform
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from finback import LLM, Completion, SamplingParams

RESULTS = Path(__file__).parent / "results" / "deterministic_cost.jsonl"
NUM_TOKENS = 64
BATCHES = (1, 4, 16)
MODES = ("fast", "deterministic")


def prompts_of(rng: np.random.Generator, vocab_size: int, count: int, length: int) -> list[Any]:
    """Random tokens: no prefix is shared."""
    return rng.integers(100, vocab_size, (count, length)).tolist()  # type: ignore[no-any-return]  # lists of ints


def run(llm: LLM, prompts: list[Any], num_tokens: int) -> tuple[float, list[Completion]]:
    """(seconds, answers) of prompts that all run at once, greedily."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    llm.reset_prefix_cache()
    started = time.perf_counter()
    found = llm.generate(prompts, params)
    return time.perf_counter() - started, found


def one_round(llms: dict[str, LLM], prompts: list[Any], num_tokens: int, is_odd: bool) -> Any:
    """Both modes in turn: (fast seconds, deterministic seconds, share of equal answers)."""
    order = MODES[::-1] if is_odd else MODES
    found = {mode: run(llms[mode], prompts, num_tokens) for mode in order}
    pairs = zip(found["fast"][1], found["deterministic"][1], strict=True)
    equal = sum(one.token_ids == other.token_ids for one, other in pairs)
    return found["fast"][0], found["deterministic"][0], equal / len(prompts)


def measure(llms: dict[str, LLM], name: str, prompts: list[Any], num_tokens: int, args: Any) -> Any:
    """One workload: speeds in tokens a second, and the ratio deterministic / fast."""
    rounds = [one_round(llms, prompts, num_tokens, bool(at % 2)) for at in range(args.rounds + 1)]
    rounds = rounds[1:]  # the first one warms caches up
    work = sum(map(len, prompts)) if num_tokens == 1 else num_tokens * len(prompts)
    ratios = sorted(fast_s / slow_s for fast_s, slow_s, _ in rounds)
    result = {
        "fast": round(work / median(fast_s for fast_s, _, _ in rounds), 1),
        "deterministic": round(work / median(slow_s for _, slow_s, _ in rounds), 1),
        "ratio": round(median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "equal": round(rounds[0][2], 3),
    }
    print(
        f"{name:<14} fast {result['fast']:8.1f}  deterministic {result['deterministic']:8.1f} "
        f"tokens/s  ratio {result['ratio']:.3f} [{ratios[0]:.3f} .. {ratios[-1]:.3f}]  "
        f"equal {result['equal']:.0%}",
        flush=True,
    )
    return result


def main() -> None:
    """Measure and append."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--note", default="", help="kept in the result, e.g. what else was running")
    args = parser.parse_args()
    options: dict[str, Any] = {
        "model": args.model,
        "device": args.device,
        "max_model_len": max(args.prompt + 1, 2 * NUM_TOKENS),
        "max_num_seqs": max(BATCHES),
    }
    rng = np.random.default_rng(0)
    with LLM(**options) as fast, LLM(**options, deterministic=True) as slow:
        llms = {"fast": fast, "deterministic": slow}
        vocab_size = fast.model_config.vocab_size
        results = {}
        prompt = prompts_of(rng, vocab_size, 1, args.prompt)
        results[f"prompt {args.prompt}"] = measure(llms, f"prompt {args.prompt}", prompt, 1, args)
        for count in BATCHES:
            prompts = prompts_of(rng, vocab_size, count, 16)
            name = f"decode x{count}"
            results[name] = measure(llms, name, prompts, NUM_TOKENS, args)
        is_one_class = fast.cache_spec.salt == slow.cache_spec.salt
    line = {
        "unix_s": int(time.time()),
        "command": f"benchmarks/deterministic_cost.py --rounds {args.rounds}",
        "machine": platform.machine(),
        "one_numerics_class": is_one_class,
        "note": args.note,
        "tokens_per_s": results,
    }
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
