"""Integers and small floats times activations in bfloat16: every code of a weight, and every bit of a sum."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.cpu._native import MatmulPrecision, WeightType
from quire.kernels.cpu.packing import PackedMatrix
from tests.kernels.cpu.linear_calls import ISAS, TILE_ISAS, WIDENED, random_matrix, run_linear

each_isa = pytest.mark.parametrize("isa", TILE_ISAS)
each_kind = pytest.mark.parametrize("kind", WIDENED)
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def columns_of(matrix: PackedMatrix, isa: str) -> torch.Tensor:
    """What the kernel takes for the matrix, [out, in]: products with rows of which one value is 1."""
    ones = torch.eye(matrix.in_features)
    together = run_linear(matrix, ones, isa=isa, precision=MatmulPrecision.BFLOAT16)
    parts = [run_linear(matrix, row[None], isa=isa, precision=MatmulPrecision.BFLOAT16) for row in ones[:40]]
    assert torch.equal(torch.cat(parts), together[:40])
    return together.T


@each_isa
def test_every_integer_is_exact(isa: str) -> None:
    for type, dtype, low, high in ((WeightType.I8, torch.int8, -128, 128), (WeightType.I4, torch.uint8, 0, 16)):
        matrix = PackedMatrix(type, 48, 256, group_size=24)
        values = torch.arange(256 * 48).reshape(256, 48) * 7 % (high - low) + low
        matrix.load_integer(values.to(dtype), torch.full((256, 2), 0.25))
        assert torch.equal(columns_of(matrix, isa), values * 0.25)


@each_isa
def test_every_e4m3_is_exact(isa: str) -> None:
    codes = (torch.arange(256 * 48).reshape(256, 48) * 7 % 256).to(torch.uint8)
    codes[codes % 128 == 127] = 0  # not a number
    values = codes.view(torch.float8_e4m3fn)
    matrix = PackedMatrix(WeightType.E4M3, 48, 256, group_size=24)
    matrix.load_float8(values, torch.full((256, 2), 0.25))
    assert torch.equal(columns_of(matrix, isa), values.float() * 0.25)


@each_isa
def test_mxfp4_of_every_scale(isa: str) -> None:
    """Exact where each of the 16 values is a normal bfloat16; scales beyond count as the nearest of these."""
    matrix = PackedMatrix(WeightType.MXFP4, 64, 255)
    codes = torch.arange(64).expand(255, 64) % 16
    scales = torch.arange(255)[:, None].expand(255, 2)
    matrix.load_float4((codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), scales.to(torch.uint8), None)
    powers = torch.ldexp(torch.ones(255, 1), scales[:, :1].clamp(2, 252) - 127)
    assert torch.equal(columns_of(matrix, isa), E2M1[codes] * powers)


@each_isa
def test_nvfp4_of_every_scale(isa: str) -> None:
    matrix = PackedMatrix(WeightType.NVFP4, 64, 254)
    codes = torch.arange(64).expand(254, 64) * 5 % 16
    scales = torch.tensor([code for code in range(256) if code % 128 != 127], dtype=torch.uint8)
    rows = torch.full((254,), 0.75)
    matrix.load_float4(
        (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), scales[:, None].expand(254, 4).contiguous(), rows
    )
    expected = E2M1[codes] * scales.view(torch.float8_e4m3fn).float()[:, None] * 0.75
    assert torch.equal(columns_of(matrix, isa), expected)


@each_kind
@pytest.mark.skipif(not {"amx", "amx_emulated"} <= set(ISAS), reason="the machine has no tiles")
def test_the_hardware_has_the_bits_of_the_emulation(kind: str) -> None:
    """Also where more is widened than is kept for the next rows."""
    for depth, group_size, rows in ((301, 32, 70), (4300, 128, 34)):
        matrix = random_matrix(kind, depth, 40, group_size=group_size, offsets=kind[0] == "i", bias=True)
        x = torch.randn(rows, depth, generator=torch.Generator().manual_seed(1))
        tiles, plain = (
            run_linear(matrix, x, isa=isa, threads=2, precision=MatmulPrecision.BFLOAT16)
            for isa in ("amx", "amx_emulated")
        )
        assert torch.equal(tiles, plain)
        alone = run_linear(matrix, x[-1:], isa="amx", precision=MatmulPrecision.BFLOAT16)
        assert torch.equal(alone, tiles[-1:])


@each_isa
@each_kind
def test_activations_are_rounded_where_it_is_asked_for(kind: str, isa: str) -> None:
    """The two precisions differ, by about what eight bits explain."""
    matrix, x = random_matrix(kind, 256, 64, group_size=64), torch.randn(30, 256)
    exact, rounded = run_linear(matrix, x, isa=isa), run_linear(matrix, x, isa=isa, precision=MatmulPrecision.BFLOAT16)
    assert 1e-4 < (exact - rounded).abs().max() < 3e-2
