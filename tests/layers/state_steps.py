"""Sequences whose states are computed in steps of every kind, and what the results should be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from quire.attention.interface import StateStep
from quire.kernels.arguments import ConvolutionWeights, DeltaRule
from quire.layers.states import gated_delta_rule, short_convolution

LAYER, INTERVAL, LENGTHS = 3, 128, [200, 1, 70]
CUTS = [[200, 1, 70], [7, 1, 64], [64, 1, 1], [128, 1, 3], [65, 1, 63]]
"""Tokens of each sequence in a step; a schedule repeats one until all sequences are at their ends."""
WIDTH, CHANNELS = 4, 6
HEADS = [(2, 4, 8, 12), (1, 1, 24, 40), (1, 3, 16, 16)]
"""Key heads, value heads, elements of a key, elements of a value."""
Inputs = tuple[torch.Tensor, torch.Tensor]
"""Queries, keys and values, and gates, of one sequence."""
Convolve = Callable[[ConvolutionWeights, torch.Tensor, StateStep], torch.Tensor]
ApplyRule = Callable[[DeltaRule, torch.Tensor, torch.Tensor, StateStep], torch.Tensor]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random numbers, the same on each device."""
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return numbers.to(torch.get_default_device())


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


def convolve(
    weights: ConvolutionWeights, inputs: list[torch.Tensor], counts: list[int], apply: Convolve = short_convolution
) -> list[torch.Tensor]:
    """The results of each sequence, computed in a schedule's steps by `apply`."""
    pool, outputs = Pool(weights.inputs.end_offset + 8), [[] for _ in LENGTHS]
    for work in schedule(counts):
        x = torch.cat([inputs[sequence][first : first + count] for sequence, first, count in work])
        out = apply(weights, x, pool.step(work))
        for (sequence, _, _), rows in zip(work, out.split([count for _, _, count in work]), strict=True):
            outputs[sequence].append(rows)
    assert (pool.pages[[4, 6, 0]] == 77).all(), "blocks of other sequences stay as they are"
    assert (pool.pages[:, :8] == 77).all()
    assert (pool.pages[:, -8:] == 77).all(), "and so do other parts of a page"
    return by_sequence(outputs)


def expected_convolution(weights: ConvolutionWeights, x: torch.Tensor) -> torch.Tensor:
    """In float64."""
    padded = F.pad(x.double().T, (WIDTH - 1, 0))[None]
    bias = None if weights.bias is None else weights.bias.double()
    out = F.conv1d(padded, weights.kernel.double().T[:, None], bias, groups=x.shape[1])[0].T
    return out if weights.activation is None else F.silu(out)


def delta_rule(heads: tuple[int, int, int, int]) -> DeltaRule:
    return DeltaRule(*heads, randn(heads[1], seed=4).abs() / 8, randn(heads[1], seed=5), LAYER, 64)


def delta_inputs(rule: DeltaRule) -> list[Inputs]:
    width = 2 * rule.num_key_heads * rule.key_dim + rule.num_value_heads * rule.value_dim
    return [(4.0 * randn(n, width, seed=n), randn(n, 2 * rule.num_value_heads, seed=n + 1)) for n in LENGTHS]


def apply_rule(
    rule: DeltaRule, inputs: list[Inputs], counts: list[int], apply: ApplyRule = gated_delta_rule
) -> list[torch.Tensor]:
    """The results of each sequence, computed in a schedule's steps by `apply`."""
    pool, outputs = Pool(rule.end_offset), [[] for _ in LENGTHS]
    for work in schedule(counts):
        qkv, gates = (
            torch.cat([inputs[sequence][part][first : first + count] for sequence, first, count in work])
            for part in range(2)
        )
        out = apply(rule, qkv, gates, pool.step(work))
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
