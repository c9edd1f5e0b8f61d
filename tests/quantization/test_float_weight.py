"""Matrices of 8-bit and 4-bit floats: what they mean, their parts, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from quire.config.quantization import QuantizationConfig
from quire.errors import ModelLoadError
from quire.quantization.checkpoints import quantized_weights
from quire.quantization.float_weight import Float4Weight, Float8Weight
from quire.quantization.quantize_floats import quantize_float8, quantize_mxfp4
from quire.quantization.quantized_weight import QuantizedWeight
from tests.quantization.float_packers import E2M1, E4M3, Pack, Tensors, fp8, mxfp4, nvfp4

NAME = "model.layers.0.mlp.up_proj"
FP8 = QuantizationConfig("fp8", None, "fp8")
BLOCKS = QuantizationConfig("fp8", None, "fp8", block_size=(8, 16))
FORMATS: dict[str, tuple[QuantizationConfig, Pack]] = {
    "tensor": (FP8, fp8("tensor", activations="input_scale")),
    "one": (FP8, fp8("one")),
    "row": (FP8, fp8("row", name="weight_scale_inv", activations="activation_scale")),
    "flat": (FP8, fp8("flat")),
    "block": (BLOCKS, fp8("block", block=(8, 16), name="weight_scale_inv")),
    "modelopt-nvfp4": (QuantizationConfig("nvfp4", 16, "nvfp4"), nvfp4("modelopt")),
    "nvfp4": (QuantizationConfig("nvfp4", 16, "nvfp4-pack-quantized"), nvfp4("compressed-tensors")),
    "mxfp4": (QuantizationConfig("mxfp4", 32, "mxfp4-pack-quantized"), mxfp4),
}


def read(tensors: Tensors, config: QuantizationConfig) -> QuantizedWeight:
    ((name, weight),) = quantized_weights([(f"{NAME}.{part}", tensor) for part, tensor in tensors.items()], config)
    assert name == f"{NAME}.weight"
    assert isinstance(weight, QuantizedWeight)
    return weight


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("rows", "columns"), [(24, 64), (7, 32)])
def test_values_are_those_of_the_definition(name: str, rows: int, columns: int) -> None:
    config, pack = FORMATS[name]
    tensors, meaning = pack(rows, columns, 3)
    weight = read(tensors, config)
    assert weight.shape == (rows, columns)
    torch.testing.assert_close(weight.dequantize().double(), meaning, rtol=1e-6, atol=0)


def test_blocks_that_are_cut_off_at_the_end() -> None:
    tensors, meaning = fp8("block", block=(8, 16))(20, 40, 1)
    assert tensors["weight_scale"].shape == (3, 3)
    torch.testing.assert_close(read(tensors, BLOCKS).dequantize().double(), meaning, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["block", "modelopt-nvfp4", "mxfp4", "row"])
def test_parts_of_a_matrix(name: str) -> None:
    config, pack = FORMATS[name]
    tensors, _ = pack(24, 96, 5)
    weight = read(tensors, config)
    dense = weight.dequantize()
    assert torch.equal(weight.narrow(0, 5, 9).dequantize(), dense[5:14])
    assert torch.equal(weight[1::2].dequantize(), dense[1::2])
    assert torch.equal(weight.narrow(1, 32, 64).dequantize(), dense[:, 32:])
    assert weight.narrow(1, 0, 96) is weight
    assert torch.equal(torch.cat([block.dequantize() for _, block in weight.row_blocks()]), dense)


@pytest.mark.parametrize("name", ["block", "modelopt-nvfp4", "mxfp4"])
def test_a_part_that_cuts_through_a_block_is_refused(name: str) -> None:
    config, pack = FORMATS[name]
    weight = read(pack(16, 96, 5)[0], config)
    for start, length in ((0, 40), (8, 88)):
        with pytest.raises(ModelLoadError, match="do not start and end with a group of"):
            weight.narrow(1, start, length)


def test_experts_in_one_tensor() -> None:
    """GPT-OSS: [experts, rows, groups, 16] bytes, the first value of each in the lower half."""
    random = torch.Generator().manual_seed(1)
    blocks = torch.randint(256, (3, 6, 2, 16), generator=random, dtype=torch.uint8)
    scales = torch.randint(120, 130, (3, 6, 2), generator=random, dtype=torch.uint8)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    bias = torch.zeros(3, 6)
    stream = [(f"{name}_blocks", blocks), (f"{name}_bias", bias), (f"{name}_scales", scales)]
    found = dict(quantized_weights(stream, QuantizationConfig("mxfp4", 32, "mxfp4")))
    assert list(found) == [f"{name}_bias", name]
    weight = found[name]
    assert isinstance(weight, Float4Weight)
    assert weight.shape == (3, 6, 64)
    expected = torch.zeros(6, 64, dtype=torch.float64)
    for row in range(6):
        for column in range(64):
            byte = int(blocks[1, row, column // 32, column % 32 // 2])
            code = byte >> 4 if column % 2 else byte & 15
            expected[row, column] = E2M1[code] * 2.0 ** (int(scales[1, row, column // 32]) - 127)
    expert = weight.narrow(0, 1, 1)[0]
    assert torch.equal(expert.dequantize().double(), expected)
    assert torch.equal(expert[0::2].dequantize(), expert.dequantize()[0::2])


def nan_weight(tensors: Tensors) -> None:
    tensors["weight"].view(torch.uint8)[3, 5] = 0xFF


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("row", nan_weight, f"tensor '{NAME}.weight': values hold NaN"),
        ("row", lambda t: t["weight_scale_inv"].fill_(float("inf")), f"tensor '{NAME}.weight': scales hold infinities"),
        ("row", lambda t: t.pop("weight_scale_inv"), f"tensor '{NAME}.weight_scale' missing"),
        ("row", lambda t: t.update(weight_scale_inv=torch.ones(3)), rf"'{NAME}.weight_scale' is \[3\] of float32"),
        ("block", lambda t: t.update(weight_scale_inv=torch.ones(24, 1)), rf"'{NAME}.weight_scale' is \[24, 1\]"),
        ("mxfp4", lambda t: t["weight_scale"].fill_(255), f"tensor '{NAME}.weight': scales hold NaN"),
        ("modelopt-nvfp4", lambda t: t["weight_scale"].view(torch.uint8).fill_(127), f"'{NAME}.weight': scales hold N"),
        ("modelopt-nvfp4", lambda t: t["weight_scale_2"].fill_(float("nan")), f"'{NAME}.weight': scales of rows hold"),
        ("nvfp4", lambda t: t["weight_global_scale"].fill_(0), f"'{NAME}.weight_global_scale' is 0"),
        ("nvfp4", lambda t: t.update(weight_global_scale=torch.ones(2)), rf"'{NAME}.weight_global_scale' is \[2\]"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(name: str, change: Callable[[Tensors], object], message: str) -> None:
    config, pack = FORMATS[name]
    tensors, _ = pack(24, 64, 1)
    change(tensors)
    with pytest.raises(ModelLoadError, match=message):
        read(tensors, config)


def test_plain_weights_beside_quantised_ones_pass_through() -> None:
    plain = torch.ones(3, 4)
    assert dict(quantized_weights([("a.weight", plain)], FP8))["a.weight"] is plain


# -- rounding ---------------------------------------------------------------------------------------------------------


def test_fp8_rounds_to_the_nearest_number_of_the_row() -> None:
    weight = torch.randn(20, 50, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 3, 20)[:, None]
    weight[4] = 0
    found = quantize_float8(weight, name="w")
    assert isinstance(found, Float8Weight)
    numbers = torch.cat([E4M3[:127], E4M3[128:255]]).unique()
    scaled = weight.double() / found.scales.double()
    nearest = (scaled.unsqueeze(-1) - numbers).abs().amin(-1)
    error = (found.values.double() - scaled).abs()
    torch.testing.assert_close(error, nearest, rtol=0, atol=1e-5)
    assert float(found.values.float().abs().amax()) == 448


@pytest.mark.parametrize("columns", [64, 50, 33])
def test_mxfp4_rounds_to_the_nearest_number_of_the_group(columns: int) -> None:
    weight = torch.randn(20, columns, generator=torch.Generator().manual_seed(1)) * torch.logspace(-30, 30, 20)[:, None]
    weight[4] = 0
    weight[5] *= 1e-44 / 1e-20
    found = quantize_mxfp4(weight, name="w")
    dense = found.dequantize().double()
    scales = 2.0 ** (found.scale_codes.double() - 127).repeat_interleave(32, 1)[:, :columns]
    nearest = ((weight.double() / scales).unsqueeze(-1) - E2M1).abs().amin(-1) * scales
    torch.testing.assert_close((dense - weight.double()).abs(), nearest, rtol=1e-9, atol=0)
    # Neither a finer nor a coarser power of two is better.
    error = (dense - weight.double()).square()
    for shift in (0.25, 0.5, 2.0):
        other = ((weight.double() / (scales * shift)).unsqueeze(-1) - E2M1).abs().amin(-1) * scales * shift
        assert bool((error[:, :32].sum(1) <= other[:, :32].square().sum(1) * (1 + 1e-9)).all()) or shift == 0.5


def test_ties_go_to_the_even_code() -> None:
    middles = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -2.5, -5.0, 6.0] + [0.0] * 20])
    found = quantize_mxfp4(middles, name="w").dequantize()[0, :12].tolist()
    assert found == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 0.0, -1.0, -2.0, -4.0, 6.0]


@pytest.mark.parametrize("quantize", [quantize_float8, quantize_mxfp4])
def test_what_is_not_finite_is_refused(quantize: Callable[..., QuantizedWeight]) -> None:
    for value in (float("inf"), float("nan")):
        with pytest.raises(ModelLoadError, match="tensor 'w': holds infinities or NaN"):
            quantize(torch.tensor([[1.0, value]]), name="w")
