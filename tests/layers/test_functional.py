"""Short convolutions and gated delta rules against the same thing written out in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from quire.attention.interface import StateStep
from quire.layers import functional
from quire.layers.functional import ConvolutionWeights, DeltaRule, StatePart

LENGTHS = [9, 1, 14]
CHUNKS = [[9, 1, 14], [1, 0, 3], [4, 1, 10], [2, 0, 5]]
"""Tokens of each sequence in a step; a schedule repeats one until all sequences are at their ends."""


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def schedule(counts: list[int]) -> list[list[tuple[int, int, int]]]:
    """Steps of (sequence, first token, tokens)."""
    done, steps = [0] * len(LENGTHS), []
    while done != LENGTHS:
        step = []
        for sequence, count in enumerate(counts):
            count = min(max(count, 1), LENGTHS[sequence] - done[sequence])
            if count:
                step.append((sequence, done[sequence], count))
                done[sequence] += count
        steps.append(step[::-1])  # not in the order of the slots
    return steps


def state_step(step: list[tuple[int, int, int]], page: torch.Tensor) -> StateStep:
    starts = [0]
    for _, _, count in step:
        starts.append(starts[-1] + count)
    tables = torch.tensor([[2 * sequence + 1] for sequence, _, _ in step], dtype=torch.int32)
    return StateStep(starts, torch.tensor([first for _, first, _ in step]), {3: tables}, 64, {3: page})


@pytest.mark.parametrize("counts", CHUNKS)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_short_convolution(counts: list[int], activation: str | None) -> None:
    part = StatePart(3, 8, (6, 3))
    weights = ConvolutionWeights(randn(6, 4), randn(6, seed=1), activation, part)
    inputs = [randn(length, 6, seed=2 + length) for length in LENGTHS]
    page = torch.full((8, 8 + part.nbytes + 4), 77, dtype=torch.uint8)
    outputs: list[list[torch.Tensor]] = [[] for _ in LENGTHS]
    for step in schedule(counts):
        x = torch.cat([inputs[sequence][first : first + count] for sequence, first, count in step])
        out = functional.short_convolution(weights, x, state_step(step, page))
        for (sequence, _, _), rows in zip(step, out.split([count for _, _, count in step]), strict=True):
            outputs[sequence].append(rows)
    for x, parts in zip(inputs, outputs, strict=True):
        padded = F.pad(x.double().T, (3, 0))[None]
        expected = F.conv1d(padded, weights.kernel.double()[:, None], weights.bias.double(), groups=6)[0].T
        expected = expected if activation is None else F.silu(expected)
        torch.testing.assert_close(torch.cat(parts).double(), expected, rtol=0, atol=1e-5)
    untouched = torch.ones(8, dtype=torch.bool)
    untouched[[1, 3, 5]] = False
    assert (page[untouched] == 77).all(), "slots of other sequences stay as they are"
    assert (page[:, :8] == 77).all()
    assert (page[:, -4:] == 77).all(), "and so do other parts of a state"


@pytest.mark.parametrize("counts", CHUNKS)
def test_gated_delta_rule(counts: list[int]) -> None:
    heads, key_dim, value_dim = 2, 5, 3
    part = StatePart(3, 0, (heads, key_dim, value_dim))
    rule = DeltaRule(heads, key_dim, value_dim, part)
    widths = (heads * key_dim, heads * key_dim, heads * value_dim, heads, heads)
    inputs = [[randn(length, width, seed=10 * length + i) for i, width in enumerate(widths)] for length in LENGTHS]
    for q, k, _, decay, beta in inputs:
        q /= 2
        k /= 3
        decay.abs_().neg_()
        beta.sigmoid_()
    page = torch.full((8, part.nbytes), 77, dtype=torch.uint8)
    outputs: list[list[torch.Tensor]] = [[] for _ in LENGTHS]
    for step in schedule(counts):
        parts = [
            torch.cat([inputs[sequence][i][first : first + count] for sequence, first, count in step]) for i in range(5)
        ]
        out = functional.gated_delta_rule(rule, *parts, state_step(step, page))
        for (sequence, _, _), rows in zip(step, out.split([count for _, _, count in step]), strict=True):
            outputs[sequence].append(rows)
    for (q, k, v, decay, beta), rows in zip(inputs, outputs, strict=True):
        state = torch.zeros(heads, key_dim, value_dim, dtype=torch.float64)
        for token, actual in enumerate(torch.cat(rows)):
            for head in range(heads):
                key = k[token].view(heads, key_dim)[head].double()
                value = v[token].view(heads, value_dim)[head].double()
                state[head] *= torch.exp(decay[token, head].double())
                state[head] += torch.outer(key, beta[token, head].double() * (value - state[head].T @ key))
                expected = state[head].T @ q[token].view(heads, key_dim)[head].double()
                torch.testing.assert_close(actual.view(heads, value_dim)[head].double(), expected, rtol=0, atol=1e-5)
