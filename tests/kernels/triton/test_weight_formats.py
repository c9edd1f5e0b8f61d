"""Products with quantised matrices against float64 over what the formats mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from quire.kernels.arguments import ExpertWeights, Gating, Routing
from quire.kernels.experts import experts, route
from quire.kernels.triton.experts import ExpertMatrices, apply_experts
from quire.kernels.triton.matmul import head_matmul, matmul
from quire.kernels.triton.quantize_rows import round_rows, round_to_e4m3
from quire.kernels.triton.runtime import INTERPRETED
from quire.kernels.triton.weight_formats import StoredMatrix
from quire.quantization.float_weight import Float4Weight, Float8Weight
from quire.quantization.integer_weight import IntegerWeight
from quire.quantization.quantize import quantize_rows
from quire.quantization.quantize_floats import quantize_float8, quantize_mxfp4
from quire.quantization.quantized_weight import QuantizedWeight
from quire.quantization.stored_parts import empty_stack, put, store_parts
from tests.kernels.triton.helpers import assert_near, random, spread_rows
from tests.long import one_in

Make = Callable[[torch.Tensor], QuantizedWeight]


def float8_blocks(size: int) -> Make:
    def make(weight: torch.Tensor) -> Float8Weight:
        groups = -(-weight.shape[1] // size)
        scales = torch.rand(weight.shape[0], groups, generator=torch.Generator().manual_seed(1)) + 0.5
        wide = scales.repeat_interleave(size, 1)[:, : weight.shape[1]]
        return Float8Weight((weight / wide).to(torch.float8_e4m3fn), scales, size)

    return make


def nvfp4(weight: torch.Tensor) -> Float4Weight:
    rows, columns = weight.shape
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(256, (rows, -(-columns // 2)), generator=generator, dtype=torch.uint8)
    scales = torch.randint(1, 0x50, (rows, -(-columns // 16)), generator=generator, dtype=torch.uint8)
    return Float4Weight(codes, scales, columns, torch.linspace(0.01, 0.02, rows))


def with_offsets(weight: torch.Tensor) -> IntegerWeight:
    """int8 with a scale and an offset for each row."""
    whole = quantize_rows(weight, 8, None)
    return IntegerWeight(
        whole.values, 8, whole.group_size, whole.scales, torch.linspace(-0.1, 0.1, len(weight))[:, None]
    )


FORMATS: dict[str, Make] = {
    "fp8": quantize_float8,
    "fp8 in blocks": float8_blocks(48),
    "int8": lambda weight: quantize_rows(weight, 8, None),
    "int8 in groups": lambda weight: quantize_rows(weight, 8, 32),
    "int8 with offsets": with_offsets,
    "int4": lambda weight: quantize_rows(weight, 4, 32),
    "mxfp4": quantize_mxfp4,
    "nvfp4": nvfp4,
}


def stored(matrices: Sequence[QuantizedWeight], device: torch.device) -> StoredMatrix:
    """A stack on the device."""
    parts = [store_parts([each], converts_e4m3=not INTERPRETED) for each in matrices]
    assert parts[0] is not None
    stack = empty_stack(parts[0].matrix, len(matrices), device)
    for index, part in enumerate(parts):
        assert part is not None
        put(stack, index, part.matrix)
    return stack


def weights(device: torch.device, count: int, rows: int, columns: int, make: Make) -> tuple[StoredMatrix, torch.Tensor]:
    """A stack, and what it means in float64."""
    drawn = random(torch.device("cpu"), count, rows, columns, seed=1) * columns**-0.5
    matrices = [make(each) for each in drawn]
    meaning = torch.stack([each.dequantize() for each in matrices]).double().to(device)
    return stored(matrices, device), meaning


@pytest.mark.parametrize(("name", "dtype"), one_in(3, FORMATS, [torch.float32, torch.bfloat16, torch.float16]))
def test_products_of_widened_weights(name: str, dtype: torch.dtype, device: torch.device) -> None:
    columns = 96 if "int" in name else 104
    matrix, meaning = weights(device, 1, 70, columns, FORMATS[name])
    x, bias = spread_rows(random(device, 67, columns, dtype=dtype), 3), random(device, 70, dtype=dtype)
    residual = random(device, 67, 70, dtype=dtype, seed=5)
    expected = x.double() @ meaning[0].T + bias.double() + residual.double()
    result = matmul(x, matrix, bias, residual.clone())
    assert_near(result, expected, roundings=1.1, scale=8.0)
    for first, last in [(0, 1), (64, 67)]:
        alone = matmul(x[first:last], matrix, bias, residual[first:last].clone())
        assert torch.equal(alone, result[first:last]), "a row has the same bits in any batch"


def test_heads_have_matrices_of_their_own(device: torch.device) -> None:
    matrix, meaning = weights(device, 3, 20, 64, FORMATS["mxfp4"])
    x = random(device, 5, 3 * 64, dtype=torch.bfloat16)
    expected = torch.einsum("thk,hnk->thn", x.double().unflatten(1, (3, 64)), meaning).flatten(1)
    assert_near(head_matmul(x, matrix), expected, roundings=1.1, scale=4.0)


def test_rows_rounded_to_e4m3(device: torch.device) -> None:
    x = random(device, 6, 200) * torch.logspace(-3, 3, 6, device=device)[:, None]
    x[1] = 0
    x[2, :100] *= 1e-5  # subnormal numbers
    for group, size in ((0, 200), (64, 64)):
        rounded = round_to_e4m3(x, group)
        codes, scales = rounded.codes.view(torch.uint8).cpu(), rounded.scales.cpu()
        wide = scales.repeat_interleave(size, 1)[:, :200]
        padded = torch.nn.functional.pad(x.cpu(), (0, -200 % size)).unflatten(1, (-1, size))
        peaks = padded.abs().amax(-1)
        torch.testing.assert_close(scales, torch.where(peaks > 0, peaks / 448, 1.0), rtol=1e-6, atol=0)
        expected = (x.cpu() / wide).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        assert torch.equal(codes, expected)
    x[0, 3], x[3, 4] = torch.nan, torch.inf
    values = round_to_e4m3(x, 0).codes.view(torch.uint8).view(torch.float8_e4m3fn).float()
    assert values[0].isnan().sum() == 1
    assert values[3].isnan().sum() == 1


@pytest.mark.parametrize("make", one_in(2, [quantize_float8, float8_blocks(64)]))
def test_products_of_e4m3_numbers(make: Make, device: torch.device) -> None:
    """What they are is the product of rounded rows, and the products of those are exact."""
    matrix, meaning = weights(device, 1, 40, 160, make)
    x = random(device, 66, 160, dtype=torch.bfloat16)
    rounded = round_rows(x, matrix)
    size = matrix.group_size or 160
    values = rounded.codes.view(torch.uint8).cpu().view(torch.float8_e4m3fn).double()
    wide = values * rounded.scales.cpu().double().repeat_interleave(size, 1)[:, :160]
    result = matmul(x, matrix, rounds_activations=True)
    assert_near(result, wide.to(device) @ meaning[0].T, roundings=1.2, scale=4.0)
    assert torch.equal(matmul(x[5:7], matrix, rounds_activations=True), result[5:7])
    assert not torch.equal(matmul(x, matrix), result), "rounding is not free"


def test_rows_rounded_to_integers(device: torch.device) -> None:
    """As the CPU's kernels round them: times 127 / largest, ties to even; poison stays in its row."""
    matrix, _ = weights(device, 1, 16, 300, FORMATS["int8"])
    x = spread_rows(random(device, 7, 300) * torch.logspace(-3, 3, 7, device=device)[:, None], 5)
    x[1] = 0
    x[2] = torch.arange(300) % 128 - 0.5  # 126.5 and ties below
    x[2, 7] = -127.0
    x[5, 299], x[6, 0] = torch.nan, -torch.inf
    x[0] = 2.0**-120
    rounded = round_rows(x, matrix)
    finite = x[1:5].cpu().numpy()
    largest = np.abs(finite).max(axis=1, keepdims=True)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    assert np.array_equal(rounded.codes[1:5].cpu().numpy(), np.rint(finite * inverse))
    assert np.array_equal(rounded.scales[1:5].cpu().numpy(), largest / np.float32(127))
    assert (rounded.scales[0] == 0).all()
    assert rounded.scales[5:].isnan().all()
    assert (rounded.codes[[0, 5, 6]] == 0).all()


def from_file(weight: torch.Tensor) -> IntegerWeight:
    """int8 as checkpoints may have it, down to -128."""
    whole = quantize_rows(weight, 8, None)
    values = whole.values.clone()
    values[0, :7] = -128
    return IntegerWeight(values, 8, whole.group_size, whole.scales)


@pytest.mark.parametrize(
    ("make", "columns"),
    [
        (from_file, 104),
        (FORMATS["int8 in groups"], 160),
        (with_offsets, 200),
        (FORMATS["int4"], 160),
        (lambda weight: quantize_rows(weight, 4, 128), 256),
    ],
)
def test_products_of_integers(make: Make, columns: int, device: torch.device) -> None:
    """What they are is the product of rounded rows; sums of integers are exact."""
    matrix, meaning = weights(device, 1, 70, columns, make)
    x = random(device, 66, columns, dtype=torch.bfloat16)
    bias, residual = random(device, 70), random(device, 66, 70, seed=5)
    rounded = round_rows(x, matrix)
    wide = rounded.codes.double() * rounded.scales.double()
    expected = wide @ meaning[0].T + bias.double() + residual.double()
    result = matmul(x.float(), matrix, bias, residual.clone(), rounds_activations=True)
    assert_near(result, expected, roundings=1.2, scale=4.0)
    assert torch.equal(
        matmul(x[5:7].float(), matrix, bias, residual[5:7].clone(), rounds_activations=True), result[5:7]
    )
    x[65, 3] = torch.nan
    assert matmul(x, matrix, rounds_activations=True).isnan().any(1).tolist() == [False] * 65 + [True]


@pytest.mark.parametrize(
    ("name", "rounds"),
    [("fp8", False), ("fp8", True), ("int8", False), ("int8", True), ("int4", False), ("int4", True), ("mxfp4", False)],
)
@pytest.mark.parametrize("weighs_input", [False, True])
def test_experts(name: str, rounds: bool, weighs_input: bool, device: torch.device) -> None:
    size, intermediate, num_experts = 64, 32, 3
    gate_up, gate_up_meaning = weights(device, num_experts, 2 * intermediate, size, FORMATS[name])
    down, down_meaning = weights(device, num_experts, size, intermediate, FORMATS[name])
    bias = random(device, num_experts, size, seed=4)
    x, residual = random(device, 27, size), random(device, 27, size, seed=3)
    routing = route(Routing(num_experts, 2), random(device, 27, num_experts, seed=6))
    parts = [(each, None) for each in gate_up_meaning], list(zip(down_meaning, bias.double(), strict=True))

    def product(part: tuple[torch.Tensor, torch.Tensor | None], rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(rows.double(), *part).to(rows.dtype)

    expected = experts(ExpertWeights(*parts, Gating("silu"), weighs_input), x, routing, residual, product)
    matrices = ExpertMatrices(gate_up, down, None, bias, rounds)
    result = apply_experts(matrices, x, routing, residual, "silu", None, weighs_input)
    error = (result - expected).abs().max() / (expected - residual).abs().max()
    assert error < ((0.08 if name == "fp8" else 0.03) if rounds else 1e-5)
    assert error > 1e-3 or not rounds
    alone = apply_experts(matrices, x[4:5], routing[4:5], residual[4:5], "silu", None, weighs_input)
    assert torch.equal(alone, result[4:5]), "a row has the same bits whatever else is computed"
    if not weighs_input:
        prompt = apply_experts(matrices, x, routing, residual, "silu", None, weighs_input, batch_invariant=False)
        assert torch.equal(prompt, result), "prompts have no other tiles for quantised matrices"
