"""Pictures of every format and mode have the pixels of Transformers; what is damaged or too large is refused."""

from __future__ import annotations

import contextlib
import io
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from transformers.image_transforms import convert_to_rgb

from quire.errors import UserError
from quire.multimodal.decoding import decode_image, read_pixels
from quire.multimodal.sources import DEFAULT_LIMITS, ImageLimits, read_data_url
from tests.multimodal.pictures import FORMATS, MODES, data_url, draw, encoded

WHERE = "messages[0].content[1].image_url"


def expected_pixels(data: bytes) -> np.ndarray:
    """Pixels as Transformers has them: a file is turned upright, then its transparency is laid over white."""
    with Image.open(io.BytesIO(data)) as image:
        turned = ImageOps.exif_transpose(image)
        return np.asarray(convert_to_rgb(turned, return_numpy=True))


def check(data: bytes) -> np.ndarray:
    found = decode_image(data, WHERE)
    assert found.dtype == np.uint8
    assert found.flags.c_contiguous
    assert np.array_equal(found, expected_pixels(data))
    return found


@pytest.mark.parametrize("format", FORMATS)
def test_formats(format: str) -> None:
    check(encoded(draw(1), format))


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in ("CMYK", "YCbCr", "PA", "RGBX")])
def test_modes_of_png(mode: str) -> None:
    check(encoded(draw(2, mode)))


@pytest.mark.parametrize(("mode", "format"), [("CMYK", "JPEG"), ("L", "JPEG"), ("RGBA", "WEBP"), ("P", "GIF")])
def test_modes_of_other_formats(mode: str, format: str) -> None:
    check(encoded(draw(3, mode), format))


def test_a_transparent_colour_of_a_palette() -> None:
    found = check(encoded(Image.new("P", (4, 4), 0), transparency=0))
    assert found.tolist() == [[[255] * 3] * 4] * 4


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    found = check(encoded(draw(4, size=(48, 16)), "JPEG", exif=exif))
    assert found.shape == ((48, 16, 3) if orientation >= 5 else (16, 48, 3))


def test_several_pictures_of_a_telephone() -> None:
    check(encoded(draw(15), "MPO", save_all=True, append_images=[draw(16)]))


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP"])
def test_an_animation_is_its_first_frame(format: str) -> None:
    frames = [draw(seed, size=(20, 12)) for seed in (5, 6, 7)]
    found = check(encoded(frames[0], format, save_all=True, append_images=frames[1:], lossless=True))
    assert found.shape == (12, 20, 3)
    if format != "GIF":
        assert np.array_equal(found, np.asarray(frames[0]))


@pytest.mark.parametrize("size", [(1, 1), (1000, 1), (1, 1000)])
def test_thin_pictures(size: tuple[int, int]) -> None:
    assert check(encoded(draw(8, size=size))).shape == (size[1], size[0], 3)


def test_sixteen_bits_of_grey_are_refused() -> None:
    """Pillow cuts them off at 255."""
    data = encoded(Image.fromarray(np.full((4, 4), 1000, np.uint16)))
    with pytest.raises(UserError, match="mode 'I;16', whose values have more than 8 bits"):
        decode_image(data, WHERE)
    with pytest.raises(UserError, match="mode 'F'"):
        read_pixels(Image.new("F", (2, 2)), WHERE)


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def test_a_bomb_is_refused_by_its_header() -> None:
    """60,000 x 60,000 pixels in 60 bytes: no pixel is decoded."""
    for side, message in ((60_000, "more than 67108864 pixels"), (9_000, "9000 x 9000 pixels has more than 67108864")):
        header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
        with pytest.raises(UserError, match=message) as caught:
            decode_image(b"\x89PNG\r\n\x1a\n" + header + png_chunk(b"IDAT", b""), WHERE)
        assert caught.value.param == WHERE


def test_limits_of_bytes_and_pixels() -> None:
    data = encoded(draw(9, size=(20, 20)))
    with pytest.raises(UserError, match=f"an image of {len(data)} bytes is over the limit of 100"):
        decode_image(data, WHERE, ImageLimits(max_bytes=100))
    with pytest.raises(UserError, match="over the limit of 100"):
        read_data_url(data_url(data), WHERE, ImageLimits(max_bytes=100))
    limits = ImageLimits(max_pixels=399)
    for read in (lambda: decode_image(data, WHERE, limits), lambda: read_pixels(draw(9, size=(20, 20)), WHERE, limits)):
        with pytest.raises(UserError, match="20 x 20 pixels has more than 399"):
            read()
    assert decode_image(data, WHERE, ImageLimits(len(data), 400)).shape == (20, 20, 3)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_picture_cut_off_is_refused(format: str) -> None:
    data = encoded(draw(10, size=(90, 90)), format)
    for length in (0, 3, len(data) // 3, len(data) // 2):
        with pytest.raises(UserError, match=r"damaged") as caught:
            decode_image(data[:length], WHERE)
        assert "0x" not in caught.value.message  # Pillow's own text has an address


def test_damage_in_the_middle_is_an_error_of_the_caller_or_pixels() -> None:
    generator = np.random.default_rng(3)
    for format in FORMATS:
        data = bytearray(encoded(draw(11), format))
        for place in generator.integers(0, len(data), 30).tolist():
            changed = bytearray(data)
            changed[place] ^= 0xFF
            with contextlib.suppress(UserError):
                assert decode_image(bytes(changed), WHERE).ndim == 3


def test_a_jpeg_of_scans_without_end_is_refused() -> None:
    data = encoded(draw(12), "JPEG", progressive=True)
    check(data)
    with pytest.raises(UserError, match="more than 100 scans"):
        decode_image(data + b"\xff\xda" * 100, WHERE)


@pytest.mark.parametrize("data", [b"", b"GIF89a", b"%!PS-Adobe-3.0 EPSF-3.0\n", b"<svg xmlns='x'/>", b"P5 1 1 255\n\0"])
def test_other_formats_are_refused(data: bytes) -> None:
    with pytest.raises(UserError, match=r"unknown format \(known: PNG, JPEG, WebP, GIF, BMP\)"):
        decode_image(data, WHERE)


def test_data_urls() -> None:
    data = encoded(draw(13))
    assert read_data_url(data_url(data), WHERE) == data
    assert read_data_url(data_url(data, "image/PNG;charset=x"), WHERE) == data
    assert read_data_url(data_url(data, ""), WHERE) == data


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:image/png,abc", "must be data:image/...;base64"),
        ("data:image/png;base64", "must be data:image/...;base64"),
        ("data:text/html;base64,AAAA", "'text/html' holds no image"),
        ("data:image/png;base64,AA*A", "not valid base64"),
        ("data:image/png;base64,AAA", "not valid base64"),
        ("data:image/png;base64,\u00e4\u00e4\u00e4\u00e4", "not valid base64"),
    ],
)
def test_wrong_data_urls(url: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        read_data_url(url, WHERE)
    assert caught.value.param == WHERE


def test_values_that_are_no_pictures() -> None:
    cases = [
        ("text", "not str"),
        (np.full((4, 4, 3), 0.5), "from 0.5 to 0.5: multiply by 255 and round"),
        (np.full((4, 4, 3), 256), "int64 must hold whole numbers from 0 to 255, .* from 256 to 256: convert it"),
        (np.full((4, 4, 3), np.nan), "from nan to nan"),
        (np.full((4, 4, 3), "x"), "must hold numbers, not <U1"),
        (torch.zeros(4, 4, 3, dtype=torch.bfloat16), "not readable by NumPy"),
        (np.zeros((2, 4, 4, 3), np.uint8), r"\[2, 4, 4, 3\]"),
        (np.zeros((4, 4), np.uint8), r"\[4, 4\]"),
    ]
    cases += [(np.zeros((5, 4, 2), np.uint8), r"\[5, 4, 2\]"), (np.zeros((0, 4, 3), np.uint8), "has none")]
    for value, message in cases:
        with pytest.raises(UserError, match=message):
            read_pixels(value, WHERE)


def test_a_pillow_image_of_the_callers_is_not_turned() -> None:
    """Processors of Transformers do not turn it either."""
    image = draw(14, size=(48, 16))
    image.getexif()[0x0112] = 6
    assert read_pixels(image, WHERE).shape == (16, 48, 3)


def test_limits_by_default_take_a_photo() -> None:
    assert DEFAULT_LIMITS.max_pixels > 50_000_000
