"""Blocks of a GGUF file packed as they are, and integers with scales and offsets in float16, against the same numbers
packed with float32 ones or as 4-bit floats: no bit of a result differs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from quire.kernels.cpu import _native, packing
from quire.kernels.cpu._native import MatmulPrecision, WeightType
from quire.kernels.cpu.packing import BLOCK_LAYOUTS, BlockMatrix, HalfScaleMatrix, PackedMatrix
from quire.models.gguf.blocks import FORMATS
from quire.quantization.integer_weight import IntegerWeight
from tests.kernels.cpu.linear_calls import BF16_ISAS, ISAS, GuardedRows, pool, run_linear
from tests.long import one_in

WIDTHS = {name: 2 * layout.values if layout.is_super else 96 for name, layout in BLOCK_LAYOUTS.items()}
PACKED = [name for name in FORMATS if name in BLOCK_LAYOUTS]


def halved_pair(rows: int, *, gated: bool, rounded: bool) -> tuple[PackedMatrix, PackedMatrix]:
    random = torch.Generator().manual_seed(rows)
    values = torch.randint(16, (rows, 96), generator=random, dtype=torch.uint8)
    scales, offsets = (torch.randn(rows, 3, generator=random).half().float() for _ in range(2))
    both = []
    for form in (HalfScaleMatrix, PackedMatrix):
        options = {"integer_activations": rounded, "with_offsets": True}
        both.append(form(WeightType.I4, 96, rows, group_size=32, gated=gated, **options))
        both[-1].load_integer(values, scales, offsets)
    return both[0], both[1]


def random_blocks(name: str, rows: int) -> npt.NDArray[np.uint8]:
    """[rows, blocks, bytes of a block]: any bytes, with scales of both signs, some of which are small."""
    layout, random = BLOCK_LAYOUTS[name], np.random.default_rng(rows)
    blocks = random.integers(0, 256, (rows, WIDTHS[name] // layout.values, layout.num_bytes), dtype=np.uint8)
    if name == "MXFP4":
        blocks[:, :, 0] = random.integers(118, 123, blocks.shape[:2])
        return blocks
    for at in FORMATS[name].half_places:
        halves = random.normal(0, 0.01, blocks.shape[:2]).astype("<f2")
        halves[0] = 6e-8  # below the normal numbers of float16
        blocks[:, :, at : at + 2] = halves[:, :, None].view(np.uint8)
    return blocks


def whole_matrix(name: str, blocks: npt.NDArray[np.uint8], *, gated: bool = False) -> BlockMatrix:
    """Loaded in two parts, of which the first ends inside a panel."""
    rows = len(blocks)
    matrix = BlockMatrix(name, WIDTHS[name], rows, gated=gated)
    flat = torch.from_numpy(blocks.reshape(rows, -1))
    for first, end in ((0, rows // 3), (rows // 3, rows)):
        matrix.load_blocks(flat[first:end], first)
    return matrix


def taken_apart(name: str, blocks: npt.NDArray[np.uint8]) -> IntegerWeight:
    values, scales, offsets = FORMATS[name].unpack(blocks.reshape(-1, blocks.shape[-1]))
    rows, bits = len(blocks), FORMATS[name].bits
    return IntegerWeight(
        torch.from_numpy(values.reshape(rows, -1)),
        bits,
        FORMATS[name].group_size,
        torch.from_numpy(scales.reshape(rows, -1)),
        None if offsets is None else torch.from_numpy(offsets.reshape(rows, -1)),
    )


def pair(name: str, rows: int, *, gated: bool = False) -> tuple[PackedMatrix, PackedMatrix]:
    """The same matrix in both forms."""
    if name == "halves":
        return halved_pair(rows, gated=gated, rounded=False)
    blocks = random_blocks(name, rows)
    whole, width = whole_matrix(name, blocks, gated=gated), WIDTHS[name]
    if name == "MXFP4":
        apart = PackedMatrix(WeightType.MXFP4, width, rows, gated=gated)
        codes = np.concatenate((blocks[:, :, 1:] & 15, blocks[:, :, 1:] >> 4), axis=2).reshape(rows, width)
        apart.load_float4(
            torch.from_numpy(codes[:, 0::2] | codes[:, 1::2] << 4), torch.from_numpy(blocks[:, :, 0].copy())
        )
        return whole, apart
    weight = taken_apart(name, blocks)
    has_offsets = weight.offsets is not None
    # Tiles of AMX add up nibbles in an order of their own.
    kind = WeightType.I4 if BLOCK_LAYOUTS[name].type == WeightType.I4 else WeightType.I8
    apart = PackedMatrix(kind, width, rows, group_size=weight.group_size, gated=gated, with_offsets=has_offsets)
    values = weight.values if kind == WeightType.I4 else weight.values.to(torch.int8)
    apart.load_integer(values, weight.scales, weight.offsets)
    return whole, apart


def embedded(matrix: PackedMatrix, isa: str) -> torch.Tensor:
    """All rows, looked up."""
    width = matrix.in_features
    out, ids = GuardedRows(matrix.out_features, width), torch.arange(matrix.out_features)
    program = _native.Program(isa, pool(1), len(ids), MatmulPrecision.FLOAT32)
    place = _native.Ref(0, 0, out.stride)
    program.embed(matrix.as_native(), width, 0, _native.TOKEN_IDS, False, place)
    program.bind(len(ids), [ids.data_ptr(), ids.data_ptr()], [], [out.address()], 0)()
    out.check()
    return out.values.clone()


def precisions(isa: str) -> list[MatmulPrecision]:
    return [MatmulPrecision.FLOAT32, *([MatmulPrecision.BFLOAT16] if isa in BF16_ISAS else [])]


@pytest.mark.parametrize(("name", "isa"), one_in(3, [*PACKED, "MXFP4", "halves"], ISAS))
def test_the_same_bits_as_numbers_taken_apart(name: str, isa: str) -> None:
    for rows, gated in ((45, False), (20, True), (64, True)):
        whole, apart = pair(name, rows, gated=gated)
        assert whole.nbytes <= apart.nbytes
        assert torch.equal(whole.dequantize(), apart.dequantize())
        assert torch.equal(embedded(whole, isa), embedded(apart, isa)) or gated
        for count in (1, 3, 14):
            x = torch.randn(count, whole.in_features, generator=torch.Generator().manual_seed(count))
            for precision in precisions(isa):
                found, expected = (run_linear(each, x, isa=isa, precision=precision) for each in (whole, apart))
                assert torch.equal(found, expected)


@pytest.mark.parametrize("name", list(BLOCK_LAYOUTS))
def test_no_byte_more_than_the_file_has(name: str) -> None:
    layout = BLOCK_LAYOUTS[name]
    matrix = BlockMatrix(name, 4 * layout.values, 64)
    assert matrix.nbytes == 64 * 4 * layout.num_bytes


@pytest.mark.parametrize("name", list(BLOCK_LAYOUTS))
@pytest.mark.parametrize(("rows", "first", "gated"), [(150, 0, False), (33, 7, False), (96, 0, True), (5, 0, False)])
def test_threads_pack_the_bytes_of_one(
    name: str, rows: int, first: int, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = torch.from_numpy(random_blocks(name, rows).reshape(rows, -1))
    alone, shared = (BlockMatrix(name, WIDTHS[name], first + rows, gated=gated) for _ in range(2))
    alone.load_blocks(blocks, first)
    monkeypatch.setattr(packing, "affinity_cores", lambda: 4)
    monkeypatch.setattr(packing, "_BYTES_OF_A_THREAD", 1)
    shared.load_blocks(blocks, first)
    for one, other in zip(alone._stored(), shared._stored(), strict=True):
        assert (one is None and other is None) or torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("isa", ISAS)
def test_with_activations_rounded_to_integers(isa: str) -> None:
    whole, apart = halved_pair(45, gated=False, rounded=True)
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    assert torch.equal(run_linear(whole, x, isa=isa), run_linear(apart, x, isa=isa))


def test_blocks_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="make up 40 inputs"):
        BlockMatrix("Q4_0", 40, 8)
    with pytest.raises(ValueError, match="no blocks of 256 values make up 96 inputs"):
        BlockMatrix("Q4_K", 96, 8)
    matrix = BlockMatrix("Q8_0", 64, 8)
    with pytest.raises(ValueError, match="do not fit 68 bytes of blocks"):
        matrix.load_blocks(torch.zeros(8, 36, dtype=torch.uint8))
    with pytest.raises(ValueError, match="8 rows from 1 on do not fit 8"):
        matrix.load_blocks(torch.zeros(8, 68, dtype=torch.uint8), 1)
