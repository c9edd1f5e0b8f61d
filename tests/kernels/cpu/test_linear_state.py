"""Native kernels of layers that keep a state, against float64 and against themselves in other steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from quire.attention.interface import StateStep
from quire.kernels.arguments import ConvolutionWeights, DeltaRule, GatedNormWeights
from quire.kernels.cpu import _native
from quire.kernels.cpu.linear_state import StatePlans
from quire.kernels.cpu.recorder import Buffer, RecordedProgram, Recorder
from quire.kernels.cpu.runtime import NativeRuntime
from quire.layers.native import NativeOperations
from quire.layers.operations import TorchOperations
from tests.layers.state_steps import (
    CUTS,
    HEADS,
    INTERVAL,
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

ISAS = [isa for isa in _native.available_isas() if isa in ("portable", "avx2", "avx512")]
"""The others have the kernels of one of these."""
MAX_ROWS = 512


@cache
def runtime(isa: str) -> NativeRuntime:
    """One for each instruction set: starting threads is what costs time."""
    return NativeRuntime(isa, 2)


class OneOperation:
    """A program of one operation of NativeOperations, over tensors."""

    def __init__(self, isa: str, widths: list[int], record: Callable[..., Buffer]) -> None:
        recorder = Recorder()
        inputs = [recorder.external(width, width) for width in widths]
        self._result = record(*inputs)
        recorder.redirect(self._result, recorder.external(self._result.width, self._result.width + 16))
        self._program: RecordedProgram = recorder.finish_program(self._result, runtime(isa), MAX_ROWS)
        self._plans = StatePlans(recorder.state_layers)

    def __call__(self, *inputs: torch.Tensor, step: StateStep | None = None) -> torch.Tensor:
        rows, out = len(inputs[0]), torch.full((MAX_ROWS, self._result.width + 16), 55.0)
        plan = None if step is None else self._plans.set(step)
        self._program.run(rows, externals=(*(each.contiguous() for each in inputs), out), states=plan)
        assert (out[rows:] == 55.0).all(), "rows beyond the step are not written"
        assert (out[:, self._result.width :] == 55.0).all(), "nor is what lies between two rows"
        return out[:rows, : self._result.width].clone()


def native_rule(
    isa: str, rule: DeltaRule
) -> Callable[[DeltaRule, torch.Tensor, torch.Tensor, StateStep], torch.Tensor]:
    width = 2 * rule.num_key_heads * rule.key_dim + rule.num_value_heads * rule.value_dim
    operation = OneOperation(
        isa,
        [width, 2 * rule.num_value_heads],
        lambda qkv, gates: NativeOperations().gated_delta_rule(rule, qkv, gates, None),
    )
    return lambda rule, qkv, gates, step: operation(qkv, gates, step=step)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("heads", [*HEADS, (1, 2, 128, 128)])
def test_gated_delta_rule(heads: tuple[int, int, int, int], isa: str) -> None:
    rule = delta_rule(heads)
    inputs, apply = delta_inputs(rule), native_rule(isa, rule)
    whole = apply_rule(rule, inputs, CUTS[0], apply)
    for (qkv, gates), actual in zip(inputs, whole, strict=True):
        torch.testing.assert_close(actual.double(), token_by_token(rule, qkv, gates), rtol=0, atol=5e-6)
    for counts in CUTS[1:]:
        for actual, expected in zip(apply_rule(rule, inputs, counts, apply), whole, strict=True):
            assert torch.equal(actual, expected), f"other bits in steps of {counts}"


@pytest.mark.parametrize("isa", ISAS)
def test_short_convolution(isa: str) -> None:
    channels = 37
    for bias, activation in ((None, "silu"), (randn(channels, seed=1), None)):
        weights = ConvolutionWeights(randn(WIDTH, channels), bias, activation, LAYER, 8)
        operation = OneOperation(
            isa, [channels], lambda x, own=weights: NativeOperations().short_convolution(own, x, None)
        )
        inputs = [randn(length, channels, seed=2 + length) for length in LENGTHS]

        def apply(
            weights: ConvolutionWeights, x: torch.Tensor, step: StateStep, own: OneOperation = operation
        ) -> torch.Tensor:
            return own(x, step=step)

        whole = convolve(weights, inputs, CUTS[0], apply)
        for x, actual in zip(inputs, whole, strict=True):
            torch.testing.assert_close(actual.double(), expected_convolution(weights, x), rtol=0, atol=1e-5)
        for counts in CUTS[1:]:
            for actual, expected in zip(convolve(weights, inputs, counts, apply), whole, strict=True):
                assert torch.equal(actual, expected)


@pytest.mark.parametrize("isa", ISAS)
def test_gated_norm(isa: str) -> None:
    weights = GatedNormWeights(20, randn(20, seed=1), 1e-6)
    operation = OneOperation(isa, [60, 60], lambda x, gate: NativeOperations().gated_norm(weights, x, gate))
    x, gate = randn(33, 60, seed=2), 3.0 * randn(33, 60, seed=3)
    torch.testing.assert_close(operation(x, gate), TorchOperations().gated_norm(weights, x, gate), rtol=0, atol=5e-6)


def test_a_snapshot_is_read_and_never_written() -> None:
    """Two sequences go on from the page of one: they have the bits of a sequence that computed it all."""
    rule = delta_rule(HEADS[0])
    (qkv, gates), apply = delta_inputs(rule)[0], native_rule("auto", rule)
    whole = apply_rule(rule, [(qkv, gates)] * 3, CUTS[0], apply)[0]
    pool = Pool(rule.end_offset)
    apply(rule, qkv[:INTERVAL], gates[:INTERVAL], pool.step([(0, 0, INTERVAL)]))
    snapshot = pool.pages[5].clone()
    pool.blocks[2, 0] = pool.blocks[0, 0]
    work = [(0, INTERVAL, 72), (2, INTERVAL, 3)]
    parts = [slice(INTERVAL, 200), slice(INTERVAL, INTERVAL + 3)]
    out = apply(rule, *(torch.cat([x[part] for part in parts]) for x in (qkv, gates)), pool.step(work))
    assert torch.equal(out, torch.cat((whole[parts[0]], whole[parts[1]])))
    assert torch.equal(pool.pages[5], snapshot)


def test_what_lies_outside_the_pool_is_refused() -> None:
    rule = delta_rule(HEADS[0])
    (qkv, gates), apply = delta_inputs(rule)[0], native_rule("auto", rule)
    pool = Pool(rule.end_offset)
    pool.blocks[0, 1] = len(pool.pages)
    with pytest.raises(ValueError, match="a block outside the pool"):
        apply(rule, qkv, gates, pool.step([(0, 0, 200)]))
    with pytest.raises(ValueError, match="no entry for a sequence's last token"):
        apply(rule, qkv, gates, pool.step([(0, 100, 200)]))
    with pytest.raises(ValueError, match="not for these rows and this memory"):
        apply(rule, qkv[:9], gates[:9], Pool(rule.end_offset - 4).step([(1, 0, 9)]))
    with pytest.raises(ValueError, match="not for these rows and this memory"):
        apply(rule, qkv[:9], gates[:9], pool.step([(1, 0, 8)]))


def test_heads_that_the_kernels_do_not_have() -> None:
    with pytest.raises(ValueError, match="heads of a delta rule"):
        native_rule("auto", delta_rule((1, 1, 16, 300)))
    weights = ConvolutionWeights(randn(9, 4), None, None, LAYER, 0)
    with pytest.raises(ValueError, match="too many taps"):
        OneOperation("auto", [4], lambda x: NativeOperations().short_convolution(weights, x, None))
