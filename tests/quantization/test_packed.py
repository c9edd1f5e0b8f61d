"""Weights on their way into the native kernels' panels: parts, formats, and what becomes of mixtures."""

from __future__ import annotations

import logging

import pytest
import torch

from quire.errors import ModelLoadError
from quire.kernels.arguments import ExpertWeights, Gating
from quire.kernels.cpu import _native
from quire.kernels.cpu.recorder import Recorder
from quire.kernels.cpu.runtime import NativeRuntime
from quire.quantization.block_weight import BlockFormatName, BlockWeight
from quire.quantization.integer_weight import IntegerWeight
from quire.quantization.interface import LinearShape
from quire.quantization.merge import merge_rows
from quire.quantization.packed import PackedLinear, PackedParameters
from quire.quantization.quantize import quantize_rows
from quire.quantization.weight_format import WeightFormat
from tests.kernels.cpu.test_blocks import WIDTHS, random_blocks, taken_apart

K = 64


def randn(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, K, generator=torch.Generator().manual_seed(seed))


def create(method: PackedLinear, rows: int, *, gated: bool = False, bias: bool = False) -> PackedParameters:
    activation = "silu" if gated else None
    return method.create(LinearShape(K, rows, bias, torch.float32, torch.device("cpu"), activation, gated))


def weights(parameters: PackedParameters) -> torch.Tensor:
    assert parameters.matrix is not None
    assert not parameters.pending
    return parameters.matrix.dequantize()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("gated", [False, True])
def test_floats_are_packed_part_by_part_in_any_order(dtype: str, gated: bool) -> None:
    method = PackedLinear(WeightFormat(dtype))
    parameters = create(method, 40, gated=gated)
    first, second = randn(20, 1), randn(20, 2)
    method.load_rows(parameters, "weight", second, 20, 20)
    method.load_rows(parameters, "weight", first, 0, 20)
    expected = torch.cat((first, second)).to(getattr(torch, dtype)).float()
    assert torch.equal(weights(parameters), expected)


@pytest.mark.parametrize(("bits", "group_size"), [(8, None), (4, 32)])
def test_floats_are_rounded_while_they_are_loaded(bits: int, group_size: int | None) -> None:
    method = PackedLinear(WeightFormat("bfloat16", bits, group_size))
    parameters = create(method, 24)
    parts = [randn(16, 1), randn(8, 2)]
    method.load_rows(parameters, "weight", parts[0], 0, 16)
    assert parameters.matrix is None
    method.load_rows(parameters, "weight", parts[1], 16, 8)
    expected = [quantize_rows(part, bits, group_size, name="w").dequantize() for part in parts]
    torch.testing.assert_close(weights(parameters), torch.cat(expected), rtol=0, atol=1e-6)
    assert parameters.matrix is not None
    assert not parameters.matrix.integer_activations


def test_rounded_activations_are_a_property_of_the_matrix() -> None:
    method = PackedLinear(WeightFormat("float32", 8, None, rounded_activations=True))
    parameters = create(method, 16)
    method.load_rows(parameters, "weight", randn(16, 1), 0, 16)
    assert parameters.matrix is not None
    assert parameters.matrix.integer_activations


def test_parts_of_different_formats_are_brought_to_one_exactly() -> None:
    """As GGUF files mix them: query and key in 4 bits, value in 8 with smaller groups."""
    four, eight = quantize_rows(randn(16, 1), 4, 32, name="q"), quantize_rows(randn(8, 2), 8, None, name="v")
    eight = IntegerWeight(eight.values, 8, 16, eight.scales.repeat(1, K // 16))
    method = PackedLinear(WeightFormat("float32"))
    parameters = create(method, 24)
    method.load_rows(parameters, "weight", eight, 16, 8)
    method.load_rows(parameters, "weight", four, 0, 16)
    assert parameters.matrix is not None
    assert parameters.matrix.type == _native.WeightType.I8
    assert parameters.matrix.group_size == 16
    expected = torch.cat((four.dequantize(), eight.dequantize()))
    torch.testing.assert_close(weights(parameters), expected, rtol=0, atol=1e-6)


def block_weight(name: BlockFormatName, rows: int, released: list[str]) -> BlockWeight:
    blocks = random_blocks(name, rows)
    return BlockWeight(
        torch.from_numpy(blocks.reshape(rows, -1)),
        name,
        WIDTHS[name],
        unpack=lambda part: taken_apart(name, part.numpy().reshape(len(part), -1, blocks.shape[2])),
        release=lambda: released.append(name),
    )


@pytest.mark.parametrize("has_residual", [False, True])
def test_blocks_of_several_formats_are_a_matrix_each(has_residual: bool) -> None:
    """Queries and keys in one format, values in another: the file's bytes, and the product of each in its columns."""
    released: list[str] = []
    parts = [block_weight("Q4_K", 40, released), block_weight("Q4_K", 24, released), block_weight("Q6_K", 20, released)]
    method = PackedLinear(WeightFormat("float32"))
    width, rows, bias = 512, 84, torch.randn(84, generator=torch.Generator().manual_seed(1))
    parameters = method.create(LinearShape(width, rows, True, torch.float32, torch.device("cpu"), "silu"))
    for first, part in ((64, parts[2]), (0, parts[0]), (40, parts[1])):
        method.load_rows(parameters, "weight", part, first, part.shape[0])
    method.load_rows(parameters, "bias", bias, 0, rows)
    first, second = parameters.matrices
    assert released == ["Q4_K", "Q4_K", "Q6_K"]
    assert (first.out_features, second.out_features) == (64, 20)
    x, beside = torch.randn(3, width), torch.randn(3, 96)
    recorder = Recorder()
    given, residual = recorder.external(width, width), recorder.external(rows, 96)
    out = method.apply(parameters, given, residual if has_residual else None)
    runtime = NativeRuntime("auto", 1)
    program = recorder.finish_program(out, runtime, 3)
    program.run(3, externals=[x, beside])
    weight = torch.cat([part.dequantize() for part in parts]).double()
    expected = torch.nn.functional.silu(x.double() @ weight.T + bias) + (beside[:, :rows] if has_residual else 0)
    torch.testing.assert_close(program.result(3).double(), expected, rtol=1e-4, atol=1e-4)


def gated_product(parts: list[BlockWeight], bias: torch.Tensor, x: torch.Tensor, num_matrices: int) -> torch.Tensor:
    """silu(gate) * up of x, packed as `num_matrices`."""
    method = PackedLinear(WeightFormat("float32"))
    half = parts[0].shape[0]
    shape = LinearShape(x.shape[1], 2 * half, True, torch.float32, torch.device("cpu"), "silu", True)
    parameters = method.create(shape)
    for first, part in zip((0, half), parts, strict=True):
        method.load_rows(parameters, "weight", part, first, half)
    method.load_rows(parameters, "bias", bias, 0, 2 * half)
    assert len(parameters.matrices) == num_matrices
    recorder = Recorder()
    out = method.apply(parameters, recorder.external(x.shape[1], x.shape[1]))
    assert out.width == half
    program = recorder.finish_program(out, NativeRuntime("auto", 1), len(x))
    program.run(len(x), externals=[x])
    return program.result(len(x)).clone()


@pytest.mark.parametrize("kinds", [("Q4_K", "Q6_K"), ("Q6_K", "Q5_K")])
def test_gate_and_up_of_two_formats_are_a_matrix_each(kinds: tuple[BlockFormatName, BlockFormatName]) -> None:
    """The bytes of the file, and the product of one gated matrix."""
    released: list[str] = []
    parts = [block_weight(kind, 48, released) for kind in kinds]
    bias, x = torch.randn(96, generator=torch.Generator().manual_seed(1)), torch.randn(3, 512)
    result = gated_product(parts, bias, x, 2)
    assert released == list(kinds)
    weight = torch.cat([part.dequantize() for part in parts]).double()
    gate, up = (x.double() @ weight.T + bias).chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max()))


def test_gate_and_up_of_experts_of_two_formats_are_a_matrix_each() -> None:
    parts = [block_weight("Q4_K", 32, []), block_weight("Q6_K", 32, [])]
    method = PackedLinear(WeightFormat("float32"))
    shape = LinearShape(512, 64, False, torch.float32, torch.device("cpu"), "silu", True)
    (parameters,) = method.create_stack(shape, 1)
    for first, part in zip((0, 32), parts, strict=True):
        method.load_rows(parameters, "weight", part, first, 32)
    for matrix, part in zip(parameters.matrices, parts, strict=True):
        assert torch.equal(matrix.dequantize(), part.dequantize())


def test_experts_of_a_layer_are_all_in_two_formats_or_none() -> None:
    method = PackedLinear(WeightFormat("float32"))
    wide = LinearShape(512, 64, False, torch.float32, torch.device("cpu"), "silu", True)
    stack = method.create_stack(wide, 2)
    for parameters, kinds in zip(stack, (("Q4_K", "Q4_K"), ("Q4_K", "Q6_K")), strict=True):
        for first, kind in zip((0, 32), kinds, strict=True):
            method.load_rows(parameters, "weight", block_weight(kind, 32, []), first, 32)
    weights_of_layer = ExpertWeights(stack, stack, Gating("silu"))
    recorder = Recorder()
    with pytest.raises(ModelLoadError, match="experts of a layer"):
        method.apply_experts(weights_of_layer, recorder.external(512, 512), recorder.external(4, 4))


@pytest.mark.parametrize("integers_first", [True, False])
def test_a_floating_point_part_makes_the_matrix_floating_point(integers_first: bool) -> None:
    dense, integers = randn(8, 1), quantize_rows(randn(8, 2), 8, None, name="k")
    method = PackedLinear(WeightFormat("float32"))
    parameters = create(method, 16)
    for row, part in [(8, integers), (0, dense)] if integers_first else [(0, dense), (8, integers)]:
        method.load_rows(parameters, "weight", part, row, 8)
    assert torch.equal(weights(parameters), torch.cat((dense, integers.dequantize())))


def reordered(weight: IntegerWeight, seed: int) -> IntegerWeight:
    order = torch.randperm(K, generator=torch.Generator().manual_seed(seed)).int()
    return IntegerWeight(weight.values, weight.bits, weight.group_size, weight.scales, weight.offsets, order)


def test_one_order_of_the_columns_is_kept() -> None:
    parts = [reordered(quantize_rows(randn(8, seed), 4, 32, name="w"), seed=5) for seed in (1, 2)]
    method = PackedLinear(WeightFormat("float32"))
    parameters = create(method, 16)
    for row, part in zip((0, 8), parts, strict=True):
        method.load_rows(parameters, "weight", part, row, 8)
    assert parameters.matrix is not None
    assert parameters.matrix.column_order is not None
    expected = torch.cat([part.dequantize() for part in parts])
    torch.testing.assert_close(weights(parameters), expected, rtol=0, atol=1e-6)


def test_different_orders_of_the_columns_end_in_floating_point_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    parts = [reordered(quantize_rows(randn(8, seed), 4, 32, name="w"), seed) for seed in (1, 2)]
    assert merge_rows(parts) is None
    method = PackedLinear(WeightFormat("float32"))
    parameters = create(method, 16)
    with caplog.at_level(logging.WARNING, logger="quire"):
        for row, part in zip((0, 8), parts, strict=True):
            method.load_rows(parameters, "weight", part, row, 8)
    assert "kept as floating point" in caplog.text
    assert torch.equal(weights(parameters), torch.cat([part.dequantize() for part in parts]))


def test_a_bias_may_come_before_or_after_the_weights() -> None:
    method = PackedLinear(WeightFormat("float32"))
    parameters = create(method, 8, bias=True)
    method.load_rows(parameters, "bias", torch.arange(4.0), 0, 4)
    method.load_rows(parameters, "weight", randn(8, 1), 0, 8)
    method.load_rows(parameters, "bias", torch.arange(4.0), 4, 4)
    assert parameters.bias is not None
    assert parameters.bias.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("weight_format", "expected"),
    [
        (WeightFormat("float32"), 4 * 40 * K),
        (WeightFormat("bfloat16"), 2 * 40 * K),
        (WeightFormat("bfloat16", 8, None), 40 * K + 40 * 4),
        (WeightFormat("bfloat16", 4, 32), 40 * K // 2 + 40 * (K // 32) * 4),
    ],
)
def test_stored_bytes(weight_format: WeightFormat, expected: int) -> None:
    assert PackedLinear(weight_format).stored_bytes((40, K)) == expected
