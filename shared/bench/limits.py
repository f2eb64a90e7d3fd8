"""The least time in which a machine could do a workload: bytes and FLOPs, step by step. Pure.

The list is replayed with an ideal engine. All prompts that are there are computed in one step, each
of its distinct tokens once (what came from the prefix cache is not computed); then every step gives
each open sequence one token, reads all weights once, and reads each sequence's keys and values
once. Of a step, products with weights and attention are bounded each by the larger of its bytes over
the machine's bandwidth and its FLOPs over the machine's rate, and the two are summed. The ideal
engine batches without limit, plans and launches in no time, and moves no activations through memory.

Both rates are ceilings measured on the machine (`shared/engine/ceilings.py`). A share of this limit
is a lower bound of how well the machine is used: no engine reaches 1 without overlapping the parts.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from finback.shared.bench.workloads import Request
from finback.shared.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """What one step of a model costs. `layer_params`: parameters of all layers' products;
    `head_params`: of the vocabulary's. `weights_bytes`: what one step reads of weights;
    `kv_token_bytes`: keys and values of one token in all layers; `attention_flops`: of one query on
    one key, in all layers and heads: a product with the key and one with the value.
    """

    layer_params: int
    head_params: int
    weights_bytes: int
    kv_token_bytes: int
    attention_flops: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What the machine reached when measured: bytes/s and FLOP/s."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(slots=True, kw_only=True)
class Work:
    """A replay's sums."""

    bytes: int = 0
    flops: int = 0
    limit_s: float = 0.0
    num_steps: int = 0

    def add_part(self, num_bytes: int, flops: int, ceilings: Ceilings) -> None:
        """A part of a step that cannot overlap with its other parts."""
        self.bytes += num_bytes
        self.flops += flops
        self.limit_s += max(num_bytes / ceilings.bytes_per_s, flops / ceilings.flops_per_s)


def model_cost(config: ModelConfig, *, held_bytes: int, kv_item_bytes: int) -> ModelCost:
    """From the model's shape and the bytes that its weights take (`held_bytes`).

    Of an embedding table a step reads a row a token, which counts as nothing; so its share is taken
    off, unless it is the vocabulary's product too (`tie_word_embeddings`).
    """
    q, kv, hidden = config.q_size, config.kv_size, config.hidden_size
    layer = hidden * (q + 2 * kv) + q * hidden + 3 * hidden * config.intermediate_size
    layers = layer * config.num_layers
    head = hidden * config.vocab_size
    embedding = 0 if config.tie_word_embeddings else head
    read_share = (layers + head) / (layers + head + embedding)
    return ModelCost(
        layer_params=layers,
        head_params=head,
        weights_bytes=round(held_bytes * read_share),
        kv_token_bytes=2 * config.num_kv_layers * kv * kv_item_bytes,
        attention_flops=4 * config.num_layers * q,
    )


def replay(
    requests: Sequence[Request], num_cached: Sequence[int], cost: ModelCost, ceilings: Ceilings
) -> Work:
    """The whole list. `num_cached[i]`: prompt tokens of request i that came from the prefix cache."""
    work = Work()
    _prompts(requests, num_cached, cost, ceilings, work)
    rows, prompts = len(requests), sum(len(item.prompt) for item in requests)
    ending: Counter[int] = Counter()
    leaving: Counter[int] = Counter()
    for item in requests:
        ending[item.num_tokens] += 1
        leaving[item.num_tokens] += len(item.prompt)
    # The prompts' step gave every sequence its first token; step s gives those that go on token s + 1.
    for step in range(1, max(ending)):
        rows -= ending[step]
        prompts -= leaving[step]
        _step(rows, prompts + step * rows, cost, ceilings, work)
    return work


def _prompts(
    requests: Sequence[Request],
    num_cached: Sequence[int],
    cost: ModelCost,
    ceilings: Ceilings,
    work: Work,
) -> None:
    """One step for all prompts: each row that is computed, and a token for each request."""
    rows = pairs = read = 0
    for request, cached in zip(requests, num_cached, strict=True):
        length = len(request.prompt)
        new = length - cached
        rows += new
        pairs += (cached + 1 + length) * new // 2  # query i sees i + 1 keys
        read += length
    work.num_steps += 1
    flops = 2 * (cost.layer_params * rows + cost.head_params * len(requests))
    work.add_part(cost.weights_bytes, flops, ceilings)
    written = rows * cost.kv_token_bytes
    work.add_part(read * cost.kv_token_bytes + written, pairs * cost.attention_flops, ceilings)


def _step(rows: int, context: int, cost: ModelCost, ceilings: Ceilings, work: Work) -> None:
    """One step of `rows` sequences that hold `context` tokens together, the new ones included."""
    work.num_steps += 1
    flops = 2 * (cost.layer_params + cost.head_params) * rows
    work.add_part(cost.weights_bytes, flops, ceilings)
    work.add_part(context * cost.kv_token_bytes, context * cost.attention_flops, ceilings)
