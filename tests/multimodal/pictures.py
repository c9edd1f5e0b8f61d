"""Pictures for tests: of every mode and format, drawn from a seed, and processors of Transformers to compare with."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image

MODES = ("RGB", "L", "RGBA", "P", "LA", "1", "CMYK", "YCbCr", "PA", "RGBX")
SIZES = ((64, 64), (1, 1), (33, 200), (500, 7), (97, 31), (160, 128), (1, 150), (640, 480), (28, 27), (300, 300))
"""Width and height."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def draw(seed: int, mode: str = "RGB", size: tuple[int, int] = (64, 48)) -> Image.Image:
    """A picture of smooth shades with noise, so that filters round in both directions."""
    generator = np.random.default_rng(seed)
    width, height = size
    x, y = np.linspace(0, 5, width), np.linspace(0, 3, height)[:, None]
    planes = [
        np.sin(x * (n + 1) + y * (4 - n)) * 110 + 127 + generator.normal(0, 12, (height, width)) for n in range(4)
    ]
    values = np.clip(np.stack(planes, axis=-1), 0, 255).astype(np.uint8)
    rgba = Image.fromarray(values)
    if mode == "PA":
        return rgba.convert("P").convert("PA")
    if mode in ("P", "1"):
        return rgba.convert("RGB").convert(mode)
    if mode == "RGBX":
        return Image.frombytes("RGBX", size, values.tobytes())
    if mode == "LA":
        return Image.merge("LA", (rgba.convert("L"), rgba.getchannel("A")))
    return rgba.convert(mode)


def many(number: int) -> Iterator[Image.Image]:
    """Pictures of all modes and sizes in turn."""
    for seed in range(number):
        yield draw(seed, MODES[seed % len(MODES)], SIZES[(seed // len(MODES)) % len(SIZES)])


def encoded(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
