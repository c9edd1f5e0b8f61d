"""Images' features that clients send (`image_embeds`): over HTTP `torch.save` files in base64, read without torch or a
pickle's code."""

from __future__ import annotations

import hashlib
import io
import math
import pickletools
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.errors import UserError
from quire.multimodal.sources import read_base64
from quire.prompt_image import ReadyImage

EMBEDS, GRID = "image_embeds", "image_grid_thw"
MAX_PATCHES = 2**16
"""Maximum of patches on a side of an image."""
_MAX_PICKLE = 2**14
"""Maximum bytes of a tensor's description."""
_KEY_LABEL = b"quire.features.v1\0"
_BFLOAT16 = "torch BFloat16Storage"
_TYPES = {
    "torch FloatStorage": np.float32,
    "torch DoubleStorage": np.float64,
    "torch HalfStorage": np.float16,
    _BFLOAT16: np.uint16,
    "torch LongStorage": np.int64,
    "torch IntStorage": np.int32,
}
"""Kinds of stored tensors, and types of their elements."""
_CONSTANTS: Mapping[str, Any] = {"NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_ATOMS = {"GLOBAL", "BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", *_CONSTANTS}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PERSISTENT = "persistent"


def read_features(
    given: Mapping[str, Any], where: str, feature_size: int, merge_size: int, *, is_whole: bool
) -> ReadyImage:
    """Image of features that a client computed. given: an object with `image_embeds`, [tokens, feature_size], and
    `image_grid_thw`, three numbers of patches; each in base64, or an array or tensor. Raises UserError, also for values
    that are not finite."""
    if given.keys() != {EMBEDS, GRID}:
        raise UserError(f"{where}: an object with {EMBEDS} and {GRID} is needed", param=where)
    features, grid = (_array(given[name], f"{where}.{name}") for name in (EMBEDS, GRID))
    sides = grid.reshape(-1).tolist()
    is_grid = np.issubdtype(grid.dtype, np.integer) and len(sides) == 3 and sides[0] == 1
    if not is_grid or any(side % merge_size or not 0 < side <= MAX_PATCHES for side in sides[1:]):
        raise UserError(
            f"{where}.{GRID}: 1, and patches in rows and columns in multiples of {merge_size}, are needed, not "
            f"{sides!s:.60}",
            param=f"{where}.{GRID}",
        )
    rows, columns = (side // merge_size for side in sides[1:])
    if features.ndim == 3 and features.shape[0] == 1:
        features = features[0]
    if features.shape != (rows * columns, feature_size):
        raise UserError(
            f"{where}.{EMBEDS}: {rows * columns} tokens of {feature_size} elements are needed, not a shape of "
            f"{list(features.shape)!s:.60}",
            param=f"{where}.{EMBEDS}",
        )
    with np.errstate(over="ignore"):
        values = np.ascontiguousarray(features, np.float32)
    if not np.issubdtype(features.dtype, np.floating) or not np.isfinite(values).all():
        raise UserError(f"{where}.{EMBEDS}: finite numbers of 32 bits are needed", param=f"{where}.{EMBEDS}")
    data = values.tobytes()
    key = hashlib.sha256(_KEY_LABEL + repr((rows, columns, feature_size)).encode() + data).digest()
    return ReadyImage((1, rows, columns), key, data, (rows * columns, feature_size), is_encoded=True, is_whole=is_whole)


def _array(value: Any, where: str) -> npt.NDArray[Any]:
    if isinstance(value, str):
        return _stored(read_base64(value, where), where)
    if hasattr(value, "detach"):  # a tensor
        value = value.detach().cpu()
        value = value.float() if value.is_floating_point() else value
    try:
        found = np.asarray(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise UserError(f"{where}: {error}", param=where) from None
    if found.dtype.kind not in "iuf":
        raise UserError(f"{where}: an array or tensor of numbers is needed, or base64 of a stored one", param=where)
    return found


def _stored(data: bytes, where: str) -> npt.NDArray[Any]:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
            if any(each.compress_type != zipfile.ZIP_STORED or each.file_size > len(data) for each in members):
                raise ValueError("compressed")
            (described,) = (each for each in members if each.filename.endswith("/data.pkl"))
            if described.file_size > _MAX_PICKLE:
                raise ValueError("too long")
            folder = described.filename.removesuffix("data.pkl")
            return _rebuilt(archive, folder, _described_tensor(archive.read(described)))
    except Exception:
        raise UserError(
            f"{where}: base64 of one dense tensor, as torch.save writes it, is needed", param=where
        ) from None


def _described_tensor(described: bytes) -> Any:
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}
    for operation, argument, _ in pickletools.genops(described):
        name = operation.name
        if name in _ATOMS:
            stack.append(_CONSTANTS.get(name, argument))
        elif name == "MARK":
            marks.append(len(stack))
        elif name == "TUPLE":
            start = marks.pop()
            stack[start:] = [tuple(stack[start:])]
        elif name in _TUPLES:
            stack[-_TUPLES[name] :] = [tuple(stack[-_TUPLES[name] :])]
        elif name in ("REDUCE", "BINPERSID"):
            what = (_PERSISTENT,) if name == "BINPERSID" else (stack.pop(-2),)
            stack.append((*what, stack.pop()))
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name not in ("PROTO", "STOP"):
            raise ValueError(name)
    (found,) = stack
    return found


def _rebuilt(archive: zipfile.ZipFile, folder: str, call: Any) -> npt.NDArray[Any]:
    function, ((persistent, (label, kind, key, _, count)), offset, shape, strides, *_) = call
    if (function, persistent, label) != ("torch._utils _rebuild_tensor_v2", _PERSISTENT, "storage"):
        raise ValueError("another call")
    numbers = (offset, count, *shape, *strides)  # what is compared may be deep
    if not isinstance(kind, str) or not isinstance(key, str) or not all(isinstance(each, int) for each in numbers):
        raise ValueError("another tensor")
    if not key.isdecimal() or offset < 0 or min(shape, default=0) < 0:
        raise ValueError("another storage")
    values = np.frombuffer(archive.read(f"{folder}data/{key}"), _TYPES[kind])
    if len(values) != count:
        raise ValueError("cut off")
    if kind == _BFLOAT16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    whole = values[offset : offset + math.prod(shape)].reshape(shape)
    expected = tuple(stride // whole.itemsize for stride in whole.strides)
    if any(size > 1 and own != other for size, own, other in zip(shape, strides, expected, strict=True)):
        raise ValueError("not in one piece")
    return whole
