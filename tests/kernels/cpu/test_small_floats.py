"""Weights of 8 and 4 bits that are floats: every code, every scale, and what packing refuses."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.cpu import _native
from quire.kernels.cpu._native import WeightType
from quire.kernels.cpu.packing import PackedMatrix
from tests.kernels.cpu.linear_calls import ISAS, GuardedRows, pool, random_matrix, run_linear

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
each_isa = pytest.mark.parametrize("isa", ISAS)


def _products(matrix: PackedMatrix, isa: str) -> torch.Tensor:
    """The matrix, column by column, as products with rows of the identity give it: nothing is added to a value."""
    eye = torch.eye(matrix.in_features)
    return torch.cat([run_linear(matrix, rows, isa=isa) for rows in eye.split(13)]).T


@each_isa
def test_every_code_of_e4m3(isa: str) -> None:
    """Each of the 254 numbers in each place that a panel has for it."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]
    values = torch.stack([torch.roll(codes, shift) for shift in range(36)]).view(torch.float8_e4m3fn)
    scales = 2.0 ** torch.arange(-18.0, 18.0)[:, None]
    matrix = PackedMatrix(WeightType.E4M3, 254, 36)
    matrix.load_float8(values, scales)
    expected = values.float() * scales
    assert torch.equal(matrix.dequantize(), expected)
    assert torch.equal(_products(matrix, isa), expected)


@each_isa
def test_every_code_of_e2m1_and_e8m0(isa: str) -> None:
    """All values under all scales, the subnormal one and those that overflow too."""
    pairs = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(16, 1)[:255]
    scale_codes = torch.arange(255, dtype=torch.uint8)[:, None]
    matrix = PackedMatrix(WeightType.MXFP4, 32, 255)
    matrix.load_float4(pairs, scale_codes)
    values = E2M1[torch.stack((pairs & 15, pairs >> 4), -1).flatten(1).long()]
    expected = (values.double() * 2.0 ** (scale_codes.double() - 127)).float()
    assert torch.equal(matrix.dequantize(), expected)
    assert torch.equal(_products(matrix, isa), expected)


@each_isa
def test_every_scale_of_nvfp4(isa: str) -> None:
    codes = torch.arange(127, dtype=torch.uint8)
    pairs = torch.arange(256, dtype=torch.uint8).view(32, 8)[codes.long() % 32]
    row_scales = torch.linspace(0.001, 3.0, 127)
    matrix = PackedMatrix(WeightType.NVFP4, 16, 127)
    matrix.load_float4(pairs, codes[:, None], row_scales)
    values = E2M1[torch.stack((pairs & 15, pairs >> 4), -1).flatten(1).long()]
    scales = codes.view(torch.float8_e4m3fn).float() * row_scales
    expected = values * scales[:, None]
    assert torch.equal(matrix.dequantize(), expected)
    assert torch.equal(_products(matrix, isa), expected)


@each_isa
@pytest.mark.parametrize("kind", ["e4m3", "mxfp4", "nvfp4"])
def test_rows_are_looked_up(isa: str, kind: str) -> None:
    table = random_matrix(kind, 100, 70, group_size=32 if kind == "e4m3" else None)
    ids = torch.tensor([69, 0, 33, 5])
    out = GuardedRows(4, 100)
    program = _native.Program(isa, pool(1), 4)
    program.embed(table.as_native(), 100, 0, False, False, _native.Ref(0, 0, out.stride))
    program.bind(4, [ids.data_ptr()], [], [out.address()], 0)()
    assert torch.equal(out.values, table.dequantize()[ids])
    out.check()


def test_what_does_not_fit_is_refused() -> None:
    eight, four = PackedMatrix(WeightType.E4M3, 32, 4, group_size=16), PackedMatrix(WeightType.MXFP4, 32, 4)
    nvidia = PackedMatrix(WeightType.NVFP4, 32, 4)
    values, scales = torch.zeros(4, 32).to(torch.float8_e4m3fn), torch.ones(4, 2)
    pairs, codes = torch.zeros(4, 16, dtype=torch.uint8), torch.zeros(4, 1, dtype=torch.uint8)
    for call in (
        lambda: eight.load_dense(torch.zeros(4, 32)),
        lambda: eight.load_integer(torch.zeros(4, 32, dtype=torch.int8), scales),
        lambda: eight.load_float8(values, scales[:, :1]),
        lambda: eight.load_float8(values, scales, 1),
        lambda: eight.load_float4(pairs, codes),
        lambda: four.load_float8(values, scales),
        lambda: four.load_float4(pairs[:, :8], codes),
        lambda: four.load_float4(pairs, codes.repeat(1, 2)),
        lambda: four.load_float4(pairs, codes, torch.ones(4)),
        lambda: four.load_float4(pairs, codes, None, 1),
        lambda: nvidia.load_float4(pairs, codes.repeat(1, 2)),
        lambda: PackedMatrix(WeightType.MXFP4, 32, 4, group_size=16),
        lambda: PackedMatrix(WeightType.E4M3, 32, 4, integer_activations=True),
        lambda: PackedMatrix(WeightType.E4M3, 32, 4, with_offsets=True),
    ):
        with pytest.raises(ValueError):
            call()
    with pytest.raises(TypeError):
        eight.load_float8(values.float(), scales)


def test_bytes_that_are_held() -> None:
    assert PackedMatrix(WeightType.E4M3, 256, 64, group_size=128).nbytes == 256 * 64 + 2 * 64 * 4
    assert PackedMatrix(WeightType.MXFP4, 256, 64).nbytes == 256 * 64 * 17 // 32
    assert PackedMatrix(WeightType.NVFP4, 256, 64).nbytes == 256 * 64 * 9 // 16 + 64 * 4
