"""Checks of checkpoint tensors before use."""

from __future__ import annotations

import torch

from quire.config.hf_json import shown
from quire.errors import ModelLoadError

MAX_NAME_LENGTH = 1024

PLAIN = frozenset({torch.float32, torch.float16, torch.bfloat16})
WIDE = torch.float64
"""Dtype converted to float32."""
INTEGERS = frozenset({torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool})
EIGHT_BIT_FLOATS = frozenset({torch.float8_e4m3fn, torch.float8_e8m0fnu})
"""Further dtypes in parts of quantised matrices."""

SAFETENSORS_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}


def check_name(name: object) -> str:
    """Raise ModelLoadError for an invalid tensor name."""
    if not isinstance(name, str) or len(name) > MAX_NAME_LENGTH:
        raise ModelLoadError(f"it holds a tensor under the name {shown(name)}, which is no name of a tensor")
    return name


def checked(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Tensor, float64 as float32. Raises ModelLoadError unless it is dense, real, in memory of its own, with no
    eight-bit floats but e4m3 and e8m0."""
    if tensor.is_nested or tensor.is_quantized or tensor.layout != torch.strided:
        kind = "nested" if tensor.is_nested else "quantised by torch" if tensor.is_quantized else str(tensor.layout)
        raise ModelLoadError(f"tensor {shown(name)} is {kind.removeprefix('torch.')}: only dense tensors are loaded")
    if tensor.device.type != "cpu":
        raise ModelLoadError(f"tensor {shown(name)} has no data (it is on the device {tensor.device.type!r})")
    if tensor.dtype not in PLAIN | INTEGERS | EIGHT_BIT_FLOATS and tensor.dtype != WIDE:
        raise _unknown_dtype(name, tensor.dtype)
    if tensor.nbytes > tensor.untyped_storage().nbytes():
        raise ModelLoadError(f"tensor {shown(name)} has more elements than its memory: they overlap")
    return tensor.float() if tensor.dtype == WIDE else tensor


def named_dtype(name: str, code: str) -> torch.dtype:
    """Dtype of safetensors' name `code`. Raises ModelLoadError for one that `checked` refuses."""
    dtype = SAFETENSORS_DTYPES.get(code)
    if dtype is None:
        raise _unknown_dtype(name, code)
    return dtype


def _unknown_dtype(name: str, dtype: object) -> ModelLoadError:
    return ModelLoadError(
        f"tensor {shown(name)} holds {dtype}, not floating-point numbers of 16, 32 or 64 bits, nor integers"
    )
