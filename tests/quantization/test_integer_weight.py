"""IntegerWeight: what it means, what parts of it mean, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.errors import ModelLoadError
from quire.quantization import quantized_weight
from quire.quantization.integer_weight import IntegerWeight, copy_into


def make(
    rows: int = 6, columns: int = 12, bits: int = 4, group_size: int = 4, *, offsets: bool = True, order: bool = False
) -> IntegerWeight:
    generator = torch.Generator().manual_seed(rows * columns + bits)
    low, high, dtype = (0, 16, torch.uint8) if bits == 4 else (-128, 128, torch.int8)
    groups = columns // group_size
    return IntegerWeight(
        torch.randint(low, high, (rows, columns), generator=generator).to(dtype),
        bits,
        group_size,
        torch.rand(rows, groups, generator=generator),
        torch.randn(rows, groups, generator=generator) if offsets else None,
        torch.randperm(columns, generator=generator).int() if order else None,
    )


def definition(weight: IntegerWeight) -> torch.Tensor:
    """float64, number by number."""
    rows, columns = weight.shape
    result = torch.full((rows, columns), torch.nan, dtype=torch.float64)
    for n in range(rows):
        for k in range(columns):
            group = k // weight.group_size
            offset = 0.0 if weight.offsets is None else float(weight.offsets[n, group])
            feature = k if weight.column_order is None else int(weight.column_order[k])
            result[n, feature] = float(weight.scales[n, group]) * int(weight.values[n, k]) + offset
    return result


WEIGHTS = {
    "int4": make(),
    "int4-reordered": make(order=True),
    "int4-one-group": make(group_size=12),
    "int8": make(bits=8, offsets=False),
    "int8-offsets": make(bits=8),
    "int8-rows": make(bits=8, group_size=12, offsets=False),
    "one-by-one": make(rows=1, columns=1, group_size=1),
}


@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS.keys())
def test_dequantize_is_the_definition(weight: IntegerWeight) -> None:
    result = weight.dequantize()
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), definition(weight), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS.keys())
def test_rows_of_it(weight: IntegerWeight) -> None:
    whole = weight.dequantize()
    part = weight.narrow(0, weight.shape[0] // 2, 1)
    assert part.shape == (1, weight.shape[1])
    assert torch.equal(part.dequantize(), whole[weight.shape[0] // 2].unsqueeze(0))
    assert part.values.data_ptr() == weight.values[weight.shape[0] // 2].data_ptr()


@pytest.mark.parametrize(("bits", "offsets"), [(4, True), (8, False), (8, True)])
def test_input_features_of_it(bits: int, offsets: bool) -> None:
    weight = make(bits=bits, offsets=offsets)
    part = weight.narrow(1, 4, 8)
    assert torch.equal(part.dequantize(), weight.dequantize()[:, 4:12])
    assert part.group_size == 4


def test_one_scale_a_row_can_be_cut_anywhere() -> None:
    weight = WEIGHTS["int8-rows"]
    assert torch.equal(weight.narrow(1, 3, 5).dequantize(), weight.dequantize()[:, 3:8])


@pytest.mark.parametrize(("start", "length"), [(2, 4), (4, 6), (0, 3)])
def test_a_cut_through_a_group_is_refused(start: int, length: int) -> None:
    with pytest.raises(ModelLoadError, match=f"{start} to {start + length} do not start and end with a group of 4"):
        make().narrow(1, start, length)


def test_reordered_columns_cannot_be_cut() -> None:
    weight = WEIGHTS["int4-reordered"]
    assert weight.narrow(1, 0, 12) is weight
    with pytest.raises(ModelLoadError, match="act-order"):
        weight.narrow(1, 0, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS.keys())
def test_copying_block_by_block(weight: IntegerWeight, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_weight, "BLOCK_ELEMENTS", 25)
    assert len(list(weight.row_blocks())) == -(-weight.shape[0] // max(1, 25 // weight.shape[1]))
    target = torch.full(weight.shape, torch.nan, dtype=dtype)
    copy_into(target, weight)
    assert torch.equal(target, weight.dequantize().to(dtype))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 3}, "3-bit weights are not supported"),
        ({"values": torch.zeros(6, 12)}, "values of 4 bits must be a matrix of torch.uint8"),
        ({"values": torch.zeros(72, dtype=torch.uint8)}, "must be a matrix"),
        ({"values": torch.zeros(0, 12, dtype=torch.uint8)}, "must be a matrix"),
        ({"values": torch.full((6, 12), 16, dtype=torch.uint8)}, "must lie in 0 to 15, not 16"),
        ({"group_size": 5}, "groups of 5 do not divide the 12"),
        ({"group_size": 0}, "groups of 0 do not divide"),
        ({"scales": torch.ones(6, 4)}, r"scales must be \[6, 3\]"),
        ({"scales": torch.ones(6, 3).half()}, "not .* of torch.float16"),
        ({"scales": torch.full((6, 3), torch.inf)}, "scales hold infinities or NaN"),
        ({"offsets": torch.full((6, 3), torch.nan)}, "offsets hold infinities or NaN"),
        ({"offsets": torch.ones(3, 6)}, r"offsets must be \[6, 3\]"),
        ({"offsets": None}, "4-bit weights need offsets"),
        ({"column_order": torch.arange(12)}, "column_order must be .* of torch.int32"),
        ({"column_order": torch.arange(11).int()}, r"column_order must be \[12\]"),
        ({"column_order": torch.zeros(12).int()}, "does not name each of the 12"),
        ({"column_order": torch.arange(12).int() - 1}, "does not name each of the 12"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        replace(make(), **changes)
