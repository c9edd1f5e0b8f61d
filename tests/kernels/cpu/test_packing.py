"""Packing: what is loaded comes back, wherever rows and groups lie, and nothing else changes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels.cpu._native import WeightType
from quire.kernels.cpu.packing import HalfScaleMatrix, PackedMatrix

_FLOATS = {WeightType.F32: torch.float32, WeightType.BF16: torch.bfloat16, WeightType.F16: torch.float16}


def _awkward_values(count: int) -> torch.Tensor:
    """Random numbers, and those that conversions get wrong: ties, subnormals, the largest, infinities, zeros."""
    special = [0.0, -0.0, float("inf"), -float("inf"), 65504.0, 65519.9, 65520.0, 1e-7, -6e-8, 2.98e-8, 3.4e38, 1e-40]
    special += [1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8, 1.0 + 2.0**-11, 1.0 + 3 * 2.0**-11, 6.1e-5, 6.103e-5, -5.97e-8]
    values = torch.randn(count) * 10.0 ** torch.randint(-8, 5, (count,))
    values[: len(special)] = torch.tensor(special)
    return values[torch.randperm(count)]


@pytest.mark.parametrize("target", list(_FLOATS))
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
def test_floats_are_converted_as_torch_converts_them(target: WeightType, source: torch.dtype) -> None:
    torch.manual_seed(1)
    rows = _awkward_values(45 * 67).view(45, 67).to(source)
    matrix = PackedMatrix(target, 67, 45)
    matrix.load_dense(rows)
    assert torch.equal(matrix.dequantize(), rows.to(_FLOATS[target]).float())


def test_nan_stays_nan() -> None:
    for target in _FLOATS:
        matrix = PackedMatrix(target, 3, 2)
        matrix.load_dense(torch.tensor([[1.0, float("nan"), 2.0], [3.0, 4.0, 5.0]]))
        assert matrix.dequantize().isnan().tolist() == [[False, True, False], [False, False, False]]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_parts_land_in_their_rows(data: st.DataObject) -> None:
    """Rows loaded in parts, in any order, from strided tensors, gated or not, groups of any size."""
    gated = data.draw(st.booleans())
    out_features = data.draw(st.integers(1, 50)) * (2 if gated else 1)
    in_features = data.draw(st.integers(1, 150))
    type = data.draw(st.sampled_from([WeightType.F32, WeightType.BF16, WeightType.I8, WeightType.I4]))
    cuts = sorted({0, out_features, *data.draw(st.lists(st.integers(0, out_features), max_size=3))})
    parts = data.draw(st.permutations(list(pairwise(cuts))))
    order = torch.randperm(in_features) if data.draw(st.booleans()) else None
    if type in _FLOATS:
        matrix = PackedMatrix(type, in_features, out_features, gated=gated)
        whole = torch.randn(out_features, in_features + 3).to(_FLOATS[type])[:, 1 : in_features + 1]
        for first, end in parts:
            matrix.load_dense(whole[first:end], first)
        expected = whole.float()
    else:
        group_size = data.draw(st.sampled_from([None, 7, 16, 32, 64]))
        matrix = PackedMatrix(type, in_features, out_features, group_size=group_size, gated=gated, with_offsets=True)
        low, high, dtype = (-128, 128, torch.int8) if type == WeightType.I8 else (0, 16, torch.uint8)
        values = torch.randint(low, high, (out_features, in_features + 2), dtype=dtype)[:, :in_features]
        scales, offsets = torch.randn(2, out_features, matrix.num_groups)
        for first, end in parts:
            matrix.load_integer(values[first:end], scales[first:end], offsets[first:end], first)
        group_of = torch.arange(in_features) // matrix.group_size
        expected = scales[:, group_of] * values + offsets[:, group_of]
    if order is not None:
        matrix.set_column_order(order)
        expected = torch.empty_like(expected).index_copy_(1, order, expected)
    torch.testing.assert_close(matrix.dequantize(), expected, rtol=1e-6, atol=1e-6)


def test_a_part_leaves_the_others_alone() -> None:
    matrix = PackedMatrix(WeightType.I4, 20, 70, group_size=16)
    matrix.load_integer(torch.full((3, 20), 15, dtype=torch.uint8), torch.ones(3, 2), None, 31)
    dense = matrix.dequantize()
    assert dense[31:34].eq(15).all()
    assert dense[:31].eq(0).all()
    assert dense[34:].eq(0).all()
    matrix.load_integer(torch.zeros(1, 20, dtype=torch.uint8), torch.ones(1, 2), None, 32)
    assert matrix.dequantize()[31:34, 0].tolist() == [15, 0, 15]


def test_memory_is_aligned_and_counted() -> None:
    matrix = PackedMatrix(WeightType.BF16, 100, 96)
    assert matrix.data.data_ptr() % 64 == 0
    assert matrix.nbytes == 100 * 96 * 2
    quarter = PackedMatrix(WeightType.I4, 128, 64, group_size=32, with_offsets=True)
    assert quarter.nbytes == 128 * 64 // 2 + 2 * 4 * 64 * 4
    halved = HalfScaleMatrix(WeightType.I4, 128, 64, group_size=32, with_offsets=True)
    assert halved.nbytes == 128 * 64 // 2 + 2 * 4 * 64 * 2
    quarter.load_bias(torch.ones(64))
    assert quarter.nbytes == 128 * 64 // 2 + 2 * 4 * 64 * 4 + 64 * 4


def test_bias_follows_the_columns() -> None:
    gated = PackedMatrix(WeightType.F32, 4, 40, gated=True)
    gated.load_bias(torch.arange(20.0), 0)
    gated.load_bias(torch.arange(100.0, 120.0), 20)
    assert gated.bias is not None
    assert gated.bias[:16].tolist() == list(range(16))
    assert gated.bias[16:32].tolist() == list(range(100, 116))
    assert gated.bias[32:36].tolist() == [16, 17, 18, 19]
    assert gated.bias[36:48].eq(0).all()
    assert gated.bias[48:52].tolist() == [116, 117, 118, 119]


@pytest.mark.parametrize(
    "arguments",
    [
        {"type": WeightType.F32, "group_size": 32},
        {"type": WeightType.BF16, "integer_activations": True},
        {"type": WeightType.I8, "group_size": 0},
        {"type": WeightType.F32, "gated": True, "out_features": 7},
        {"type": WeightType.F32, "in_features": 0},
    ],
)
def test_impossible_matrices_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        PackedMatrix(**{"in_features": 64, "out_features": 32, **arguments})  # type: ignore[arg-type]


def test_what_does_not_fit_is_refused() -> None:
    dense = PackedMatrix(WeightType.F32, 8, 32)
    integers = PackedMatrix(WeightType.I8, 8, 32, group_size=4)
    values, scales = torch.zeros(4, 8, dtype=torch.int8), torch.ones(4, 2)
    for call in (
        lambda: dense.load_dense(torch.zeros(4, 7)),
        lambda: dense.load_dense(torch.zeros(4, 8), 29),
        lambda: dense.load_dense(torch.zeros(4, 8), -1),
        lambda: dense.load_integer(values, scales),
        lambda: integers.load_dense(torch.zeros(4, 8)),
        lambda: integers.load_integer(values, scales[:, :1]),
        lambda: integers.load_integer(values, scales.double()),
        lambda: integers.load_integer(values, scales, scales),
        lambda: integers.load_integer(values, scales, None, 30),
        lambda: dense.load_bias(torch.zeros(4), 29),
        lambda: dense.set_column_order(torch.zeros(8, dtype=torch.int32)),
        lambda: dense.set_column_order(torch.arange(7)),
    ):
        with pytest.raises(ValueError):
            call()
    with pytest.raises(TypeError):
        dense.load_dense(torch.zeros(4, 8, dtype=torch.int8))
    with pytest.raises(TypeError):
        integers.load_integer(values.to(torch.uint8), scales)
