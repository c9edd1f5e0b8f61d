"""Features that a client computed of an image itself (`image_embeds`): read and checked before the engine sees them.

Over HTTP they are files of `torch.save` in base64, which are read without torch: a dense tensor in an uncompressed zip
archive, described by a pickle of which nothing but that tensor is built.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NoReturn

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
_TYPES = {
    "FloatStorage": np.float32,
    "DoubleStorage": np.float64,
    "HalfStorage": np.float16,
    "BFloat16Storage": np.uint16,
    "LongStorage": np.int64,
    "IntStorage": np.int32,
}
"""Kinds of stored tensors, and the types of their elements; those of bfloat16 are their bits."""


def read_features(given: Mapping[str, Any], where: str, feature_size: int, merge_size: int) -> ReadyImage:
    """An image of these features. given: an object with `image_embeds`, [tokens, feature_size], and `image_grid_thw`,
    three numbers of patches; each in base64, or an array or tensor of a program. where: path of the field, for errors.
    merge_size: patches on a side of a token. Raises UserError for another shape and for values that are not finite."""
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
    if not np.issubdtype(features.dtype, np.floating) or not np.isfinite(features).all():
        raise UserError(f"{where}.{EMBEDS}: finite numbers are needed", param=f"{where}.{EMBEDS}")
    data = np.ascontiguousarray(features, np.float32).tobytes()
    key = hashlib.sha256(_KEY_LABEL + repr((rows, columns, feature_size)).encode() + data).digest()
    return ReadyImage((1, rows, columns), key, data, (rows * columns, feature_size), is_encoded=True)


def _array(value: Any, where: str) -> npt.NDArray[Any]:
    if isinstance(value, str):
        return _stored(read_base64(value, where), where)
    if hasattr(value, "detach"):  # a tensor
        value = value.detach().cpu()
        value = value.float() if value.is_floating_point() else value
    found = np.asarray(value)
    if found.dtype.kind not in "iuf":
        raise UserError(f"{where}: an array or tensor of numbers is needed, or base64 of a stored one", param=where)
    return found


def _stored(data: bytes, where: str) -> npt.NDArray[Any]:
    """The dense tensor of a file of torch.save."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
            if any(each.compress_type != zipfile.ZIP_STORED or each.file_size > len(data) for each in members):
                raise ValueError("compressed")
            (described,) = (each for each in members if each.filename.endswith("/data.pkl"))
            if described.file_size > _MAX_PICKLE:
                raise ValueError("too long")
            reader = _Reader(archive, described.filename.removesuffix("data.pkl"))
            found = reader.load()
            if not isinstance(found, np.ndarray):
                raise TypeError("no tensor")
            return found
    except Exception:
        raise UserError(
            f"{where}: base64 of one dense tensor, as torch.save writes it, is needed", param=where
        ) from None


class _Storage:
    """The name of a kind of storage."""

    def __init__(self, kind: str) -> None:
        self.kind = kind


class _Reader(pickle.Unpickler):
    """Builds a tensor's array, and refuses whatever else a pickle names."""

    def __init__(self, archive: zipfile.ZipFile, folder: str) -> None:
        super().__init__(io.BytesIO(archive.read(f"{folder}data.pkl")))
        self._archive, self._folder = archive, folder

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuilt
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        return _Storage(name) if module == "torch" and name in _TYPES else self._refuse()

    def persistent_load(self, pid: Any) -> tuple[str, npt.NDArray[Any]]:
        label, kind, key, _, count = pid
        if label != "storage" or not isinstance(kind, _Storage) or not str(key).isdecimal():
            self._refuse()
        values = np.frombuffer(self._archive.read(f"{self._folder}data/{key}"), _TYPES[kind.kind])
        if len(values) != count:
            self._refuse()
        return kind.kind, values

    def _refuse(self) -> NoReturn:
        raise pickle.UnpicklingError


def _rebuilt(storage: Any, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any) -> Any:
    """The tensor of a storage, which must have its elements in one piece."""
    kind, values = storage
    if kind == "BFloat16Storage":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    count = int(np.prod(shape, dtype=np.int64))
    whole = values[offset : offset + count].reshape(shape)
    expected = tuple(stride // whole.itemsize for stride in whole.strides)
    if any(size > 1 and own != other for size, own, other in zip(shape, strides, expected, strict=True)):
        raise pickle.UnpicklingError
    return whole
