"""Activations in whole numbers of eight bits with a scale for each group or block, against the same arithmetic in
NumPy, bit by bit, and other widths against exact products."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from quire.kernels.cpu.packing import BLOCK_LAYOUTS, PackedMatrix
from quire.models.gguf.blocks import FORMATS
from quire.quantization.integer_weight import IntegerWeight
from tests.kernels.cpu.linear_calls import ISAS, random_matrix, run_linear
from tests.kernels.cpu.test_blocks import PACKED, precisions, random_blocks, taken_apart, whole_matrix

Floats = npt.NDArray[np.float32]
MAX_INT8 = np.float32(127)
FUSED_ISAS = [isa for isa in ISAS if isa not in ("portable", "bf16_emulated")]
"""Those that round a product and a sum once."""


def fused(a: Floats, b: Floats, c: Floats) -> Floats:
    """a * b + c: the product is exact, and the sum has 40 bits more than the result."""
    return (a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)).astype(np.float32)


def plain(a: Floats, b: Floats, c: Floats) -> Floats:
    return a * b + c


def twin(weight: IntegerWeight, x: Floats, *, is_fused: bool) -> Floats:
    """x: [rows, K]. A group of a row becomes its values times 127 over the largest magnitude, to the nearest, ties to
    even; groups are added up in their order, of each the product and then what the weights' offset gives."""
    size, add = weight.group_size, fused if is_fused else plain
    total = np.zeros((len(x), weight.shape[0]), np.float32)
    values = weight.values.numpy().astype(np.int64)
    for group in range(weight.num_groups):
        part = slice(group * size, (group + 1) * size)
        scale = np.abs(x[:, part]).max(axis=1, keepdims=True) / MAX_INT8
        numbers = np.rint(x[:, part] * (np.float32(1) / scale)).astype(np.int64)
        sums = (numbers @ values[:, part].T).astype(np.float32) * scale
        total = add(sums, weight.scales.numpy()[None, :, group], total)
        if weight.offsets is not None:
            of_x = numbers.sum(axis=1, keepdims=True).astype(np.float32) * scale
            total = add(of_x, weight.offsets.numpy()[None, :, group], total)
    return total


def super_twin(name: str, blocks: npt.NDArray[np.uint8], x: Floats, *, is_fused: bool) -> Floats:
    """The same of super-blocks, x: [rows, K]: 128 values of a row share a scale. Groups' sums times their codes are
    added up in their order, from zero. Then come the half of the scales, the offsets' whole numbers times their half,
    and the scale of x."""
    weight, add = taken_apart(name, blocks), fused if is_fused else plain
    places = FORMATS[name].half_places
    halves = [blocks[:, :, at : at + 2].copy().view("<f2")[:, :, 0].astype(np.float32) for at in places]
    size, total = weight.group_size, np.zeros((len(x), weight.shape[0]), np.float32)
    values = weight.values.numpy().astype(np.int64)
    for begin in range(0, x.shape[1], 128):
        block, half = slice(begin, begin + 128), halves[0][:, begin // 256]
        scale = np.abs(x[:, block]).max(axis=1, keepdims=True) / MAX_INT8
        numbers = np.rint(x * (np.float32(1) / scale)).astype(np.int64)
        sums, offsets = np.zeros_like(total), np.zeros(total.shape, np.int64)
        for group in range(begin // size, begin // size + 128 // size):
            part = slice(group * size, (group + 1) * size)
            codes = np.rint(weight.scales.numpy()[:, group] / half)
            sums = add((numbers[:, part] @ values[:, part].T).astype(np.float32), codes[None], sums)
            if weight.offsets is not None:
                codes = np.rint(-weight.offsets.numpy()[:, group] / halves[1][:, begin // 256])
                offsets += numbers[:, part].sum(axis=1, keepdims=True) * codes.astype(np.int64)[None]
        sums = sums * half
        if weight.offsets is not None:
            sums = add(offsets.astype(np.float32), -halves[1][:, begin // 256][None], sums)
        total = add(sums, scale, total)
    return total


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", PACKED)
def test_eight_bits_are_what_they_are_defined_to_be(name: str, isa: str) -> None:
    blocks = random_blocks(name, 40)
    matrix, weight = whole_matrix(name, blocks), taken_apart(name, blocks)
    matrix.activation_bits = 8
    for rows in (1, 2, 7, 21):
        x = torch.randn(rows, matrix.in_features, generator=torch.Generator().manual_seed(rows))
        for precision in precisions(isa):
            found = run_linear(matrix, x, isa=isa, precision=precision)
            is_fused = isa in FUSED_ISAS
            if BLOCK_LAYOUTS[name].is_super:
                expected = super_twin(name, blocks, x.numpy(), is_fused=is_fused)
            else:
                expected = twin(weight, x.numpy(), is_fused=is_fused)
            assert np.array_equal(found.numpy(), expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("kind", "group_size"), [("i8", None), ("i8", 48), ("i4", 32), ("mxfp4", None), ("nvfp4", None)]
)
def test_every_integer_and_small_float(kind: str, group_size: int | None, isa: str) -> None:
    """Of long groups, 128 values share a scale. Alone and among others, a row has the same bits."""
    matrix = random_matrix(kind, 288, 40, group_size=group_size, offsets=kind == "i4", seed=3)
    matrix.activation_bits = 8
    x = torch.randn(9, 288, generator=torch.Generator().manual_seed(1))
    found = run_linear(matrix, x, isa=isa)
    exact = x.double() @ matrix.dequantize().double().T
    assert float((found - exact).norm() / exact.norm()) < 0.01
    alone = torch.cat([run_linear(matrix, row[None], isa=isa) for row in x])
    assert torch.equal(found, alone)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
def test_the_bits_that_are_asked_for_are_kept(name: str, isa: str) -> None:
    matrix = whole_matrix(name, random_blocks(name, 40))
    x = torch.randn(3, matrix.in_features, generator=torch.Generator().manual_seed(1))
    exact = x.double() @ matrix.dequantize().double().T
    for bits, error in ((8, 0.01), (16, 0.002), (32, 1e-6)):
        matrix.activation_bits = bits
        for precision in precisions(isa):
            found = run_linear(matrix, x, isa=isa, precision=precision)
            assert float((found - exact).norm() / exact.norm()) < error


@pytest.mark.parametrize("isa", ISAS)
def test_rows_of_zeros_and_of_no_numbers(isa: str) -> None:
    matrix: PackedMatrix = whole_matrix("Q4_K", random_blocks("Q4_K", 40))
    matrix.activation_bits = 8
    x = torch.zeros(3, matrix.in_features)
    x[1, 5], x[2, 7] = float("inf"), 1e-38
    found = run_linear(matrix, x, isa=isa)
    assert not bool(found[0].any())
    assert bool(found[1].isnan().all())
    assert bool(found[2].isfinite().all())
