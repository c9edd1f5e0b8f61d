"""What a checkpoint's `quantization_config` says about its weights, checked. Imports no torch.

Facts that only tell how a checkpoint was made (damping, calibration, order of layers) are ignored; whatever changes
what the stored numbers mean is either supported or rejected. Which matrices are quantised is not read from the lists of
exceptions (`ignore`, `modules_to_not_convert`): the names of the stored tensors say it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.config.hf_json import Fields, shown

SUPPORTED = (
    "gptq (4 or 8 bits, formats gptq and gptq_v2), awq (4 bits, gemm layout with zero points) and compressed-tensors "
    "(pack-quantized integers of 4 or 8 bits by group or channel; int-quantized 8 bits by channel, with or without "
    "dynamic 8-bit activations per token)"
)
WEIGHT_ONLY = {4: "int4", 8: "int8"}
ROUNDED = {4: "w4a8", 8: "w8a8"}
BITS = {method: bits for names in (WEIGHT_ONLY, ROUNDED) for bits, method in names.items()}


@dataclass(frozen=True)
class QuantizationConfig:
    """How the linear layers' weights are quantised.

    method: "int8" or "int4" (weights alone), "w8a8" or "w4a8" (activations are rounded to 8 bits token by token too,
    and integers are multiplied).
    group_size: input features that share a scale, None: all those of an output row.
    checkpoint_format: "gptq" (zero points stored less one), "gptq_v2", "awq", "pack-quantized" or "int-quantized" when
    the checkpoint holds integers, None when it holds floating point that is to be quantised while it is loaded.
    symmetric: the checkpoint has no zero points of its own (compressed-tensors alone leaves them out).
    reordered: the checkpoint assigns input features to groups one by one (act-order).
    """

    method: str
    group_size: int | None
    checkpoint_format: str | None = None
    symmetric: bool = True
    reordered: bool = False

    @property
    def bits(self) -> int:
        """Of a weight."""
        return BITS[self.method]

    @property
    def rounds_activations(self) -> bool:
        return self.method in ROUNDED.values()


def read_quantization(fields: Fields) -> QuantizationConfig | None:
    """From a model's config.json; None without the key. Raises ModelLoadError, naming what is supported, for any
    other kind of quantisation."""
    if fields.values.get("quantization_config") is None:
        return None
    inner = _object(fields, "quantization_config")
    method = inner.text("quant_method").lower()
    readers = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed_tensors}
    if method not in readers:
        raise _unsupported(inner, f"quant_method {shown(method)}")
    return readers[method](inner)


def _gptq(fields: Fields) -> QuantizationConfig:
    bits = _known_integer(fields, "bits", (4, 8))
    # GPTQModel calls the key `format`, AutoGPTQ `checkpoint_format`; both mean zero points less one when silent.
    key = "checkpoint_format" if fields.values.get("checkpoint_format") is not None else "format"
    layout = _known_text(fields, key, ("gptq", "gptq_v2"), "gptq")
    if fields.boolean("is_marlin_format", False):
        raise _unsupported(fields, "is_marlin_format")
    _known_text(fields, "pack_dtype", ("int32",), "int32")
    overrides = fields.values.get("dynamic") or {}
    if not isinstance(overrides, dict) or not all(str(pattern).startswith("-:") for pattern in overrides):
        raise _unsupported(fields, "dynamic (settings of single modules)")
    return QuantizationConfig(
        WEIGHT_ONLY[bits], _group_size(fields, "group_size"), layout, False, fields.boolean("desc_act", False)
    )


def _awq(fields: Fields) -> QuantizationConfig:
    keys = {name: name if name in fields.values else old for name, old in AWQ_OLD_NAMES.items()}
    _known_integer(fields, keys["bits"], (4,))
    _known_text(fields, "version", ("gemm",), "gemm")
    _known_text(fields, "backend", ("autoawq",), "autoawq")
    if not fields.boolean("zero_point", True):
        raise _unsupported(fields, "zero_point false")
    return QuantizationConfig("int4", _group_size(fields, keys["group_size"]), "awq", False)


AWQ_OLD_NAMES = {"bits": "w_bit", "group_size": "q_group_size"}


def _compressed_tensors(fields: Fields) -> QuantizationConfig:
    layout = _known_text(fields, "format", ("pack-quantized", "int-quantized", "naive-quantized"))
    status = fields.text("quantization_status", "compressed")
    if status != "compressed":
        raise _unsupported(fields, f"quantization_status {shown(status)}")
    if fields.values.get("kv_cache_scheme") is not None:
        raise _unsupported(fields, "kv_cache_scheme")
    if fields.values.get("sparsity_config"):
        _known_text(_object(fields, "sparsity_config"), "format", ("dense",), "dense")
    groups = _object(fields, "config_groups")
    if len(groups.values) != 1:
        raise _unsupported(fields, f"{len(groups.values)} config_groups (one is)")
    scheme = _object(groups, next(iter(groups.values)))
    _known_text(scheme, "format", (layout,), layout)
    if scheme.values.get("output_activations") is not None:
        raise _unsupported(scheme, "output_activations")
    config = _weights(_object(scheme, "weights"), layout)
    if scheme.values.get("input_activations") is None:
        return config
    _check_activations(_object(scheme, "input_activations"))
    if config.method != "int8" or config.group_size is not None or not config.symmetric or layout == "pack-quantized":
        raise _unsupported(
            scheme, "8-bit activations with weights other than symmetric int-quantized 8 bits by channel"
        )
    return QuantizationConfig("w8a8", None, config.checkpoint_format)


def _weights(fields: Fields, layout: str) -> QuantizationConfig:
    packed = layout == "pack-quantized"
    _known_text(fields, "type", ("int",), "int")
    bits = _known_integer(fields, "num_bits", (4, 8) if packed else (8,))
    if fields.values.get("dynamic"):
        raise _unsupported(fields, "dynamic weights")
    group_size = _group_size(fields, "group_size") if fields.values.get("group_size") is not None else None
    guess = "tensor" if fields.values.get("group_size") is None else "channel" if group_size is None else "group"
    strategy = _known_text(fields, "strategy", ("channel", "group") if packed else ("channel",), guess)
    if (strategy == "group") != (group_size is not None):
        raise fields.error(f"strategy {strategy!r} contradicts group_size {shown(fields.values.get('group_size'))}")
    order = fields.values.get("actorder")
    if order not in (None, False, True, "group", "weight", "dynamic", "static"):
        raise _unsupported(fields, f"actorder {shown(order)}")
    return QuantizationConfig(
        WEIGHT_ONLY[bits],
        group_size,
        "pack-quantized" if packed else "int-quantized",
        symmetric=fields.boolean("symmetric", True),
        reordered=order in (True, "group", "dynamic"),
    )


def _check_activations(fields: Fields) -> None:
    _known_text(fields, "type", ("int",), "int")
    _known_integer(fields, "num_bits", (8,))
    _known_text(fields, "strategy", ("token",))
    if fields.values.get("dynamic") is not True:
        raise _unsupported(fields, "static activations")
    if not fields.boolean("symmetric", True):
        raise _unsupported(fields, "asymmetric activations")


def _object(fields: Fields, key: str) -> Fields:
    value = fields.values.get(key)
    if not isinstance(value, dict):
        raise fields.error(f"{key} must be a JSON object, not {shown(value)}")
    return Fields(value, f"{fields.where}: {key}")


def _group_size(fields: Fields, key: str) -> int | None:
    """-1 stands for whole rows."""
    return None if fields.values.get(key) == -1 else fields.integer(key)


def _known_integer(fields: Fields, key: str, known: Sequence[int]) -> int:
    value = fields.integer(key)
    if value not in known:
        raise _unsupported(fields, f"{key} {value}")
    return value


def _known_text(fields: Fields, key: str, known: Sequence[str], default: str | None = None) -> str:
    value = fields.text(key, default).lower()
    if value not in known:
        raise _unsupported(fields, f"{key} {shown(value)}")
    return value


def _unsupported(fields: Fields, what: str) -> Exception:
    return fields.error(f"{what} is not supported; quantised checkpoints may be {SUPPORTED}")
