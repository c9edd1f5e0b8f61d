"""Blocks of a GGUF file packed as they are, and integers with scales and offsets in float16, against the same numbers
packed with float32 ones or as 4-bit floats: no bit of a result differs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.kernels.cpu import _native
from quire.kernels.cpu._native import MatmulPrecision, WeightType
from quire.kernels.cpu.packing import BlockMatrix, HalfScaleMatrix, PackedMatrix
from quire.models.gguf.blocks import FORMATS
from tests.kernels.cpu.linear_calls import BF16_ISAS, ISAS, GuardedRows, pool, run_linear

WIDTH = 96
TYPES = {"Q4_0": (WeightType.I4, 18), "Q8_0": (WeightType.I8, 34), "MXFP4": (WeightType.MXFP4, 17)}


def halved_pair(rows: int, *, gated: bool, rounded: bool) -> tuple[PackedMatrix, PackedMatrix]:
    random = torch.Generator().manual_seed(rows)
    values = torch.randint(16, (rows, WIDTH), generator=random, dtype=torch.uint8)
    scales, offsets = (torch.randn(rows, WIDTH // 32, generator=random).half().float() for _ in range(2))
    both = []
    for form in (HalfScaleMatrix, PackedMatrix):
        options = {"integer_activations": rounded, "with_offsets": True}
        both.append(form(WeightType.I4, WIDTH, rows, group_size=32, gated=gated, **options))
        both[-1].load_integer(values, scales, offsets)
    return both[0], both[1]


def pair(name: str, rows: int, *, gated: bool = False, rounded: bool = False) -> tuple[PackedMatrix, PackedMatrix]:
    """The same matrix in both forms, loaded in two parts of which the first ends inside a panel."""
    if name == "halves":
        return halved_pair(rows, gated=gated, rounded=rounded)
    kind, size = TYPES[name]
    random = np.random.default_rng(rows)
    blocks = random.integers(0, 256, (rows, WIDTH // 32, size), dtype=np.uint8)
    if name == "MXFP4":
        blocks[:, :, 0] = random.integers(118, 123, blocks.shape[:2])
    else:
        scales = random.normal(0, 0.01, blocks.shape[:2]).astype("<f2")
        scales[0] = 6e-8  # below the normal numbers of float16
        blocks[:, :, :2] = scales[:, :, None].view(np.uint8)
    whole = BlockMatrix(kind, WIDTH, rows, gated=gated, integer_activations=rounded)
    flat = torch.from_numpy(blocks.reshape(rows, -1))
    for first, end in ((0, rows // 3), (rows // 3, rows)):
        whole.load_blocks(flat[first:end], first)
    if name == "MXFP4":
        apart = PackedMatrix(kind, WIDTH, rows, gated=gated)
        codes = np.concatenate((blocks[:, :, 1:] & 15, blocks[:, :, 1:] >> 4), axis=2).reshape(rows, WIDTH)
        apart.load_float4(
            torch.from_numpy(codes[:, 0::2] | codes[:, 1::2] << 4), torch.from_numpy(blocks[:, :, 0].copy())
        )
        return whole, apart
    values, scales, offsets = FORMATS[name].unpack(blocks.reshape(-1, size))
    apart = PackedMatrix(
        kind,
        WIDTH,
        rows,
        group_size=32,
        gated=gated,
        integer_activations=rounded,
        with_offsets=offsets is not None,
    )
    groups = (rows, WIDTH // 32)
    apart.load_integer(
        torch.from_numpy(values.reshape(rows, WIDTH)),
        torch.from_numpy(scales.reshape(groups)),
        None if offsets is None else torch.from_numpy(offsets.reshape(groups)),
    )
    return whole, apart


def embedded(matrix: PackedMatrix, isa: str) -> torch.Tensor:
    """All rows, looked up."""
    out, ids = GuardedRows(matrix.out_features, WIDTH), torch.arange(matrix.out_features)
    program = _native.Program(isa, pool(1), len(ids), MatmulPrecision.FLOAT32)
    place = _native.Ref(0, 0, out.stride)
    program.embed(matrix.as_native(), WIDTH, 0, _native.TOKEN_IDS, False, place)
    program.bind(len(ids), [ids.data_ptr(), ids.data_ptr()], [], [out.address()], 0)()
    out.check()
    return out.values.clone()


def precisions(isa: str) -> list[MatmulPrecision]:
    return [MatmulPrecision.FLOAT32, *([MatmulPrecision.BFLOAT16] if isa in BF16_ISAS else [])]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", [*TYPES, "halves"])
def test_the_same_bits_as_numbers_taken_apart(name: str, isa: str) -> None:
    for rows, gated in ((45, False), (96, False), (20, True), (64, True)):
        whole, apart = pair(name, rows, gated=gated)
        assert whole.nbytes <= apart.nbytes
        assert torch.equal(whole.dequantize(), apart.dequantize())
        assert torch.equal(embedded(whole, isa), embedded(apart, isa)) or gated
        for count in (1, 3, 14):
            x = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(count))
            for precision in precisions(isa):
                found, expected = (run_linear(each, x, isa=isa, precision=precision) for each in (whole, apart))
                assert torch.equal(found, expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["Q4_0", "Q8_0", "halves"])
def test_with_activations_rounded_to_integers(name: str, isa: str) -> None:
    whole, apart = pair(name, 45, rounded=True)
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(0))
    assert torch.equal(run_linear(whole, x, isa=isa), run_linear(apart, x, isa=isa))


def test_blocks_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="make up 40 inputs"):
        BlockMatrix(WeightType.I4, 40, 8)
    with pytest.raises(ValueError, match="make up 32 inputs"):
        BlockMatrix(WeightType.NVFP4, 32, 8)
    matrix = BlockMatrix(WeightType.I8, 64, 8)
    with pytest.raises(ValueError, match="do not fit 68 bytes of blocks"):
        matrix.load_blocks(torch.zeros(8, 36, dtype=torch.uint8))
    with pytest.raises(ValueError, match="8 rows from 1 on do not fit 8"):
        matrix.load_blocks(torch.zeros(8, 68, dtype=torch.uint8), 1)
