"""Native linear layers against float64, against exact integers, and against themselves at other row counts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import functional

from quire.kernels.cpu import _native
from quire.kernels.cpu._native import Activation, MatmulPrecision, WeightType
from quire.kernels.cpu.packing import PackedMatrix
from tests.kernels.cpu.linear_calls import (
    CASES,
    DIGITS,
    ISAS,
    Normed,
    precision_of,
    random_matrix,
    row_norm,
    run_linear,
)
from tests.long import one_in

ROWS = (1, 2, 3, 7, 8, 12, 13, 31, 32, 100)
ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.NONE: lambda x: x,
    Activation.RELU: torch.relu,
    Activation.SILU: functional.silu,
    Activation.GELU: functional.gelu,
    Activation.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
    Activation.QUICK_GELU: lambda x: x * torch.sigmoid(1.702 * x),
}
# (in_features, out_features, group_size): odd ones, whole panels, groups that do not divide the inputs.
SHAPES = ((37, 45, None), (64, 64, 16), (256, 96, 64), (200, 33, 128), (577, 70, 32), (1, 1, None))

each_case = pytest.mark.parametrize(("kind", "isa"), CASES)
a_third_of_the_cases = pytest.mark.parametrize(("kind", "isa"), one_in(3, CASES))


def _rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The integers and scales [rows, 1] that the kernels make of activations."""
    values = x.numpy()
    largest = np.abs(values).max(axis=1, keepdims=True)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    return torch.from_numpy(np.rint(values * inverse)), torch.from_numpy(largest / np.float32(127))


def _in_digits(matrix: PackedMatrix, x: torch.Tensor) -> torch.Tensor:
    """Whole numbers of two signed digits of eight bits, with a power of two as the scale of a block: a group's next 128
    values."""
    order = torch.arange(x.shape[1]) if matrix.column_order is None else matrix.column_order.long()
    out = x.double()
    for group in order.split(matrix.group_size):
        for block in group.split(128):
            largest = out[:, block].abs().amax(1, keepdim=True)
            scale = 2.0 ** (torch.frexp(largest * (2.0**15 / 32639)).exponent - 15)
            out[:, block] = (out[:, block] / scale).round() * scale
    return out


def _seen_by_kernel(kind: str, matrix: PackedMatrix, x: torch.Tensor) -> torch.Tensor:
    """x in float64 as the products see it."""
    if kind in DIGITS:
        return _in_digits(matrix, x)
    if precision_of(kind) == MatmulPrecision.BFLOAT16:
        return x.bfloat16().double()
    if not kind.endswith("_rounded"):
        return x.double()
    integers, scales = _rounded(x)
    return integers.double() * scales.double()


def _reference(
    kind: str,
    matrix: PackedMatrix,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """weights: of the matrix in float64 [K, N], where a test asks more than once."""
    out = _seen_by_kernel(kind, matrix, x) @ (matrix.dequantize().double().T if weights is None else weights)
    if bias is not None:
        out = out + bias.double()
    if not matrix.gated:
        return ACTIVATIONS[activation](out)
    gate, up = out.chunk(2, dim=1)
    return ACTIVATIONS[activation](gate) * up


def _bias_of(matrix: PackedMatrix) -> torch.Tensor | None:
    return None if matrix.bias is None else matrix.bias[matrix._columns(0, matrix.out_features)]


@a_third_of_the_cases
def test_equals_float64(kind: str, isa: str) -> None:
    for index, (in_features, out_features, group_size) in enumerate(SHAPES):
        offsets = kind.startswith("i4") or (kind.startswith("i8") and index % 2 == 1)
        matrix = random_matrix(kind, in_features, out_features, group_size=group_size, offsets=offsets, seed=index)
        weights = matrix.dequantize().double().T
        for rows in ROWS:
            x = torch.randn(rows, in_features, generator=torch.Generator().manual_seed(rows))
            out = run_linear(matrix, x, isa=isa, precision=precision_of(kind), threads=1 + rows % 3)
            expected = _reference(kind, matrix, x, None, Activation.NONE, weights)
            torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@a_third_of_the_cases
def test_epilogues(kind: str, isa: str) -> None:
    case = 0
    for gated in (False, True):
        for activation in ACTIVATIONS:
            for beside in ("none", "residual", "in place"):
                case += 1
                rows, out_features = ROWS[case % len(ROWS)], (70, 64, 18)[case % 3]
                matrix = random_matrix(
                    kind, 66, out_features, group_size=32, gated=gated, bias=case % 4 != 0, seed=case
                )
                x = torch.randn(rows, 66, generator=torch.Generator().manual_seed(case)) * 3
                expected = _reference(kind, matrix, x, _bias_of(matrix), activation)
                residual = None if beside == "none" else torch.randn(expected.shape)
                if residual is not None:
                    expected = expected + residual
                out = run_linear(
                    matrix,
                    x,
                    isa=isa,
                    precision=precision_of(kind),
                    threads=1 + case % 2,
                    activation=activation,
                    residual=residual,
                    in_place=beside == "in place",
                )
                torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5)


@each_case
def test_a_bias_of_zeros_changes_no_bit(kind: str, isa: str) -> None:
    """Whole panels without a bias, which most layers of most models have, are finished by a kernel of their own."""
    for gated, activation, rows in ((False, Activation.NONE, 13), (True, Activation.SILU, 3)):
        matrix = random_matrix(kind, 66, 70, group_size=32, gated=gated)
        biased = random_matrix(kind, 66, 70, group_size=32, gated=gated)
        biased.load_bias(torch.zeros(70))
        x = torch.randn(rows, 66, generator=torch.Generator().manual_seed(rows)) * 3
        for residual in (None, torch.randn(rows, 35 if gated else 70)):
            run = partial(run_linear, x=x, isa=isa, precision=precision_of(kind), activation=activation)
            assert torch.equal(run(matrix, residual=residual), run(biased, residual=residual))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activation", [a for a in ACTIVATIONS if a != Activation.NONE])
def test_activation_functions_over_their_range(activation: Activation, isa: str) -> None:
    """Within 3e-7 of the true value, relative to max(1, |x|), from deep saturation through zero."""
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 100.0, -100.0, 3e4])])
    matrix = PackedMatrix(WeightType.F32, 1, 1)
    matrix.load_dense(torch.ones(1, 1))
    out = run_linear(matrix, x[:, None], isa=isa, activation=activation)[:, 0].double()
    error = (out - ACTIVATIONS[activation](x.double())).abs() / x.double().abs().clamp(min=1)
    assert error.max() < 3e-7


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["i8_rounded", "i4_rounded"])
def test_integer_sums_are_exact(kind: str, isa: str) -> None:
    """Scales that are powers of two: one rounding is left, and every bit of the result is known. Extreme values."""
    random = torch.Generator().manual_seed(3)
    dtype, low, high = (torch.int8, -128, 127) if kind == "i8_rounded" else (torch.uint8, 0, 15)
    for in_features, out_features, rows in ((577, 70, 13), (31, 5, 1), (512, 33, 40)):
        values = torch.randint(low, high + 1, (out_features, in_features), generator=random, dtype=dtype)
        values[0], values[-1] = low, high
        scales = 2.0 ** torch.randint(-9, 4, (out_features, 1), generator=random)
        matrix = PackedMatrix(
            WeightType.I8 if low else WeightType.I4, in_features, out_features, integer_activations=True
        )
        matrix.load_integer(values, scales)
        x = torch.randn(rows, in_features, generator=random)
        x[0] = 5.0
        x[-1] = -5.0
        integers, row_scales = _rounded(x)
        sums = integers.long() @ values.long().T
        expected = (sums.float() * scales[:, 0]) * row_scales
        assert torch.equal(run_linear(matrix, x, isa=isa, threads=2), expected)


@pytest.mark.parametrize("isa", ISAS)
def test_activations_have_at_least_22_bits(isa: str) -> None:
    """Of the largest beside them, whatever it is: also where the next larger number needs one bit more."""
    matrix = PackedMatrix(WeightType.I4, 2, 1, group_size=2)
    matrix.load_integer(torch.tensor([[1, 0]], dtype=torch.uint8), torch.ones(1, 1))
    edges = torch.cat([torch.linspace(0.99, 1, 500), torch.linspace(0.996, 0.9962, 500), torch.rand(500)])
    for power in (-90, -20, 0, 60, 126):
        x = torch.stack((edges, torch.zeros(1500)), 1) * 2.0**power
        out = run_linear(matrix, x, isa=isa)[:, 0]
        assert ((out - x[:, 0]).abs() <= x[:, 0] * 2.0**-22).all()
        beside = run_linear(matrix, x.flip(0) + x, isa=isa)[:, 0]
        assert torch.isfinite(beside).all()


@a_third_of_the_cases
def test_a_row_has_the_same_bits_in_any_company(kind: str, isa: str) -> None:
    """Whatever the row count, the row's place and the threads: also where activations are shared between threads."""
    for in_features, out_features, gated in ((577, 102, False), (1030, 68, True)):
        matrix = random_matrix(kind, in_features, out_features, group_size=64, gated=gated, bias=True)
        x = torch.randn(130, in_features, generator=torch.Generator().manual_seed(5))
        run = partial(run_linear, matrix, isa=isa, precision=precision_of(kind), activation=Activation.SILU)
        alone = torch.cat([run(row[None]) for row in x[:16]])
        for rows in (2, 5, 11, 13, 24, 37, 130):
            for threads in (1, 3) if rows % 2 else (1, 2):
                for first in {0, rows - 16 if rows > 16 else 0}:
                    batch = torch.roll(x[:rows], first, 0) if first else x[:rows]
                    out = run(batch, threads=threads)
                    count = min(rows, 16)
                    assert torch.equal(out[first : first + count], alone[:count]), (rows, threads, first)


@each_case
def test_nan_and_infinity_stay_in_their_rows(kind: str, isa: str) -> None:
    matrix = random_matrix(kind, 70, 40, group_size=32, offsets=kind.startswith("i4"))
    for rows in (4, 20):
        x = torch.randn(rows, 70, generator=torch.Generator().manual_seed(1))
        clean = run_linear(matrix, x, isa=isa, precision=precision_of(kind))
        x[1, 69], x[3, 0] = float("nan"), float("inf")
        out = run_linear(matrix, x, isa=isa, precision=precision_of(kind))
        assert out[1].isnan().all()
        assert not out[3].isfinite().any()
        others = [row for row in range(rows) if row not in (1, 3)]
        assert torch.equal(out[others], clean[others])


@each_case
def test_rows_of_zeros_give_the_bias(kind: str, isa: str) -> None:
    matrix = random_matrix(kind, 70, 40, group_size=32, offsets=kind.startswith("i4"), bias=True)
    for x in (torch.zeros(3, 70), torch.full((3, 70), -0.0), torch.full((3, 70), 1e-41)):
        out = run_linear(matrix, x, isa=isa, precision=precision_of(kind))
        assert matrix.bias is not None
        torch.testing.assert_close(out, matrix.bias[:40].expand(3, 40), rtol=0, atol=1e-37)


@pytest.mark.parametrize("isa", ISAS)
def test_no_rows(isa: str) -> None:
    assert run_linear(random_matrix("bf16", 64, 64), torch.zeros(0, 64), isa=isa).shape == (0, 64)


@a_third_of_the_cases
def test_column_order(kind: str, isa: str) -> None:
    random = torch.Generator().manual_seed(9)
    for in_features in (70, 600):
        matrix = random_matrix(kind, in_features, 40, group_size=32, offsets=kind.startswith("i4"))
        matrix.set_column_order(torch.randperm(in_features, generator=random))
        for rows in (1, 2, 20):
            x = torch.randn(rows, in_features, generator=random)
            out = run_linear(matrix, x, isa=isa, precision=precision_of(kind), threads=2)
            expected = _reference(kind, matrix, x, None, Activation.NONE)
            torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@a_third_of_the_cases
def test_many_rows_and_panels(kind: str, isa: str) -> None:
    """Several blocks of rows, dealt to three threads."""
    matrix = random_matrix(kind, 1100, 150, group_size=128, bias=True)
    x = torch.randn(260, 1100, generator=torch.Generator().manual_seed(2))
    out = run_linear(matrix, x, isa=isa, precision=precision_of(kind), threads=3)
    expected = _reference(kind, matrix, x, _bias_of(matrix), Activation.NONE)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("isa", ISAS)
def test_integer_kernels_agree_between_instruction_sets(isa: str) -> None:
    """The sums are integers: where no more than one rounding follows, all instruction sets give the same bits."""
    matrix = random_matrix("i8_rounded", 333, 50)
    x = torch.randn(9, 333, generator=torch.Generator().manual_seed(2))
    assert torch.equal(run_linear(matrix, x, isa=isa), run_linear(matrix, x, isa=ISAS[0]))


@pytest.mark.parametrize(("kind", "isa", "centred"), one_in(3, CASES, [False, True]))
def test_rows_are_normalised_as_they_are_packed(kind: str, isa: str, centred: bool) -> None:
    """The bits of the norm as a layer of its own. Rows that each thread packs for itself, and shared ones."""
    for width, rows in ((70, 9), (333, 150)):
        matrix = random_matrix(kind, width, 76, group_size=64, gated=centred, bias=True)
        random = torch.Generator().manual_seed(8)
        x = torch.randn(rows, width, generator=random) * 3 + 1
        weight, bias = torch.rand(width, generator=random) + 0.5, torch.randn(width, generator=random)
        normed = row_norm(x, isa, weight, bias if centred else None, centred=centred)
        run = partial(run_linear, matrix, isa=isa, precision=precision_of(kind), threads=2)
        norm = _native.RowNorm(weight.data_ptr(), bias.data_ptr() if centred else 0, 1e-5, centred)
        assert torch.equal(run(Normed(x, norm)), run(normed))
        assert not torch.equal(run(x), run(normed))


@pytest.mark.skipif("amx_emulated" not in ISAS, reason="the build lacks the emulated tiles, or the machine VNNI")
@pytest.mark.parametrize("group_size", [64, 96, 100, 128, None])
def test_tiles_give_the_bits_of_the_vector_instructions(group_size: int | None) -> None:
    """AMX: groups that fill tiles, that leave rests, and that are one; blocks of 16 and 32 rows, full and not."""
    for in_features, offsets in ((64, False), (555, True), (1100, False)):
        matrix = random_matrix("i8_rounded", in_features, 75, group_size=group_size, offsets=offsets, bias=True)
        x = torch.randn(70, in_features, generator=torch.Generator().manual_seed(4))
        for rows in (8, 16, 17, 33, 70):
            tiles = run_linear(matrix, x[:rows], isa="amx_emulated", threads=2, activation=Activation.GELU)
            vectors = run_linear(matrix, x[:rows], isa="avx512_vnni", activation=Activation.GELU)
            assert torch.equal(tiles, vectors)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_many_rows_have_the_bits_of_few(kind: str, isa: str) -> None:
    """From some rows on, 16-bit weights are widened for several tiles at once; 20 rows are below that everywhere."""
    for in_features, out_features, gated in ((577, 102, False), (145, 200, True), (288, 96, False), (3, 33, False)):
        matrix = random_matrix(kind, in_features, out_features, gated=gated, bias=True)
        random = torch.Generator().manual_seed(6)
        for rows in (32, 129, 300):
            x = torch.randn(rows, in_features, generator=random)
            residual = torch.randn(rows, out_features // (2 if gated else 1), generator=random)
            run = partial(run_linear, matrix, isa=isa, activation=Activation.SILU)
            expected = torch.cat([run(a, residual=b) for a, b in zip(x.split(20), residual.split(20), strict=True)])
            assert torch.equal(run(x, residual=residual, threads=2), expected)
