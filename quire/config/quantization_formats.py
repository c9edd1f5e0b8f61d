"""Parsing of a checkpoint's `quantization_config`. Facts on a checkpoint's making are ignored; settings that change
stored numbers' meaning are supported or rejected."""

from __future__ import annotations

from quire.config.float_formats import FLOAT_LAYOUTS, compressed_floats, fp8, modelopt, mxfp4
from quire.config.hf_json import Fields, shown
from quire.config.quantization import WEIGHT_ONLY, QuantizationConfig
from quire.config.quantization_fields import group_size, inner_object, known_integer, known_text, unsupported


def read_quantization(fields: Fields) -> QuantizationConfig | None:
    """Quantisation in a model's config.json; None without the key. Raises ModelLoadError with the supported kinds for
    others."""
    if fields.values.get("quantization_config") is None:
        return None
    inner = inner_object(fields, "quantization_config")
    method = inner.text("quant_method").lower()
    readers = {
        "gptq": _gptq,
        "awq": _awq,
        "auto-round": _auto_round,
        "compressed-tensors": _compressed_tensors,
        "fp8": fp8,
        "fbgemm_fp8": fp8,
        "modelopt": modelopt,
        "modelopt_fp4": modelopt,
        "mxfp4": mxfp4,
    }
    if method in INSTEAD:
        raise inner.error(f"quant_method {shown(method)} is not supported: {INSTEAD[method]}")
    if method not in readers:
        raise unsupported(inner, f"quant_method {shown(method)}")
    return readers[method](inner)


FROM_PLAIN = "load the model that it was made from, with quantization='int4', 'int8', 'fp8' or 'mxfp4'"
INSTEAD = {
    "bitsandbytes": FROM_PLAIN,
    "hqq": FROM_PLAIN,
    "quanto": FROM_PLAIN,
    "torchao": FROM_PLAIN,
    "eetq": FROM_PLAIN,
    "aqlm": FROM_PLAIN,
    "quark": "choose an fp8, compressed-tensors or GPTQ checkpoint of the model",
}
"""Refused kinds of checkpoints -> what to load instead."""


def _gptq(fields: Fields) -> QuantizationConfig:
    bits = known_integer(fields, "bits", (4, 8))
    # GPTQModel calls the key `format`, AutoGPTQ `checkpoint_format`; without it both mean zero points less one.
    key = "checkpoint_format" if fields.values.get("checkpoint_format") is not None else "format"
    layout = known_text(fields, key, ("gptq", "gptq_v2"), "gptq")
    if fields.boolean("is_marlin_format", False):
        raise unsupported(fields, "is_marlin_format")
    known_text(fields, "pack_dtype", ("int32",), "int32")
    overrides = fields.values.get("dynamic") or {}
    if not isinstance(overrides, dict) or not all(str(pattern).startswith("-:") for pattern in overrides):
        raise unsupported(fields, "dynamic (settings of single modules)")
    return QuantizationConfig(
        WEIGHT_ONLY[bits], group_size(fields, "group_size"), layout, False, fields.boolean("desc_act", False)
    )


def _auto_round(fields: Fields) -> QuantizationConfig:
    """AutoRound's settings: GPTQ's or AWQ's packing."""
    layouts = ("auto_round:auto_gptq", "auto_round:gptqmodel", "auto_round:auto_awq")
    layout = known_text(fields, "packing_format", layouts)
    bits = known_integer(fields, "bits", (4, 8) if layout != layouts[2] else (4,))
    known_text(fields, "data_type", ("int",), "int")
    overrides = fields.values.get("extra_config") or {}
    if not isinstance(overrides, dict) or not all(_is_plain(settings) for settings in overrides.values()):
        raise unsupported(fields, "extra_config (settings of single modules other than 16 bits)")
    stored = "awq" if layout == layouts[2] else "gptq"
    return QuantizationConfig(WEIGHT_ONLY[bits], group_size(fields, "group_size"), stored, False)


def _is_plain(settings: object) -> bool:
    bits = settings.get("bits") if isinstance(settings, dict) else None
    return isinstance(bits, int) and bits >= PLAIN_BITS


PLAIN_BITS = 16


def _awq(fields: Fields) -> QuantizationConfig:
    keys = {name: name if name in fields.values else old for name, old in AWQ_OLD_NAMES.items()}
    known_integer(fields, keys["bits"], (4,))
    known_text(fields, "version", ("gemm",), "gemm")
    known_text(fields, "backend", ("autoawq",), "autoawq")
    if not fields.boolean("zero_point", True):
        raise unsupported(fields, "zero_point false")
    return QuantizationConfig("int4", group_size(fields, keys["group_size"]), "awq", False)


AWQ_OLD_NAMES = {"bits": "w_bit", "group_size": "q_group_size"}


def _compressed_tensors(fields: Fields) -> QuantizationConfig:
    layout = known_text(fields, "format", ("pack-quantized", "int-quantized", "naive-quantized", *FLOAT_LAYOUTS))
    status = fields.text("quantization_status", "compressed")
    if status != "compressed":
        raise unsupported(fields, f"quantization_status {shown(status)}")
    if fields.values.get("sparsity_config"):
        known_text(inner_object(fields, "sparsity_config"), "format", ("dense",), "dense")
    groups = inner_object(fields, "config_groups")
    if len(groups.values) != 1:
        raise unsupported(fields, f"{len(groups.values)} config_groups (one is)")
    scheme = inner_object(groups, next(iter(groups.values)))
    known_text(scheme, "format", (layout,), layout)
    if scheme.values.get("output_activations") is not None:
        raise unsupported(scheme, "output_activations")
    weights = inner_object(scheme, "weights")
    if layout in FLOAT_LAYOUTS or weights.text("type", "int").lower() == "float":
        return compressed_floats(scheme, weights, layout)
    config = _weights(weights, layout)
    if scheme.values.get("input_activations") is None:
        return config
    _check_activations(inner_object(scheme, "input_activations"))
    if config.method != "int8" or config.group_size is not None or not config.symmetric or layout == "pack-quantized":
        raise unsupported(scheme, "8-bit activations with weights other than symmetric int-quantized 8 bits by channel")
    return QuantizationConfig("w8a8", None, config.checkpoint_format)


def _weights(fields: Fields, layout: str) -> QuantizationConfig:
    packed = layout == "pack-quantized"
    known_text(fields, "type", ("int",), "int")
    bits = known_integer(fields, "num_bits", (4, 8) if packed else (8,))
    if fields.values.get("dynamic"):
        raise unsupported(fields, "dynamic weights")
    size = group_size(fields, "group_size") if fields.values.get("group_size") is not None else None
    guess = "tensor" if fields.values.get("group_size") is None else "channel" if size is None else "group"
    strategy = known_text(fields, "strategy", ("channel", "group") if packed else ("channel",), guess)
    if (strategy == "group") != (size is not None):
        raise fields.error(f"strategy {strategy!r} contradicts group_size {shown(fields.values.get('group_size'))}")
    order = fields.values.get("actorder")
    if order not in (None, False, True, "group", "weight", "dynamic", "static"):
        raise unsupported(fields, f"actorder {shown(order)}")
    return QuantizationConfig(
        WEIGHT_ONLY[bits],
        size,
        "pack-quantized" if packed else "int-quantized",
        symmetric=fields.boolean("symmetric", True),
        reordered=order in (True, "group", "dynamic"),
    )


def _check_activations(fields: Fields) -> None:
    known_text(fields, "type", ("int",), "int")
    known_integer(fields, "num_bits", (8,))
    known_text(fields, "strategy", ("token",))
    if fields.values.get("dynamic") is not True:
        raise unsupported(fields, "static activations")
    if not fields.boolean("symmetric", True):
        raise unsupported(fields, "asymmetric activations")
