"""What remote suffix drafting brings one stream: a stack that drafts and one that does not, in turns.

    python benchmarks/drafting.py [--rounds 3] [--tokens 160] [--keep]

Prompts are of two kinds: code (carry on or change what stands there) and summaries. Each is sent to both
stacks, streamed over HTTP, one at a time; greedy and sampled answers count alike. Speed is that of
decoding, from the first token to the last. The gain is the median over the rounds of the ratio of
all tokens' times, by kind. Both stacks must give the same token ids, every time: drafting is exact.
`cpu_gain` is the same ratio of the engines' processor time, which other work disturbs less; it leaves
waiting out and counts prompts in.

Prints a line for each kind. With `--keep` one JSON line goes to `results/drafting.jsonl`; keep runs of a
quiet machine only.
"""

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import httpx
from stack_under_test import Stack, cpu_s, stack

from finback.shared.bench.environment import environment
from finback.shared.codec.dialogue import Conversation, Turn
from finback.shared.codec.load import load_codec
from finback.shared.models.source import open_source

WANTED: Final = 1.3
CODE: Final = """class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance = self.balance + amount
        return self.balance

    def withdraw(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance = self.balance - amount
        return self.balance
"""
TABLE: Final = """CREATE TABLE customers (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    city TEXT NOT NULL
);
INSERT INTO customers (id, name, city) VALUES (1, 'Ada', 'London');
INSERT INTO customers (id, name, city) VALUES (2, 'Grace', 'New York');
INSERT INTO customers (id, name, city) VALUES (3, 'Edsger', 'Rotterdam');
"""
TEXT: Final = """The blue whale is a marine mammal and a baleen whale. Reaching a maximum confirmed length of
29.9 metres and weighing up to 199 tonnes, it is the largest animal known ever to have existed. The blue whale's
long and slender body can be of various shades of greyish-blue on its upper surface and somewhat lighter
underneath. Four subspecies are recognized: the northern blue whale in the North Atlantic and North Pacific, the
southern blue whale in the Southern Ocean, the pygmy blue whale in the Indian Ocean and South Pacific Ocean, and
the northern Indian blue whale in the northern Indian Ocean. Blue whales were once abundant in nearly all the
Earth's oceans until the end of the 19th century. They were hunted almost to the point of extinction by whalers
until the International Whaling Commission banned all blue whale hunting in 1966."""
MINUTES: Final = """Present: Ada, Grace, Edsger. Ada reported that the new billing service went live on Monday and
that two customers were charged twice on Tuesday. The cause was a retry without an idempotency key. Grace has
refunded both customers and added the key. Edsger asked for a test that sends the same payment twice. Grace will
write the test by Friday. The team agreed to freeze releases of the billing service until the test is in place.
Ada will tell the support team about the freeze. The next meeting is on Thursday at ten."""
PROMPTS: Final = {
    "code": (
        f"Rename the variable balance to total in this class. Answer with the whole class.\n{CODE}",
        f"Add a method transfer to this class. Answer with the whole class.\n{CODE}",
        f"Add a docstring to every method. Answer with the whole class.\n{CODE}",
        f"Carry on this file with ten more customers.\n{TABLE}",
        f"Repeat this file, with the table named clients instead of customers.\n{TABLE}",
    ),
    "summary": (
        f"Summarize the following text.\n\n{TEXT}",
        f"List the main facts of the following text, in its own words.\n\n{TEXT}",
        f"Summarize these minutes for someone who was not there.\n\n{MINUTES}",
        f"Write the action items of these minutes as a list.\n\n{MINUTES}",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer: its ids, and seconds from the first token to the last."""

    token_ids: tuple[int, ...]
    decode_s: float
    cpu_s: float


def encode(prompts: tuple[str, ...]) -> list[list[int]]:
    """Ids of each as a user's message in the model's own template."""
    source = open_source()
    codec = load_codec(source.text, architecture=source.config.architecture)
    if codec.prompt is None:
        raise SystemExit("this model has no chat template")
    found = []
    for text in prompts:
        pieces = codec.prompt.render(Conversation(turns=(Turn(role="user", content=text),)))
        found.append([int(token) for token in codec.tokenizer.encode_pieces(pieces)])
    return found


def ask(to: Stack, prompt: list[int], num_tokens: int, seed: int, temperature: float) -> Answer:
    """Stream one answer."""
    body = {
        "model": to.model,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": temperature,
        "seed": seed,
        "stream": True,
        "return_token_ids": True,
    }
    ids: list[int] = []
    first_s = last_s = 0.0
    pid = to.pids.get("decode") or to.pids["prefill"]
    used_s = cpu_s(pid)
    with httpx.stream("POST", f"{to.url}/v1/completions", json=body, timeout=120) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                new = [i for choice in chunk["choices"] for i in choice.get("token_ids", ())]
                if new:
                    last_s = time.perf_counter()
                    first_s = first_s or last_s
                    ids += new
    if len(ids) < 2:
        raise SystemExit(f"the answer to a prompt of {len(prompt)} tokens had {len(ids)} tokens")
    return Answer(token_ids=tuple(ids), decode_s=last_s - first_s, cpu_s=cpu_s(pid) - used_s)


def one_round(
    plain: Stack, drafting: Stack, prompts: list[list[int]], num_tokens: int, number: int
) -> dict[str, float]:
    """All prompts at both stacks, greedy and sampled; which one is first alternates."""
    totals = {"plain": 0.0, "drafting": 0.0, "plain_cpu": 0.0, "drafting_cpu": 0.0, "tokens": 0.0}
    for at, prompt in enumerate(prompts):
        for temperature in (0.0, 0.6):
            order = [("plain", plain), ("drafting", drafting)]
            if (at + number) % 2:
                order.reverse()
            seed = 1000 * number + at
            found = {n: ask(to, prompt, num_tokens, seed, temperature) for n, to in order}
            if found["plain"].token_ids != found["drafting"].token_ids:
                raise SystemExit(f"drafting changed the answer to prompt {at} (seed {seed})")
            totals["tokens"] += len(found["plain"].token_ids) - 1
            for name, answer in found.items():
                totals[name] += answer.decode_s
                totals[f"{name}_cpu"] += answer.cpu_s
    return totals


def summary(kind: str, rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Medians over the rounds."""
    gains = [one["plain"] / one["drafting"] for one in rounds]
    return {
        "kind": kind,
        "wanted": WANTED,
        "gain": round(median(gains), 3),
        "gains": [round(gain, 3) for gain in gains],
        "cpu_gain": round(median(one["plain_cpu"] / one["drafting_cpu"] for one in rounds), 3),
        "plain_tokens_per_s": round(median(one["tokens"] / one["plain"] for one in rounds), 1),
        "drafting_tokens_per_s": round(median(o["tokens"] / o["drafting"] for o in rounds), 1),
        "num_tokens_compared": int(sum(one["tokens"] for one in rounds)),
    }


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--up", default="--cohost", help="arguments of `finback up`, in one string")
    parser.add_argument("--keep", action="store_true", help="add the result to results/")
    options = parser.parse_args()
    about, given = environment(), options.up.split()
    rows = []
    with stack(*given) as plain, stack(*given, "--drafting") as drafting:
        for kind, prompts in PROMPTS.items():
            ids = encode(prompts)
            rounds = [
                one_round(plain, drafting, ids, options.tokens, number)
                for number in range(options.rounds + 1)
            ]
            rows.append(summary(kind, rounds[1:]))
            print(json.dumps(rows[-1]), flush=True)
    record = {
        "benchmark": "drafting",
        "unix_s": int(time.time()),
        "num_tokens": options.tokens,
        "rounds": options.rounds,
        "up": options.up,
        "environment": about,
        "rows": rows,
    }
    if options.keep:
        results = Path(__file__).parent / "results" / "drafting.jsonl"
        with results.open("a") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
