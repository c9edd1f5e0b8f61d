"""Short convolutions, gated delta rules and gated norms against the same thing written out in float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from quire.attention.interface import StateStep
from quire.layers import states
from quire.layers.states import ConvolutionWeights, DeltaRule, GatedNormWeights, TorchStates

LAYER, INTERVAL, LENGTHS = 3, 128, [200, 1, 70]
CUTS = [[200, 1, 70], [7, 1, 64], [64, 1, 1], [128, 1, 3], [65, 1, 63]]
"""Tokens of each sequence in a step; a schedule repeats one until all sequences are at their ends."""
WIDTH, CHANNELS = 4, 6
HEADS = [(2, 4, 8, 12), (1, 1, 24, 40), (1, 3, 16, 16)]
"""Key heads, value heads, elements of a key, elements of a value."""
Inputs = tuple[torch.Tensor, torch.Tensor]
"""Queries, keys and values, and gates, of one sequence."""


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def schedule(counts: list[int]) -> list[list[tuple[int, int, int]]]:
    """Steps of (sequence, first token, tokens)."""
    done, steps = [0] * len(LENGTHS), []
    while done != LENGTHS:
        step = []
        for sequence, count in enumerate(counts):
            count = min(count, LENGTHS[sequence] - done[sequence])
            if count:
                step.append((sequence, done[sequence], count))
                done[sequence] += count
        steps.append(step[::-1])  # not in the order of the blocks
    return steps


@dataclass
class Pool:
    """Pages of one layer, two blocks for each sequence, full of what an earlier owner left."""

    page_bytes: int

    def __post_init__(self) -> None:
        self.pages = torch.full((8, self.page_bytes), 77, dtype=torch.uint8)
        self.blocks = torch.tensor([[5, 1], [3, 0], [7, 2]], dtype=torch.int32)

    def step(self, work: list[tuple[int, int, int]]) -> StateStep:
        starts = [0]
        for _, _, count in work:
            starts.append(starts[-1] + count)
        table = torch.stack([self.blocks[sequence] for sequence, _, _ in work])
        firsts = torch.tensor([first for _, first, _ in work])
        return StateStep(starts, firsts, {LAYER: table}, INTERVAL, {LAYER: self.pages})


def by_sequence(outputs: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.cat(rows) for rows in outputs]


def convolve(weights: ConvolutionWeights, inputs: list[torch.Tensor], counts: list[int]) -> list[torch.Tensor]:
    pool, outputs = Pool(weights.inputs.end + 8), [[] for _ in LENGTHS]
    for work in schedule(counts):
        x = torch.cat([inputs[sequence][first : first + count] for sequence, first, count in work])
        out = states.short_convolution(weights, x, pool.step(work))
        for (sequence, _, _), rows in zip(work, out.split([count for _, _, count in work]), strict=True):
            outputs[sequence].append(rows)
    assert (pool.pages[[4, 6, 0]] == 77).all(), "blocks of other sequences stay as they are"
    assert (pool.pages[:, :8] == 77).all()
    assert (pool.pages[:, -8:] == 77).all(), "and so do other parts of a page"
    return by_sequence(outputs)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_short_convolution(activation: str | None) -> None:
    weights = ConvolutionWeights(randn(WIDTH, CHANNELS), randn(CHANNELS, seed=1), activation, LAYER, 8)
    inputs = [randn(length, CHANNELS, seed=2 + length) for length in LENGTHS]
    whole = convolve(weights, inputs, CUTS[0])
    for x, actual in zip(inputs, whole, strict=True):
        padded = F.pad(x.double().T, (WIDTH - 1, 0))[None]
        expected = F.conv1d(padded, weights.kernel.double().T[:, None], weights.bias.double(), groups=CHANNELS)[0].T
        expected = expected if activation is None else F.silu(expected)
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-5)
    for counts in CUTS[1:]:
        for actual, expected in zip(convolve(weights, inputs, counts), whole, strict=True):
            assert torch.equal(actual, expected)


def delta_rule(heads: tuple[int, int, int, int]) -> DeltaRule:
    return DeltaRule(*heads, randn(heads[1], seed=4).abs() / 8, randn(heads[1], seed=5), LAYER, 64)


def delta_inputs(rule: DeltaRule) -> list[Inputs]:
    width = 2 * rule.num_key_heads * rule.key_dim + rule.num_value_heads * rule.value_dim
    return [(4.0 * randn(n, width, seed=n), randn(n, 2 * rule.num_value_heads, seed=n + 1)) for n in LENGTHS]


def apply_rule(
    rule: DeltaRule, inputs: list[tuple[torch.Tensor, torch.Tensor]], counts: list[int]
) -> list[torch.Tensor]:
    pool, outputs = Pool(rule.end), [[] for _ in LENGTHS]
    for work in schedule(counts):
        qkv, gates = (
            torch.cat([inputs[sequence][part][first : first + count] for sequence, first, count in work])
            for part in range(2)
        )
        out = states.gated_delta_rule(rule, qkv, gates, pool.step(work))
        for (sequence, _, _), rows in zip(work, out.split([count for _, _, count in work]), strict=True):
            outputs[sequence].append(rows)
    assert (pool.pages[[4, 6, 0]] == 77).all(), "blocks of other sequences stay as they are"
    assert (pool.pages[:, :64] == 77).all(), "and so do other parts of a page"
    return by_sequence(outputs)


def token_by_token(rule: DeltaRule, qkv: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """The rule as its definition has it, in float64."""
    width, group = rule.num_key_heads * rule.key_dim, rule.num_value_heads // rule.num_key_heads
    query, key, value = qkv.double().split((width, width, rule.num_value_heads * rule.value_dim), dim=1)
    query, key = (x.unflatten(1, (-1, rule.key_dim)).repeat_interleave(group, dim=1) for x in (query, key))
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    value, (beta, gate) = value.unflatten(1, (-1, rule.value_dim)), gates.double().chunk(2, dim=1)
    beta, left = beta.sigmoid(), torch.exp(-rule.rate.double() * F.softplus(gate + rule.time_bias.double()))
    state, out = torch.zeros(rule.num_value_heads, rule.key_dim, rule.value_dim, dtype=torch.float64), []
    for q, k, v, b, a in zip(query, key, value, beta, left, strict=True):
        state = state * a[:, None, None]
        state = state + torch.einsum("hk,hv->hkv", k, b[:, None] * (v - torch.einsum("hkv,hk->hv", state, k)))
        out.append(torch.einsum("hkv,hk->hv", state, q * rule.key_dim**-0.5).flatten())
    return torch.stack(out)


@pytest.mark.parametrize("heads", HEADS)
def test_gated_delta_rule(heads: tuple[int, int, int, int]) -> None:
    rule = delta_rule(heads)
    inputs = delta_inputs(rule)
    for (qkv, gates), actual in zip(inputs, apply_rule(rule, inputs, CUTS[1]), strict=True):
        expected = token_by_token(rule, qkv, gates)
        assert expected.abs().max() > 0.01, "results too small to compare"
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=5e-6)


@pytest.mark.usefixtures("fixed_order")
def test_a_delta_rule_has_the_same_bits_however_prompts_are_cut() -> None:
    rule = delta_rule(HEADS[0])
    inputs = delta_inputs(rule)
    whole = apply_rule(rule, inputs, CUTS[0])
    for counts in CUTS[1:]:
        for actual, expected in zip(apply_rule(rule, inputs, counts), whole, strict=True):
            assert torch.equal(actual, expected)


def test_equal_keys_that_are_never_forgotten() -> None:
    """The hardest sums: every token takes back what the one before it wrote, without decay."""
    rule = DeltaRule(1, 1, 16, 16, torch.zeros(1), torch.zeros(1), LAYER, 64)
    inputs = [
        (torch.cat((randn(1, 32).expand(n, 32), randn(n, 16, seed=n)), 1), torch.full((n, 2), 9.0)) for n in LENGTHS
    ]
    for (qkv, gates), actual in zip(inputs, apply_rule(rule, inputs, CUTS[0]), strict=True):
        torch.testing.assert_close(actual.double(), token_by_token(rule, qkv, gates), rtol=0, atol=5e-6)


def test_gated_norm() -> None:
    weights = GatedNormWeights(6, randn(6, seed=1), 1e-6)
    x, gate = randn(5, 18, seed=2), randn(5, 18, seed=3)
    heads = x.double().unflatten(1, (3, 6))
    expected = F.rms_norm(heads, (6,), weights.weight.double(), 1e-6).flatten(1) * F.silu(gate.double())
    torch.testing.assert_close(TorchStates().gated_norm(weights, x, gate).double(), expected, rtol=0, atol=5e-6)
