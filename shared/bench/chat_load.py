"""`chat`: Poisson arrivals of requests with ShareGPT-like lengths, all from one seed. Pure.

Lengths are log-normal, cut as vLLM's serving benchmark cuts ShareGPT (prompts of 4 to 1,024 tokens,
answers of at least 4, both together at most 2,048). Their means are what that benchmark counted over
1,000 ShareGPT requests with Llama 3.1's tokenizer, 229.7 and 203.1 (vllm-project/vllm pull request
18566). Their widths come from the ratio of the 90th percentile to the median that Sarathi-Serve
(Agrawal et al. 2024, arXiv 2403.02310, table 2) gives for ShareGPT: 5,696 / 1,730 for prompts and
834 / 415 for answers; sigma is the logarithm of the ratio over 1.2816, the normal's 90th percentile.
Those four figures were quoted without the paper at hand and still have to be compared with it.
"""

import math
import random
from typing import Final

from finback.shared.bench.workloads import FIRST_ID, LAST_ID, Request
from finback.shared.errors import ConfigError

MEAN_PROMPT_TOKENS: Final = 229.7
MEAN_ANSWER_TOKENS: Final = 203.1
_Z90: Final = 1.2816
PROMPT_SIGMA: Final = math.log(5696 / 1730) / _Z90
ANSWER_SIGMA: Final = math.log(834 / 415) / _Z90
# Medians that give the means after the cut; a test draws and checks.
PROMPT_MEDIAN: Final = 172.7
ANSWER_MEDIAN: Final = 175.0

MIN_TOKENS: Final = 4
MAX_PROMPT_TOKENS: Final = 1024
MAX_SUM_TOKENS: Final = 2048
MAX_REQUESTS: Final = 1_000_000


def chat_requests(
    *,
    rate_per_s: float,
    vocab_size: int,
    seed: int,
    num_requests: int = 0,
    duration_s: float = 0.0,
) -> list[Request]:
    """Requests until `num_requests` or `duration_s` is reached, whichever comes first.

    Lengths and ids do not depend on the rate: request i is the same at every rate.
    """
    if not num_requests and not duration_s:
        raise ConfigError("num_requests or duration_s must be given for chat")
    bodies = random.Random(f"bodies/{seed}")
    arrivals = random.Random(f"arrivals/{seed}")
    found: list[Request] = []
    due_s = 0.0
    while not num_requests or len(found) < num_requests:
        # Exponential gaps of mean 1, then divided: the same pattern, faster or slower.
        due_s += arrivals.expovariate(1.0) / rate_per_s if found else 0.0
        if duration_s and due_s >= duration_s:
            break
        if len(found) >= MAX_REQUESTS:
            raise ConfigError(f"rate times duration must be at most {MAX_REQUESTS} requests")
        num_prompt, num_tokens = draw_lengths(bodies)
        last = min(vocab_size - 1, LAST_ID)
        prompt = tuple(bodies.randint(FIRST_ID, last) for _ in range(num_prompt))
        found.append(Request(prompt=prompt, num_tokens=num_tokens, due_s=due_s))
    return found


def draw_lengths(draw: random.Random) -> tuple[int, int]:
    """(prompt tokens, answer tokens); pairs outside the cut are drawn again."""
    while True:
        prompt = round(draw.lognormvariate(math.log(PROMPT_MEDIAN), PROMPT_SIGMA))
        answer = round(draw.lognormvariate(math.log(ANSWER_MEDIAN), ANSWER_SIGMA))
        if (
            MIN_TOKENS <= prompt <= MAX_PROMPT_TOKENS
            and answer >= MIN_TOKENS
            and prompt + answer <= MAX_SUM_TOKENS
        ):
            return prompt, answer
