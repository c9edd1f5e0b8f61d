"""Short convolutions, gated delta rules and gated norms against the same thing written out in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from quire.kernels.arguments import ConvolutionWeights, DeltaRule, GatedNormWeights
from quire.layers.states import gated_norm
from tests.layers.state_steps import (
    CHANNELS,
    CUTS,
    HEADS,
    LAYER,
    LENGTHS,
    WIDTH,
    apply_rule,
    convolve,
    delta_inputs,
    delta_rule,
    expected_convolution,
    randn,
    token_by_token,
)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_short_convolution(activation: str | None) -> None:
    weights = ConvolutionWeights(randn(WIDTH, CHANNELS), randn(CHANNELS, seed=1), activation, LAYER, 8)
    inputs = [randn(length, CHANNELS, seed=2 + length) for length in LENGTHS]
    whole = convolve(weights, inputs, CUTS[0])
    for x, actual in zip(inputs, whole, strict=True):
        torch.testing.assert_close(actual.double(), expected_convolution(weights, x), rtol=0, atol=1e-5)
    for counts in CUTS[1:]:
        for actual, expected in zip(convolve(weights, inputs, counts), whole, strict=True):
            assert torch.equal(actual, expected)


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
    for counts in CUTS[1:3]:
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
    torch.testing.assert_close(gated_norm(weights, x, gate).double(), expected, rtol=0, atol=5e-6)
