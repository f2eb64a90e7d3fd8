"""The ops of DeepSeek V4 against slow and obvious forms of their formulas."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from finback.kernels.compress_entries.reference import compress_entries
from finback.kernels.expert_mlp.reference import expert_mlp
from finback.kernels.expert_mlp_fp4.reference import unpack
from finback.kernels.expert_mlp_w4a8.packing import pack
from finback.kernels.expert_mlp_w4a8.reference import dequantise_rows, quantise_rows
from finback.kernels.hyper_mix.reference import hyper_mix, hyper_spread
from finback.kernels.latent_attention.reference import latent_attention
from finback.kernels.rotary_pairs.reference import rotary_pairs
from finback.kernels.route_experts.reference import route_experts
from finback.kernels.select_entries.reference import select_entries
from support.v4_checks import random_matrices

SEEDS = st.integers(0, 10_000)


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(SEEDS)
@settings(max_examples=25, deadline=None)
def test_streams_are_mixed_from_the_first_axis_to_the_second(seed: int) -> None:
    streams, n = draw(seed, 3, 4, 8), 4
    fn, base, scale = draw(seed + 1, 24, 32) / 6, draw(seed + 2, 24), draw(seed + 3, 3)
    mix = hyper_mix(streams, fn, base, scale, norm_eps=1e-6, eps=1e-6, num_iterations=20)
    torch.testing.assert_close(mix.comb.sum(dim=1), torch.ones(3, n), atol=1e-4, rtol=0)
    assert (mix.post > 0).all()
    assert (mix.post < 2).all()
    output = draw(seed + 4, 3, 8)
    found = hyper_spread(streams, output, mix)
    for row in range(3):
        for to in range(n):
            expected = mix.post[row, to] * output[row]
            for source in range(n):
                expected = expected + mix.comb[row, source, to] * streams[row, source]
            torch.testing.assert_close(found[row, to], expected, atol=1e-5, rtol=0)


@given(SEEDS, st.integers(0, 6))
@settings(max_examples=25, deadline=None)
def test_attention_over_chosen_rows_with_a_sink(seed: int, num_entries: int) -> None:
    queries, window, entries = draw(seed, 2, 3, 4), draw(seed + 1, 9, 4), draw(seed + 2, 7, 4)
    generator = torch.Generator().manual_seed(seed)
    window_rows = torch.randint(-1, 9, (2, 5), generator=generator, dtype=torch.int32)
    entry_rows = torch.randint(-1, 7, (2, num_entries), generator=generator, dtype=torch.int32)
    sinks = draw(seed + 3, 3)
    found = latent_attention(queries, window, window_rows, entries, entry_rows, sinks, 0.5)
    for row in range(2):
        keys = [window[i] for i in window_rows[row] if i >= 0]
        keys += [entries[i] for i in entry_rows[row] if i >= 0]
        for head in range(3):
            weights = [math.exp(float(queries[row, head] @ key) * 0.5) for key in keys]
            total = sum(weights) + math.exp(float(sinks[head]))
            expected = torch.zeros(4)
            for weight, key in zip(weights, keys, strict=True):
                expected += weight / total * key
            torch.testing.assert_close(found[row, head], expected, atol=1e-5, rtol=1e-4)


def test_rows_that_are_none_may_hold_anything() -> None:
    window = torch.full((3, 4), torch.nan)
    rows = torch.full((1, 2), -1, dtype=torch.int32)
    found = latent_attention(draw(1, 1, 2, 4), window, rows, window, rows, torch.zeros(2), 1.0)
    assert torch.equal(found, torch.zeros(1, 2, 4))


def test_the_first_overlapping_entry_has_no_window_before_it() -> None:
    contents, gates = draw(1, 8, 6), draw(2, 8, 6)
    rows = torch.tensor([[-1, -1, 0, 1], [0, 1, 2, 3]], dtype=torch.int32)
    found = compress_entries(contents, gates, rows, overlap=True)
    weights = torch.softmax(gates[:2, 3:], dim=0)
    torch.testing.assert_close(found[0], (weights * contents[:2, 3:]).sum(dim=0))
    both = torch.cat((gates[0:2, :3], gates[2:4, 3:]))
    values = torch.cat((contents[0:2, :3], contents[2:4, 3:]))
    torch.testing.assert_close(found[1], (torch.softmax(both, dim=0) * values).sum(dim=0))


@given(SEEDS, st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_the_best_entries_and_of_equal_ones_the_earlier(seed: int, top_k: int) -> None:
    queries, weights = draw(seed, 3, 2, 4), draw(seed + 1, 3, 2)
    keys = draw(seed + 2, 10, 4)
    keys[seed % 10] = keys[(seed + 3) % 10]  # a tie
    places = torch.randperm(10, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    places = places[:8].expand(3, 8)
    visible = torch.tensor([0, 3, 8])
    found = select_entries(queries, weights, keys, places, visible, top_k)
    for row in range(3):
        scored = []
        for entry in range(int(visible[row])):
            products = (queries[row] @ keys[places[row, entry]]).relu()
            scored.append((-float((weights[row] * products).sum()), entry))
        best = sorted(entry for _, entry in sorted(scored)[:top_k])
        chosen = [entry for entry in found[row].tolist() if entry >= 0]
        assert found[row].tolist() == chosen + [-1] * (top_k - len(chosen))
        worst = sorted(scored)[:top_k][-1][0] if scored else 0.0
        for entry in set(best) ^ set(chosen):  # only where scores agree to rounding
            assert abs({entry: score for score, entry in scored}[entry] - worst) < 1e-5


def test_the_bias_decides_the_choice_and_not_the_weight() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    bias = torch.tensor([9.0, 0.0, 0.0])
    experts, weights = route_experts(logits, top_k=2, scaling=1.5, bias=bias)
    assert experts.tolist() == [[0, 2]]
    scores = [math.sqrt(math.log1p(math.exp(x))) for x in (0.0, 2.0)]
    expected = [1.5 * score / sum(scores) for score in scores]
    torch.testing.assert_close(weights, torch.tensor([expected]))
    table = torch.tensor([[1, 2]])
    experts, weights = route_experts(logits, top_k=2, scaling=1.5, experts=table)
    assert experts.tolist() == [[1, 2]]
    assert float(weights.sum()) == torch.tensor(1.5)


@given(SEEDS)
@settings(max_examples=20, deadline=None)
def test_experts_one_row_at_a_time(seed: int) -> None:
    hidden, gate_up, down = draw(seed, 5, 6), draw(seed + 1, 4, 8, 6), draw(seed + 2, 4, 6, 4)
    experts = torch.randint(-1, 4, (5, 2), generator=torch.Generator().manual_seed(seed))
    weights = draw(seed + 3, 5, 2).abs()
    found = expert_mlp(hidden, gate_up, down, experts, weights, limit=0.8)
    for row in range(5):
        expected = torch.zeros(6)
        for expert, weight in zip(experts[row].tolist(), weights[row], strict=True):
            if expert < 0:
                continue
            gate, up = (gate_up[expert] @ hidden[row]).chunk(2)
            gate, up = gate.clamp(max=0.8), up.clamp(-0.8, 0.8)
            expected += weight * (down[expert] @ (gate * torch.sigmoid(gate) * up))
        torch.testing.assert_close(found[row], expected, atol=1e-5, rtol=1e-4)


def test_turning_back_undoes_turning() -> None:
    rows = draw(3, 4, 2, 10)
    angles = draw(4, 4, 3)
    turned = rotary_pairs(rows, angles.cos(), angles.sin())
    assert torch.equal(turned[..., :4], rows[..., :4])
    pair = torch.view_as_complex(rows[..., 4:6].contiguous())
    expected = pair * torch.polar(torch.ones(4), angles[:, 0])[:, None]
    torch.testing.assert_close(torch.view_as_complex(turned[..., 4:6].contiguous()), expected)
    back = rotary_pairs(turned, angles.cos(), angles.sin(), inverse=True)
    torch.testing.assert_close(back, rows)


def test_packed_weights_are_the_same_numbers() -> None:
    """Shift, sign and factor of each weight, read back with plain arithmetic."""
    matrices = random_matrices(2, 256, 384, seed=9, where="cpu")
    packed = pack(matrices)
    rows = packed.codes.transpose(2, 3).reshape(2, 256, -1)
    four = rows.view(2, 256, -1, 4).to(torch.int32)
    codes = torch.stack((four & 7, (four >> 4) & 7), dim=-1).flatten(-2)
    negative = torch.cat((four >> 7, (four >> 3) & 1), dim=-1)
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = (table[codes] * (1 - 2 * negative)).flatten(-2)
    shifts = (
        packed.shifts.transpose(2, 3)
        .reshape(2, 256, -1)
        .to(torch.int32)
        .repeat_interleave(32, dim=-1)
        // 8
        - 5
    )
    values = torch.ldexp(values, shifts) * packed.factors[..., None]
    assert torch.equal(values, unpack(matrices))


def test_activations_are_rounded_to_a_sixteenth() -> None:
    rows = torch.randn((7, 256), generator=torch.Generator().manual_seed(1)) * 50
    found = dequantise_rows(quantise_rows(rows))
    assert ((found - rows).abs() <= rows.abs() / 16 + 1e-6 * 50).float().mean() > 0.99
    assert torch.equal(dequantise_rows(quantise_rows(torch.zeros(1, 128))), torch.zeros(1, 128))
