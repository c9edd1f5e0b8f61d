"""Reading GPTQ, AWQ and compressed-tensors matrices that `packers` wrote from the formats' definitions."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import pytest
import torch

from quire.config.quantization import QuantizationConfig
from quire.errors import ModelLoadError
from quire.quantization.checkpoints import quantized_weights
from quire.quantization.integer_weight import IntegerWeight
from tests.quantization import packers
from tests.quantization.packers import Matrix, Tensors, random_matrix

Stream = list[tuple[str, torch.Tensor]]
NAME = "model.layers.0.mlp.up_proj"


def read(stream: Stream, config: QuantizationConfig) -> dict[str, torch.Tensor | IntegerWeight]:
    names = [name for name, _ in quantized_weights(stream, config)]
    assert len(names) == len(set(names))
    return dict(quantized_weights(stream, config))


def read_one(tensors: Tensors, config: QuantizationConfig) -> IntegerWeight:
    result = read(packers.named(NAME, tensors), config)
    assert list(result) == [f"{NAME}.weight"]
    weight = result[f"{NAME}.weight"]
    assert isinstance(weight, IntegerWeight)
    return weight


def check(weight: IntegerWeight, matrix: Matrix) -> None:
    assert (weight.shape, weight.bits, weight.num_groups) == (matrix.size, matrix.bits, matrix.num_groups)
    torch.testing.assert_close(weight.dequantize().double(), matrix.definition(), rtol=1e-5, atol=1e-6)


def config_of(method: str, group_size: int | None, layout: str, **options: bool) -> QuantizationConfig:
    return QuantizationConfig(method, group_size, layout, **options)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "rows", "columns", "group_size"), [(4, 16, 64, 32), (4, 8, 32, 32), (8, 12, 48, 16)])
def test_gptq(version: int, symmetric: bool, bits: int, rows: int, columns: int, group_size: int) -> None:
    matrix = random_matrix(rows, columns, bits, group_size, symmetric=symmetric, seed=version)
    layout = "gptq" if version == 1 else "gptq_v2"
    config = config_of(f"int{bits}", group_size, layout, symmetric=False)
    weight = read_one(packers.gptq(matrix, version=version), config)
    check(weight, matrix)
    assert weight.column_order is None
    assert (weight.offsets is None) == (bits == 8 and symmetric)


@pytest.mark.parametrize("bits", [4, 8])
def test_gptq_one_group(bits: int) -> None:
    matrix = random_matrix(8, 40, bits, 40)
    check(read_one(packers.gptq(matrix), config_of(f"int{bits}", None, "gptq", symmetric=False)), matrix)


def test_gptq_zero_point_zero_is_stored_as_the_largest_number() -> None:
    matrix = random_matrix(8, 32, 4, 32)
    matrix.zeros[:] = torch.arange(8).unsqueeze(1)
    tensors = packers.gptq(matrix)
    assert int(tensors["qzeros"][0, 0]) == 0x6543210F
    check(read_one(tensors, config_of("int4", 32, "gptq", symmetric=False)), matrix)


@pytest.mark.parametrize("bits", [4, 8])
def test_gptq_act_order(bits: int) -> None:
    matrix = random_matrix(16, 64, bits, 16, reordered=True)
    weight = read_one(packers.gptq(matrix), config_of(f"int{bits}", 16, "gptq", symmetric=False, reordered=True))
    check(weight, matrix)
    assert weight.column_order is not None
    assert [matrix.group_of[column] for column in weight.column_order] == [k // 16 for k in range(64)]


def test_gptq_act_order_that_moves_nothing() -> None:
    matrix = random_matrix(16, 64, 4, 16)
    config = config_of("int4", 16, "gptq", symmetric=False, reordered=True)
    weight = read_one(packers.gptq(matrix), config)
    check(weight, matrix)
    assert weight.column_order is None


def test_gptq_words_by_hand() -> None:
    """The first number of a word stands in its lowest bits; the word of one output row holds 8 features."""
    tensors = {
        "qweight": torch.tensor([[0x76543210, 0x01234567] + [0] * 6]).int(),
        "qzeros": torch.tensor([[0x77777777]]).int(),
        "scales": torch.full((1, 8), 0.5).half(),
    }
    weight = read_one(tensors, config_of("int4", 8, "gptq", symmetric=False)).dequantize()
    assert weight[0].tolist() == [0.5 * (q - 8) for q in range(8)]
    assert weight[1].tolist() == [0.5 * (q - 8) for q in range(7, -1, -1)]


@pytest.mark.parametrize(("rows", "columns", "group_size"), [(16, 64, 32), (8, 32, 32), (24, 48, 16)])
def test_awq(rows: int, columns: int, group_size: int) -> None:
    matrix = random_matrix(rows, columns, 4, group_size, seed=rows)
    check(read_one(packers.awq(matrix), config_of("int4", group_size, "awq", symmetric=False)), matrix)


def test_awq_one_group() -> None:
    matrix = random_matrix(8, 40, 4, 40)
    check(read_one(packers.awq(matrix), config_of("int4", None, "awq", symmetric=False)), matrix)


def test_awq_words_by_hand() -> None:
    """The word of one feature holds 8 output rows: the even ones, then the odd ones."""
    tensors = {
        "qweight": torch.tensor([[0x75316420]] * 4).int(),
        "qzeros": torch.tensor([[0]]).int(),
        "scales": torch.ones(1, 8).half(),
    }
    weight = read_one(tensors, config_of("int4", 4, "awq", symmetric=False)).dequantize()
    assert weight.tolist() == [[float(row)] * 4 for row in range(8)]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("bits", "rows", "columns", "group_size"), [(4, 16, 64, 32), (4, 7, 33, 11), (8, 6, 20, 10), (8, 5, 14, 7)]
)
def test_pack_quantized(symmetric: bool, bits: int, rows: int, columns: int, group_size: int) -> None:
    matrix = random_matrix(rows, columns, bits, group_size, symmetric=symmetric)
    config = config_of(f"int{bits}", group_size, "pack-quantized", symmetric=symmetric)
    check(read_one(packers.pack_quantized(matrix, zero_points=not symmetric), config), matrix)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_pack_quantized_by_channel(symmetric: bool, bits: int) -> None:
    matrix = random_matrix(9, 20, bits, 20, symmetric=symmetric)
    config = config_of(f"int{bits}", None, "pack-quantized", symmetric=symmetric)
    check(read_one(packers.pack_quantized(matrix, zero_points=not symmetric), config), matrix)


def test_pack_quantized_act_order() -> None:
    matrix = random_matrix(8, 64, 4, 16, symmetric=True, reordered=True)
    config = config_of("int4", 16, "pack-quantized", reordered=True)
    weight = read_one(packers.pack_quantized(matrix, zero_points=False, group_index=True), config)
    check(weight, matrix)
    assert weight.column_order is not None


def test_pack_quantized_words_by_hand() -> None:
    """Stored numbers are 8 more than the signed ones."""
    tensors = {
        "weight_packed": torch.tensor([[0x76543210 - 0]]).int(),
        "weight_scale": torch.ones(1, 1).bfloat16(),
        "weight_shape": torch.tensor([1, 6]),
    }
    weight = read_one(tensors, config_of("int4", None, "pack-quantized")).dequantize()
    assert weight.tolist() == [[-8.0, -7.0, -6.0, -5.0, -4.0, -3.0]]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("method", ["int8", "w8a8"])
def test_int_quantized(symmetric: bool, method: str) -> None:
    matrix = random_matrix(9, 21, 8, 21, symmetric=symmetric)
    config = config_of(method, None, "int-quantized", symmetric=symmetric)
    tensors = packers.int_quantized(matrix, zero_points=not symmetric)
    weight = read_one(tensors, config)
    check(weight, matrix)
    assert (weight.offsets is None) == symmetric
    if symmetric:
        flat = {**tensors, "weight_scale": tensors["weight_scale"].flatten()}
        check(read_one(flat, config), matrix)


def test_zero_points_of_symmetric_weights_may_be_stored_if_they_are_zero() -> None:
    matrix = random_matrix(4, 8, 8, 8, symmetric=True)
    config = config_of("int8", None, "int-quantized")
    tensors = packers.int_quantized(matrix, zero_points=True)
    check(read_one(tensors, config), matrix)
    tensors["weight_zero_point"][2] = 1
    with pytest.raises(ModelLoadError, match=f"'{NAME}.weight_zero_point' contradicts the quantization_config"):
        read_one(tensors, config)


FORMATS: dict[str, tuple[Callable[[Matrix], Tensors], QuantizationConfig]] = {
    "gptq": (packers.gptq, config_of("int4", 32, "gptq", symmetric=False)),
    "gptq-act-order": (packers.gptq, config_of("int4", 32, "gptq", symmetric=False, reordered=True)),
    "awq": (packers.awq, config_of("int4", 32, "awq", symmetric=False)),
    "pack-quantized": (
        lambda matrix: packers.pack_quantized(matrix, zero_points=True),
        config_of("int4", 32, "pack-quantized", symmetric=False),
    ),
    "int-quantized": (
        lambda matrix: packers.int_quantized(
            Matrix(8, matrix.values, matrix.zeros[:, :1], matrix.scales[:, :1], [0] * matrix.size[1]), zero_points=True
        ),
        config_of("int8", None, "int-quantized", symmetric=False),
    ),
}
MATRIX = random_matrix(16, 64, 4, 32, seed=9)


@pytest.mark.parametrize("name", FORMATS)
def test_parts_may_come_in_any_order(name: str) -> None:
    pack, config = FORMATS[name]
    tensors = pack(MATRIX)
    expected = read_one(tensors, config).dequantize()
    for order in permutations(tensors):
        result = read(packers.named(NAME, tensors, order), config)
        assert torch.equal(result[f"{NAME}.weight"].dequantize(), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_a_matrix_is_yielded_as_soon_as_it_is_complete_and_others_pass_through(name: str) -> None:
    pack, config = FORMATS[name]
    plain = {"norm.weight": torch.ones(3), "q.bias": torch.ones(16), "lm_head.weight": torch.ones(5, 64)}
    parts = [packers.named(module, pack(MATRIX)) for module in ("a.q", "a.v")]
    stream: Stream = [("norm.weight", plain["norm.weight"]), *parts[0], *list(plain.items())[1:], *parts[1]]
    result = list(quantized_weights(iter(stream), config))
    assert [name for name, _ in result] == ["norm.weight", "a.q.weight", "q.bias", "lm_head.weight", "a.v.weight"]
    assert all(tensor is plain[name] for name, tensor in result if name in plain)


@pytest.mark.parametrize("name", FORMATS)
def test_every_part_is_needed_and_named(name: str) -> None:
    pack, config = FORMATS[name]
    tensors = pack(MATRIX)
    needed = set(tensors) - ({"g_idx"} if name == "gptq" else set())
    for part in needed:
        if part == "weight":
            continue
        left = {other: tensor for other, tensor in tensors.items() if other != part}
        with pytest.raises(ModelLoadError, match=f"tensor '{NAME}.{part}' missing from the checkpoint"):
            read(packers.named(NAME, left), config)


@pytest.mark.parametrize("name", FORMATS)
def test_every_part_has_its_shape_and_dtype(name: str) -> None:
    pack, config = FORMATS[name]
    tensors = pack(MATRIX)
    for part in set(tensors) - ({"g_idx"} if name == "gptq" else {"weight"}):
        for wrong in (tensors[part][:-1], torch.cat((tensors[part], tensors[part])), tensors[part].double()):
            with (
                pytest.raises(ModelLoadError, match=f"tensor '{NAME}.weight")
                if part == "weight_shape"
                else (pytest.raises(ModelLoadError, match=f"tensor '{NAME}."))
            ):
                read(packers.named(NAME, {**tensors, part: wrong}), config)


@pytest.mark.parametrize("name", FORMATS)
def test_a_part_given_twice(name: str) -> None:
    pack, config = FORMATS[name]
    stream = packers.named(NAME, pack(MATRIX))
    for repeated in stream:
        if repeated[0].endswith("g_idx") and not config.reordered:
            continue
        with pytest.raises(ModelLoadError, match=f"tensor '{repeated[0]}' occurs twice"):
            read([*stream, repeated], config)
        with pytest.raises(ModelLoadError, match=f"tensor '{repeated[0]}' occurs twice"):
            read([repeated, *stream], config)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_scales_must_be_finite(name: str, bad: float) -> None:
    pack, config = FORMATS[name]
    tensors = pack(MATRIX)
    scales = next(part for part in tensors if part in ("scales", "weight_scale"))
    tensors[scales][0, 0] = bad
    with pytest.raises(ModelLoadError, match=f"'{NAME}.weight': scales hold infinities or NaN"):
        read_one(tensors, config)


@pytest.mark.parametrize(
    ("group_of", "message"),
    [
        ([0] * 64, "do not fall into 2 groups of 32"),
        ([0] * 32 + [2] * 32, "do not fall into 2 groups of 32"),
        ([-1] * 32 + [1] * 32, "do not fall into 2 groups of 32"),
        ([0] * 31 + [1] * 33, "do not fall into 2 groups of 32"),
        ([0] * 32, r"g_idx' is \[32\] of int32, not \[64\]"),
    ],
)
def test_groups_of_unequal_size(group_of: list[int], message: str) -> None:
    pack, config = FORMATS["gptq-act-order"]
    with pytest.raises(ModelLoadError, match=message) as raised:
        read_one({**pack(MATRIX), "g_idx": torch.tensor(group_of).int()}, config)
    assert NAME in str(raised.value)


def test_g_idx_that_contradicts_desc_act() -> None:
    pack, config = FORMATS["gptq"]
    matrix = random_matrix(16, 64, 4, 32, reordered=True)
    with pytest.raises(ModelLoadError, match=f"'{NAME}.g_idx' contradicts the quantization_config"):
        read_one(pack(matrix), config)


def test_g_idx_of_no_matrix() -> None:
    _, config = FORMATS["gptq"]
    with pytest.raises(ModelLoadError, match=r"'x\.g_idx' belongs to no quantised matrix"):
        read([("x.g_idx", torch.arange(32).int() // 32)], config)


@pytest.mark.parametrize(
    ("name", "part"), [("gptq", "qweight"), ("awq", "qweight"), ("pack-quantized", "weight_packed")]
)
def test_group_size_that_does_not_divide(name: str, part: str) -> None:
    pack, config = FORMATS[name]
    tensors = pack(MATRIX)
    tensors.pop("g_idx", None)
    other = QuantizationConfig(config.method, 48, config.checkpoint_format, symmetric=False)
    with pytest.raises(ModelLoadError, match=rf"'{NAME}\.{part}' has 64 input features, .* no multiple of .* 48"):
        read_one(tensors, other)


def test_weight_shape_that_makes_no_sense() -> None:
    pack, config = FORMATS["pack-quantized"]
    with pytest.raises(ModelLoadError, match="weight_shape' says -1 by 64"):
        read_one({**pack(MATRIX), "weight_shape": torch.tensor([-1, 64])}, config)


def test_plain_checkpoints_stream_untouched() -> None:
    stream = [("a.qweight", torch.ones(2)), ("b.weight", torch.ones(2, 2))]
    assert list(quantized_weights(stream, None)) == stream
    assert list(quantized_weights(stream, QuantizationConfig("int8", None))) == stream
