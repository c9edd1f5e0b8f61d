"""Short convolutions, gated delta rules and gated norms in Triton: against float64, and the same bits however prompts
are cut into steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from quire.attention.device_batch import DeviceStateStep, StateKernels
from quire.attention.interface import StateStep
from quire.kernels.arguments import ConvolutionWeights, DeltaRule, GatedNormWeights
from quire.kernels.triton.linear_state import gated_delta_rule, gated_norm, short_convolution
from tests.layers.state_steps import (
    CHANNELS,
    HEADS,
    LAYER,
    LENGTHS,
    WIDTH,
    Pool,
    apply_rule,
    convolve,
    delta_inputs,
    delta_rule,
    expected_convolution,
    randn,
    token_by_token,
)
from tests.long import all_but_long, one_in
from tests.worker.platform.device_states import on_device

pytestmark = pytest.mark.usefixtures("default_device")

WHOLE = [200, 1, 70]
CUTS = [[65, 1, 63], [199, 1, 69]]
"""As those of `state_steps`: across borders and blocks, and single tokens at the end."""


def run(kernels: StateKernels, weights: Any, width: int, states: StateStep, *inputs: torch.Tensor) -> torch.Tensor:
    """The same step on a device, padded by two sequences and three tokens of NaN."""
    step: DeviceStateStep = on_device(states, num_seqs=2, num_tokens=3)
    padded = [F.pad(x, (0, 0, 0, 3), value=torch.nan) for x in inputs]
    out = torch.full((len(padded[0]), width), 9.0)
    kernels(weights, *padded, out, step)
    assert (out[-3:] == 9.0).all(), "padding is not written"
    return out[:-3]


def convolution(weights: ConvolutionWeights, x: torch.Tensor, states: StateStep) -> torch.Tensor:
    return run(short_convolution, weights, x.shape[1], states, x)


def rule_of(rule: DeltaRule, qkv: torch.Tensor, gates: torch.Tensor, states: StateStep) -> torch.Tensor:
    return run(gated_delta_rule, rule, rule.num_value_heads * rule.value_dim, states, qkv, gates)


@pytest.mark.parametrize("activation", all_but_long([None, "silu"], ["silu"]))
def test_short_convolution(activation: str | None) -> None:
    bias = None if activation is None else randn(CHANNELS, seed=1)
    weights = ConvolutionWeights(randn(WIDTH, CHANNELS), bias, activation, LAYER, 8)
    inputs = [randn(length, CHANNELS, seed=2 + length) for length in LENGTHS]
    whole = convolve(weights, inputs, WHOLE, convolution)
    for x, actual in zip(inputs, whole, strict=True):
        torch.testing.assert_close(actual.double(), expected_convolution(weights, x), rtol=0, atol=1e-5)
    for counts in CUTS if activation is None else []:
        for actual, expected in zip(convolve(weights, inputs, counts, convolution), whole, strict=True):
            assert torch.equal(actual, expected)


@pytest.mark.parametrize(("heads", "cuts"), one_in(3, [(HEADS[0], CUTS[:1]), (HEADS[1], CUTS[1:]), (HEADS[2], [])]))
def test_gated_delta_rule(heads: tuple[int, int, int, int], cuts: list[list[int]]) -> None:
    rule = delta_rule(heads)
    inputs = delta_inputs(rule)
    whole = apply_rule(rule, inputs, WHOLE, rule_of)
    for (qkv, gates), actual in zip(inputs, whole, strict=True):
        expected = token_by_token(rule, qkv, gates)
        assert expected.abs().max() > 0.01, "results too small to compare"
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=5e-6)
    for counts in cuts:
        for actual, expected in zip(apply_rule(rule, inputs, counts, rule_of), whole, strict=True):
            assert torch.equal(actual, expected)


def test_equal_keys_that_are_never_forgotten() -> None:
    """The hardest sums: every token takes back what the one before it wrote, without decay."""
    rule = DeltaRule(1, 1, 16, 16, torch.zeros(1), torch.zeros(1), LAYER, 64)
    inputs = [
        (torch.cat((randn(1, 32).expand(n, 32), randn(n, 16, seed=n)), 1), torch.full((n, 2), 9.0)) for n in LENGTHS
    ]
    for (qkv, gates), actual in zip(inputs, apply_rule(rule, inputs, WHOLE, rule_of), strict=True):
        torch.testing.assert_close(actual.double(), token_by_token(rule, qkv, gates), rtol=0, atol=5e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.bfloat16, 0.05)])
def test_gated_norm(dtype: torch.dtype, tolerance: float) -> None:
    weights = GatedNormWeights(6, randn(6, seed=1).to(dtype), 1e-6)
    x, gate = randn(5, 18, seed=2).to(dtype), randn(5, 18, seed=3).to(dtype)
    heads = x.double().unflatten(1, (3, 6))
    expected = F.rms_norm(heads, (6,), weights.weight.double(), 1e-6).flatten(1) * F.silu(gate.double())
    torch.testing.assert_close(gated_norm(weights, x, gate).double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("number", all_but_long(range(len(HEADS)), [0]))
def test_decoded_tokens(number: int) -> None:
    """Single tokens by the kernel that decodes, beside a prompt and alone, over a border and over a block's end."""
    heads = HEADS[number]
    rule = delta_rule(heads)
    inputs, pool = delta_inputs(rule), Pool(rule.end_offset)
    done, found = [0, 0, 0], [list[torch.Tensor]() for _ in LENGTHS]
    steps = [[126, 0, 61], *([1, 0, 1] for _ in range(5)), [1, 1, 0]]
    for counts in steps:
        work = [(each, done[each], count) for each, count in enumerate(counts) if count]
        qkv, gates = (
            torch.cat([inputs[each][part][first : first + count] for each, first, count in work]) for part in range(2)
        )
        step: DeviceStateStep = on_device(pool.step(work), num_seqs=1, num_tokens=1)
        step = replace(step, batch_invariant=False)
        out = torch.full((len(qkv) + 1, heads[1] * heads[3]), 9.0)
        gated_delta_rule(rule, F.pad(qkv, (0, 0, 0, 1)), F.pad(gates, (0, 0, 0, 1)), out, step)
        assert (out[-1] == 9.0).all(), "padding is not written"
        for (each, _, count), rows in zip(work, out[:-1].split([count for _, _, count in work]), strict=True):
            found[each].append(rows)
            done[each] += count
    for each, (qkv, gates) in enumerate(inputs):
        expected = token_by_token(rule, qkv[: done[each]], gates[: done[each]])
        torch.testing.assert_close(torch.cat(found[each]).double(), expected, rtol=0, atol=5e-6)
