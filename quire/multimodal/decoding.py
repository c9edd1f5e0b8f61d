"""Decoding of an image file, or conversion of a program's image, to pixels: [height, width, 3] uint8, RGB.

The pixels equal those of Transformers' processors with Pillow. Limits apply before decoding.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from quire.config.media import WHITE, Color
from quire.errors import UserError
from quire.multimodal.sources import DEFAULT_LIMITS, ImageLimits, too_many_bytes
from quire.utils.extras import how_to_install

if TYPE_CHECKING:
    from PIL import Image

Pixels: TypeAlias = npt.NDArray[np.uint8]
"""[height, width, 3], contiguous."""
FORMATS: Mapping[str, str] = {"PNG": "PNG", "JPEG": "JPEG", "WEBP": "WebP", "GIF": "GIF", "BMP": "BMP"}
"""Pillow's names of supported formats -> usual names."""
MODES = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"})
"""Pillow's modes with up to 8 bits per value."""
MOST_SCANS = 100
_START_OF_SCAN = b"\xff\xda"
_JPEGS = ("JPEG", "MPO")
"""Formats of JPEG files. MPO: several JPEGs, from telephones."""


def decode_image(data: bytes, where: str, limits: ImageLimits = DEFAULT_LIMITS, *, background: Color = WHITE) -> Pixels:
    """Pixels of an image file, turned by its EXIF orientation; the first frame of an animation.

    background: colour under transparent pixels. Raises UserError.
    """
    if len(data) > limits.max_bytes:
        raise too_many_bytes(where, len(data), limits)
    open_image, transpose, bomb = _pillow()
    try:
        image = open_image(io.BytesIO(data), formats=tuple(FORMATS))
    except bomb:
        raise UserError(
            f"{where}: the image has more than {limits.max_pixels} pixels, the limit", param=where
        ) from None
    except Exception:
        known = ", ".join(dict.fromkeys(FORMATS.values()))
        raise UserError(
            f"{where}: the image is damaged or of an unknown format (known: {known})", param=where
        ) from None
    with image:
        _check_size(image.width, image.height, where, limits)
        if image.format in _JPEGS and data.count(_START_OF_SCAN) > MOST_SCANS:
            raise UserError(f"{where}: a JPEG of more than {MOST_SCANS} scans is not decoded", param=where)
        _check_mode(image.mode, where)
        try:
            image.load()
            return _rgb(transpose(image), background)
        except Exception:
            raise UserError(f"{where}: the image is damaged or cut off", param=where) from None


def read_pixels(image: Any, where: str, limits: ImageLimits = DEFAULT_LIMITS, *, background: Color = WHITE) -> Pixels:
    """Pixels of a program's image: Pillow image, or an array (or tensor) of whole numbers from 0 to 255, [height,
    width, channels] or [channels, height, width] with 1, 3 or 4 channels. EXIF orientation is ignored, as by
    Transformers. Raises UserError."""
    if _is_pillow(image):
        _check_size(image.width, image.height, where, limits)
        _check_mode(image.mode, where)
        try:
            return _rgb(image, background)
        except Exception:
            raise UserError(f"{where}: the image is damaged or cut off", param=where) from None
    if not hasattr(image, "__array__"):
        kind = type(image).__name__
        raise UserError(f"{where}: an image must be a Pillow image or an array, not {kind}", param=where)
    try:
        values = np.asarray(image)
    except (TypeError, RuntimeError, ValueError):
        raise UserError(f"{where}: this array is not readable by NumPy on the CPU", param=where) from None
    return _array_pixels(values, where, limits, background)


def _array_pixels(values: npt.NDArray[Any], where: str, limits: ImageLimits, background: Color) -> Pixels:
    if values.ndim != 3 or not ({values.shape[0], values.shape[2]} & {1, 3, 4}):
        raise UserError(
            f"{where}: an array of an image must be [height, width, channels] or [channels, height, width] with 1, 3 "
            f"or 4 channels, not {list(values.shape)}",
            param=where,
        )
    if values.shape[0] in (1, 3, 4):  # as Transformers, even if the last dimension could be the channels
        values = np.moveaxis(values, 0, -1)
    _check_size(values.shape[1], values.shape[0], where, limits)
    values = _bytes(values, where)
    if values.shape[2] == 4:
        alpha = values[..., 3:4] / 255
        values = np.round(alpha * values[..., :3] + (1 - alpha) * np.array(background)).astype(np.uint8)
    elif values.shape[2] == 1:
        values = np.repeat(values, 3, axis=-1)
    return np.ascontiguousarray(values)


def _bytes(values: npt.NDArray[Any], where: str) -> Pixels:
    """Pixel values as uint8; other types as Transformers takes them, if all are bytes."""
    if values.dtype == np.uint8:
        return values
    if values.dtype.kind not in "biuf":
        raise UserError(f"{where}: an array of an image must hold numbers, not {values.dtype}", param=where)
    least, most = values.min(), values.max()
    if least >= 0 and most <= 255 and (values.dtype.kind != "f" or np.array_equal(values, np.rint(values))):
        return values.astype(np.uint8)
    hint = "multiply by 255 and round" if least >= 0 and most <= 1 else "convert it to uint8"
    raise UserError(
        f"{where}: an array of {values.dtype} must hold whole numbers from 0 to 255, and this one has values from "
        f"{least:g} to {most:g}: {hint}",
        param=where,
    )


def _rgb(image: Image.Image, background: Color) -> Pixels:
    from PIL import Image

    if "A" in image.getbands() or image.info.get("transparency") is not None:
        whole = Image.new("RGBA", image.size, (*background, 255))
        image = Image.alpha_composite(whole, image.convert("RGBA"))
    return np.array(image.convert("RGB"))


def _check_size(width: int, height: int, where: str, limits: ImageLimits) -> None:
    if width < 1 or height < 1:
        raise UserError(f"{where}: an image of {width} x {height} pixels has none", param=where)
    if width * height > limits.max_pixels:
        raise UserError(
            f"{where}: an image of {width} x {height} pixels has more than {limits.max_pixels}, the limit", param=where
        )


def _check_mode(mode: str, where: str) -> None:
    if mode not in MODES:
        raise UserError(
            f"{where}: an image of mode {mode!r:.20}, whose values have more than 8 bits, is not supported", param=where
        )


def _is_pillow(image: Any) -> bool:
    return any(base.__module__ == "PIL.Image" and base.__name__ == "Image" for base in type(image).__mro__)


def _pillow() -> tuple[Any, Any, type[Exception]]:
    """Pillow's opener, its EXIF transpose, and its error of too large images."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise UserError(f"images need Pillow: {how_to_install('images')}") from None
    return Image.open, ImageOps.exif_transpose, Image.DecompressionBombError
