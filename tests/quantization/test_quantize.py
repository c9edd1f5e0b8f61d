"""The quantisers against float64: how far they may be off, and what they refuse."""

from __future__ import annotations

import pytest
import torch

from quire.errors import ModelLoadError
from quire.quantization import quantize
from quire.quantization.packed import fit_natively
from quire.quantization.quantize import fitting_group_size, quantize_rows


@pytest.fixture(autouse=True, params=["plain", "native"])
def _search(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both searches for 4 bits."""
    if request.param == "native":
        monkeypatch.setattr(quantize, "fit_groups", fit_natively)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative_error(tensor: torch.Tensor, bits: int, group_size: int | None) -> float:
    weight = quantize_rows(tensor, bits, group_size, name="w").dequantize().double()
    return float((weight - tensor.double()).square().sum() / tensor.double().square().sum())


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 96), (130, 704)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_int8_is_off_by_half_a_step(shape: tuple[int, int], dtype: torch.dtype) -> None:
    tensor = randn(*shape, seed=shape[1]).to(dtype)
    weight = quantize_rows(tensor, 8, None, name="w")
    assert (weight.group_size, weight.offsets, weight.values.dtype) == (shape[1], None, torch.int8)
    exact = tensor.double()
    step = exact.abs().amax(1, keepdim=True) / 127
    assert int(weight.values.abs().max()) == 127
    assert ((weight.dequantize().double() - exact).abs() <= 0.50001 * step).all()


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_int8_by_group(group_size: int) -> None:
    tensor = randn(6, 256)
    tensor[:, :group_size] *= 100
    weight = quantize_rows(tensor, 8, group_size, name="w")
    assert (weight.group_size, tuple(weight.scales.shape)) == (group_size, (6, 256 // group_size))
    assert relative_error(tensor[:, group_size:], 8, group_size) < 1e-4
    exact = tensor.double().view(6, -1, group_size)
    step = exact.abs().amax(2, keepdim=True) / 127
    assert ((weight.dequantize().double().view_as(exact) - exact).abs() <= 0.50001 * step).all()


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("mean", [0.0, 0.7])
def test_int4_beats_plain_rounding(group_size: int, mean: float) -> None:
    """Plain rounding: 16 steps between the smallest and the largest number of each group."""
    tensor = randn(40, 256, seed=group_size) + mean
    weight = quantize_rows(tensor, 4, group_size, name="w")
    assert (weight.group_size, weight.values.dtype) == (group_size, torch.uint8)
    exact = tensor.double().view(40, -1, group_size)
    low, high = exact.amin(2, keepdim=True), exact.amax(2, keepdim=True)
    step = (high - low) / 15
    plain = ((exact - low) / step).round() * step + low
    plain_error = (plain - exact).square().sum(2)
    error = (weight.dequantize().double().view_as(exact) - exact).square().sum(2)
    assert (error <= plain_error * 1.0001).all()
    assert error.sum() < 0.93 * plain_error.sum()


def test_int4_uses_the_nearest_integer_of_its_own_scale() -> None:
    """The stored scale and offset are fitted to the stored values, so hardly a value would be better elsewhere."""
    tensor = randn(64, 128, seed=3)
    weight = quantize_rows(tensor, 4, 128, name="w")
    nearest = ((tensor - weight.offsets) / weight.scales).round().clamp(0, 15)
    assert float((nearest == weight.values).float().mean()) > 0.95


@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_on_the_grid_is_kept(bits: int) -> None:
    """Quantising what was quantised changes nothing, where the whole range of integers is in use."""
    low, high = (0, 16) if bits == 4 else (-127, 128)
    values = torch.randint(low, high, (20, 64), generator=torch.Generator().manual_seed(1))
    values[:, 5], values[:, 40] = low, high - 1
    tensor = values * 0.37 - (0.2 if bits == 4 else 0.0)
    first = quantize_rows(tensor, bits, 64, name="w")
    second = quantize_rows(first.dequantize(), bits, 64, name="w")
    assert torch.equal(first.values.long(), values)
    assert torch.equal(second.values, first.values)
    bound = 2e-3 if bits == 4 else 1e-5  # the scale in float16
    torch.testing.assert_close(second.dequantize(), tensor, rtol=1e-5, atol=bound)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_any_magnitude(bits: int, scale: float) -> None:
    assert relative_error(randn(4, 64) * scale, bits, 64) < (1e-2 if bits == 4 else 1e-4)


@pytest.mark.parametrize("bits", [4, 8])
def test_zeros_stay_zero(bits: int) -> None:
    tensor = randn(4, 64)
    tensor[1] = 0
    weight = quantize_rows(tensor, bits, 32, name="w").dequantize()
    assert (weight[1] == 0).all()
    assert torch.isfinite(weight).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("constant", [0.1, -3.7e20, 1e-20])
def test_constant_rows_are_exact(bits: int, constant: float) -> None:
    tensor = torch.full((3, 96), constant)
    torch.testing.assert_close(quantize_rows(tensor, bits, 32, name="w").dequantize(), tensor, rtol=1e-6, atol=0.0)


def test_one_value_far_from_the_rest() -> None:
    tensor = torch.ones(1, 32) * 0.5
    tensor[0, 3] = 1000.0
    weight = quantize_rows(tensor, 4, 32, name="w").dequantize()
    torch.testing.assert_close(weight, tensor, rtol=2e-4, atol=1e-2)


@pytest.mark.parametrize(
    ("scale", "mean", "is_half"),
    [(1.0, 0.0, True), (1e-4, 0.0, True), (1e-6, 0.0, False), (1e6, 0.0, False), (1e-3, 1.0, False)],
)
def test_float16_holds_the_scales_where_it_is_exact_enough(scale: float, mean: float, is_half: bool) -> None:
    """Not where steps are small for it, or for the offset, and not where it has no such numbers."""
    tensor = randn(4, 64) * scale + mean
    assert quantize_rows(tensor, 4, 32, name="w").has_half_scales == is_half
    centred = tensor - tensor.mean()
    weight = quantize_rows(tensor, 4, 32, name="w").dequantize()
    assert (weight - tensor).square().sum() < 1e-2 * centred.square().sum()
    tensor[0] = 0
    assert quantize_rows(tensor, 4, 32, name="w").has_half_scales == is_half


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_infinities_and_nan_are_refused(bits: int, bad: float) -> None:
    tensor = randn(300, 64)
    tensor[299, 63] = bad
    with pytest.raises(ModelLoadError, match=r"tensor 'layer\.weight': holds infinities or NaN"):
        quantize_rows(tensor, bits, 64, name="layer.weight")


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_do_not_depend_on_their_neighbours(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = randn(33, 96)
    whole = quantize_rows(tensor, bits, 32, name="w").dequantize()
    monkeypatch.setattr(quantize, "WORKING_ELEMENTS", 200)
    assert torch.equal(quantize_rows(tensor, bits, 32, name="w").dequantize(), whole)
    assert torch.equal(quantize_rows(tensor.t().contiguous().t()[7:9], bits, 32, name="w").dequantize(), whole[7:9])


@pytest.mark.parametrize(
    ("columns", "requested", "size"),
    [(256, 128, 128), (256, 64, 64), (704, 128, 64), (96, 128, 32), (4096, 32, 32), (128, 100, 64), (64, 10**6, 64)],
)
def test_group_size(columns: int, requested: int, size: int) -> None:
    assert fitting_group_size(columns, requested) == size
    assert quantize_rows(randn(2, columns), 4, requested, name="w").group_size == size


@pytest.mark.parametrize(
    ("columns", "requested", "message"),
    [
        (100, 128, "100 input features are 3 groups of 32 and 4 left over"),
        (31, 32, "31 input features are 0 groups of 32 and 31 left over"),
        (64, 16, "groups of 16 are not supported: the smallest size is 32"),
    ],
)
def test_no_group_size_fits(columns: int, requested: int, message: str) -> None:
    with pytest.raises(ModelLoadError, match=f"tensor 'w': {message}"):
        quantize_rows(randn(2, columns), 4, requested, name="w")
