"""`quantization_config` of config.json: what is understood, and what is refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from quire.config.hf_json import Fields
from quire.config.quantization import QuantizationConfig
from quire.config.quantization_formats import read_quantization
from quire.errors import ModelLoadError

GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}
WEIGHTS: dict[str, Any] = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": 128,
    "dynamic": False,
    "actorder": None,
    "observer": "minmax",
}
CHANNEL = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "group_size": None}
TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


FLOAT = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
BLOCKS = {**FLOAT, "strategy": "block", "block_structure": [128, 128]}
NVIDIA = {**FLOAT, "num_bits": 4, "strategy": "tensor_group", "group_size": 16}
TOKEN_FLOATS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
FP8: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "data_type": "int"}


def compressed(weights: object, layout: str = "pack-quantized", activations: object = None, **more: object) -> Any:
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations},
        },
        **more,
    }


def parse(value: object) -> QuantizationConfig | None:
    return read_quantization(Fields({"quantization_config": value}, "model/config.json"))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (GPTQ, QuantizationConfig("int4", 128, "gptq", symmetric=False)),
        ({**GPTQ, "bits": 8}, QuantizationConfig("int8", 128, "gptq", symmetric=False)),
        ({**GPTQ, "group_size": -1}, QuantizationConfig("int4", None, "gptq", symmetric=False)),
        ({**GPTQ, "desc_act": True}, QuantizationConfig("int4", 128, "gptq", symmetric=False, reordered=True)),
        ({**GPTQ, "checkpoint_format": "gptq_v2"}, QuantizationConfig("int4", 128, "gptq_v2", symmetric=False)),
        ({**GPTQ, "format": "gptq_v2"}, QuantizationConfig("int4", 128, "gptq_v2", symmetric=False)),
        ({**GPTQ, "dynamic": {"-:.*down": {}}}, QuantizationConfig("int4", 128, "gptq", symmetric=False)),
        ({**GPTQ, "dynamic": None, "damp_percent": 0.1}, QuantizationConfig("int4", 128, "gptq", symmetric=False)),
        (AWQ, QuantizationConfig("int4", 64, "awq", symmetric=False)),
        ({**AWQ, "version": "GEMM"}, QuantizationConfig("int4", 64, "awq", symmetric=False)),
        (
            {"quant_method": "awq", "w_bit": 4, "q_group_size": -1},
            QuantizationConfig("int4", None, "awq", symmetric=False),
        ),
        (compressed(WEIGHTS), QuantizationConfig("int4", 128, "pack-quantized")),
        (
            compressed({**WEIGHTS, "symmetric": False, "actorder": "weight"}),
            QuantizationConfig("int4", 128, "pack-quantized", symmetric=False),
        ),
        (
            compressed({**WEIGHTS, "actorder": "group"}),
            QuantizationConfig("int4", 128, "pack-quantized", reordered=True),
        ),
        (compressed(CHANNEL), QuantizationConfig("int8", None, "pack-quantized")),
        (compressed({**CHANNEL, "num_bits": 4}), QuantizationConfig("int4", None, "pack-quantized")),
        (compressed({**CHANNEL, "group_size": -1}), QuantizationConfig("int8", None, "pack-quantized")),
        (compressed(CHANNEL, "int-quantized"), QuantizationConfig("int8", None, "int-quantized")),
        (compressed(CHANNEL, "naive-quantized"), QuantizationConfig("int8", None, "int-quantized")),
        (
            compressed({**CHANNEL, "symmetric": False}, "int-quantized"),
            QuantizationConfig("int8", None, "int-quantized", symmetric=False),
        ),
        (compressed(CHANNEL, "int-quantized", TOKEN), QuantizationConfig("w8a8", None, "int-quantized")),
        (
            compressed(CHANNEL, "int-quantized", TOKEN, sparsity_config={"format": "dense"}),
            QuantizationConfig("w8a8", None, "int-quantized"),
        ),
        (FP8, QuantizationConfig("fp8", None, "fp8")),
        ({**FP8, "weight_block_size": [128, 64]}, QuantizationConfig("fp8", None, "fp8", block_size=(128, 64))),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, QuantizationConfig("fp8", None, "fp8")),
        (compressed(FLOAT, "float-quantized", TOKEN_FLOATS), QuantizationConfig("fp8", None, "fp8")),
        (compressed({**FLOAT, "strategy": "tensor"}, "naive-quantized"), QuantizationConfig("fp8", None, "fp8")),
        (compressed(BLOCKS, "float-quantized"), QuantizationConfig("fp8", None, "fp8", block_size=(128, 128))),
        (
            compressed({**BLOCKS, "block_structure": "64x128"}, "float-quantized"),
            QuantizationConfig("fp8", None, "fp8", block_size=(64, 128)),
        ),
        (compressed(NVIDIA, "nvfp4-pack-quantized"), QuantizationConfig("nvfp4", 16, "nvfp4-pack-quantized")),
        (
            compressed({**NVIDIA, "group_size": 32}, "mxfp4-pack-quantized"),
            QuantizationConfig("mxfp4", 32, "mxfp4-pack-quantized"),
        ),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, QuantizationConfig("fp8", None, "fp8")),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, QuantizationConfig("nvfp4", 16, "nvfp4")),
        ({"quant_method": "mxfp4"}, QuantizationConfig("mxfp4", 32, "mxfp4")),
        (
            {**ROUND, "packing_format": "auto_round:auto_gptq", "extra_config": {"lm_head": {"bits": 16}}},
            QuantizationConfig("int4", 128, "gptq", symmetric=False),
        ),
        (
            {**ROUND, "packing_format": "auto_round:auto_awq"},
            QuantizationConfig("int4", 128, "awq", symmetric=False),
        ),
    ],
)
def test_understood(value: object, expected: QuantizationConfig | None) -> None:
    before = copy.deepcopy(value)
    assert parse(value) == expected
    assert value == before


def test_bits_and_types_follow_the_method() -> None:
    found = [QuantizationConfig(method, None) for method in ("int4", "int8", "w8a8", "fp8", "mxfp4", "nvfp4")]
    assert [each.bits for each in found] == [4, 8, 8, 8, 4, 4]
    assert [each.stored_type for each in found] == ["int4", "int8", "int8", "float8", "mxfp4", "nvfp4"]


@pytest.mark.parametrize("method", ["bitsandbytes", "hqq", "quanto", "torchao", "quark"])
def test_kinds_that_do_not_load_say_what_does(method: str) -> None:
    with pytest.raises(ModelLoadError, match=f"quant_method '{method}' is not supported: (load|choose) "):
        parse({"quant_method": method})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"quant_method": "fp6"}, "quant_method 'fp6'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'w4a8_awq'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "group_size 32 of nvfp4"),
        ({**ROUND, "packing_format": "auto_round:exllamav3"}, "packing_format 'auto_round:exllamav3'"),
        (
            {**ROUND, "packing_format": "auto_round:auto_gptq", "extra_config": {"model.layers.0": {"bits": 8}}},
            "extra_config",
        ),
        (compressed({**FLOAT, "num_bits": 6}, "float-quantized"), "num_bits 6"),
        (compressed({**FLOAT, "strategy": "group"}, "float-quantized"), "strategy 'group'"),
        (compressed({**FLOAT, "dynamic": True}, "float-quantized"), "dynamic weights"),
        (compressed({**FLOAT, "num_bits": 4, "group_size": 32}, "nvfp4-pack-quantized"), "group_size 32 of nvfp4"),
        (compressed(FLOAT, "pack-quantized"), "type 'float' in the format 'pack-quantized'"),
        ({**GPTQ, "bits": 3}, "bits 3"),
        ({**GPTQ, "bits": 2}, "bits 2"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({**GPTQ, "format": "bitblas"}, "format 'bitblas'"),
        ({**GPTQ, "is_marlin_format": True}, "is_marlin_format"),
        ({**GPTQ, "pack_dtype": "int16"}, "pack_dtype 'int16'"),
        ({**GPTQ, "dynamic": {"+:.*down": {"bits": 8}}}, "dynamic"),
        ({**AWQ, "bits": 8}, "bits 8"),
        ({**AWQ, "version": "gemv"}, "version 'gemv'"),
        ({**AWQ, "backend": "llm-awq"}, "backend 'llm-awq'"),
        ({**AWQ, "zero_point": False}, "zero_point false"),
        (compressed(CHANNEL, "float-quantized"), "type 'int'"),
        (compressed(WEIGHTS, "marlin-24"), "format 'marlin-24'"),
        (compressed(WEIGHTS, "nvfp4-pack-quantized"), "type 'int'"),
        (compressed({**WEIGHTS, "num_bits": 3}), "num_bits 3"),
        (compressed({**CHANNEL, "num_bits": 4}, "int-quantized"), "num_bits 4"),
        (compressed(WEIGHTS, "int-quantized"), "num_bits 4"),
        (compressed({**CHANNEL, "strategy": "tensor"}), "strategy 'tensor'"),
        (compressed({"num_bits": 8, "type": "int"}, "int-quantized"), "strategy 'tensor'"),
        (compressed({**WEIGHTS, "actorder": "other"}), "actorder 'other'"),
        (compressed({**WEIGHTS, "dynamic": True}), "dynamic weights"),
        (compressed(WEIGHTS, activations=TOKEN), "8-bit activations with weights other than"),
        (compressed({**CHANNEL, "symmetric": False}, "int-quantized", TOKEN), "8-bit activations with weights other"),
        (compressed(CHANNEL, "int-quantized", {**TOKEN, "dynamic": False}), "static activations"),
        (compressed(CHANNEL, "int-quantized", {**TOKEN, "strategy": "tensor"}), "strategy 'tensor'"),
        (compressed(CHANNEL, "int-quantized", {**TOKEN, "num_bits": 4}), "num_bits 4"),
        (compressed(CHANNEL, "int-quantized", {**TOKEN, "symmetric": False}), "asymmetric activations"),
        (compressed(WEIGHTS, quantization_status="frozen"), "quantization_status 'frozen'"),
        (compressed(WEIGHTS, sparsity_config={"format": "sparse-24-bitmask"}), "format 'sparse-24-bitmask'"),
        ({**compressed(WEIGHTS), "config_groups": {"a": {}, "b": {}}}, "2 config_groups"),
    ],
)
def test_refused_with_what_is_supported(value: object, message: str) -> None:
    with pytest.raises(
        ModelLoadError, match=f"{message}.* is not supported; quantised checkpoints may be gptq"
    ) as raised:
        parse(value)
    assert str(raised.value).startswith("model/config.json: quantization_config")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "quantization_config must be a JSON object"),
        ({}, "the key 'quant_method' is missing"),
        ({**GPTQ, "bits": "4"}, "bits must be an integer"),
        ({**GPTQ, "group_size": 0}, "group_size must be an integer of at least 1"),
        ({**GPTQ, "group_size": None}, "the key 'group_size' is missing"),
        ({**GPTQ, "desc_act": 1}, "desc_act must be true or false"),
        (compressed("W4A16"), "weights must be a JSON object"),
        ({**compressed(WEIGHTS), "config_groups": {"W4A16": ["Linear"]}}, "W4A16 must be a JSON object"),
        (compressed({**WEIGHTS, "strategy": "channel"}), "strategy 'channel' contradicts group_size 128"),
        (compressed({**CHANNEL, "strategy": "group"}), "strategy 'group' contradicts group_size None"),
    ],
)
def test_nonsense(value: object, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        parse(value)
