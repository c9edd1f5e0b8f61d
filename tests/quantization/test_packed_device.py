"""How quantised matrices come together in a stack on a device."""

from __future__ import annotations

import pytest
import torch

from quire.errors import ModelLoadError
from quire.quantization.device import DeviceLinear
from quire.quantization.interface import LinearShape
from quire.quantization.packed_device import PackedDeviceLinear
from quire.quantization.quantize import quantize_rows
from quire.quantization.quantize_floats import quantize_float8, quantize_mxfp4
from quire.quantization.quantized_weight import QuantizedWeight
from quire.quantization.weight_format import WeightFormat

SHAPE = LinearShape(32, 6, bias=False, dtype=torch.float32, device=torch.device("cpu"))
WEIGHT = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
ROWS = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def linear() -> PackedDeviceLinear:
    plain = DeviceLinear(torch.float32, batch_invariant=True)
    return PackedDeviceLinear(plain, WeightFormat("float32"), 8, converts_e4m3=False, rounds_activations=False)


def check(linear: PackedDeviceLinear, parts: list[torch.Tensor | QuantizedWeight], order: list[int]) -> None:
    """Parts of two rows each, loaded in this order, are one matrix."""
    parameters = linear.create(SHAPE)
    for index in order:
        linear.load_rows(parameters, "weight", parts[index], 2 * index, 2)
    meaning = torch.cat([part if isinstance(part, torch.Tensor) else part.dequantize() for part in parts])
    torch.testing.assert_close(linear.apply(parameters, ROWS), ROWS @ meaning.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_parts_come_in_any_order(linear: PackedDeviceLinear, order: list[int]) -> None:
    check(linear, [quantize_rows(part, 4, 32) for part in WEIGHT.split(2)], order)


@pytest.mark.parametrize("order", [[0, 1, 2], [1, 0, 2], [2, 1, 0]])
def test_parts_of_other_formats_are_widened(linear: PackedDeviceLinear, order: list[int]) -> None:
    first, second, third = WEIGHT.split(2)
    check(linear, [quantize_float8(first), second, quantize_mxfp4(third)], order)
    check(linear, [quantize_float8(first), quantize_rows(second, 8, None), quantize_mxfp4(third)], order)


def test_experts_in_different_formats_are_refused(linear: PackedDeviceLinear) -> None:
    stack = linear.create_stack(SHAPE, 2)
    linear.load_rows(stack[0], "weight", quantize_float8(WEIGHT), 0, 6)
    with pytest.raises(ModelLoadError, match="different formats"):
        linear.load_rows(stack[1], "weight", quantize_mxfp4(WEIGHT), 0, 6)
    with pytest.raises(ModelLoadError, match="are quantised, and others are not"):
        linear.load_rows(stack[1], "weight", WEIGHT, 0, 6)
