"""Images in messages and prompts, given directly or by URL."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.errors import UserError

DETAILS = ("auto", "low", "high", "original")
"""Values of an image's `detail`. Only "low" differs from the model's settings."""
LOW_DETAIL_PIXELS = 512 * 512
MAX_UUID = 1024
"""Maximum of characters in a client's name of an image."""
IMAGE_OF_PART = {"image_url": "image_url", "input_image": "image_url"}
"""Type of a content part -> field with its image's URL."""
FEATURES = "image_embeds"
"""Type of a content part with features of an image, and its field."""
VIDEO_PART = "video_url"
"""Type of a content part with a video, and its field."""
OBJECT_OF_PART = {"image": "image", "image_pil": "image_pil"}
"""Type of a program's content part -> field with its image."""


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Engine's limits of images or videos. max_bytes: limit of an encoded image. max_pixels: limit of an image before
    resizing. fetch_seconds: timeout of a URL, from name resolution to the last byte. kind: "image" or "video"."""

    max_bytes: int = 32 * 2**20
    max_pixels: int = 2**26
    fetch_seconds: float = 10.0
    kind: str = "image"

    @property
    def name(self) -> str:
        """Kind with its article."""
        return f"an {self.kind}" if self.kind == "image" else f"a {self.kind}"


DEFAULT_LIMITS = ImageLimits()
VIDEO_LIMITS = ImageLimits(64 * 2**20, 2**23, fetch_seconds=20.0, kind="video")
"""Limits of a video's file and of a frame before resizing."""


class Picture(msgspec.Struct, frozen=True):
    """Image or video of a message, before it is read. image: bytes of its file, URL other than a data URL, or a
    program's image; None for the image sent before under the uuid. detail: one of DETAILS. uuid: the client's name of
    the image. is_video: `image` is a video."""

    where: str
    image: Any
    detail: str = "auto"
    uuid: str | None = None
    is_video: bool = False

    @property
    def limits(self) -> ImageLimits:
        return VIDEO_LIMITS if self.is_video else DEFAULT_LIMITS

    @classmethod
    def of_video(cls, video: Any, where: str, uuid: object = None) -> Picture:
        """Make one of a video. video: bytes of a file, URL, or a program's frames. Raises UserError."""
        if uuid is not None:
            raise UserError(f"{where}: videos have no uuid", param=where)
        if isinstance(video, str) and is_data_url(video):
            video = read_data_url(video, where, VIDEO_LIMITS)
        if video is None or (isinstance(video, str) and not video):
            raise UserError(f"{where}: a video needs a URL", param=where)
        return cls(where, video, is_video=True)

    @classmethod
    def of_url(cls, url: object, where: str, detail: object = None, uuid: object = None) -> Picture:
        """Make one of an image's URL. url: None or empty if a uuid stands for the image. Raises UserError."""
        name = checked_uuid(uuid, where)
        is_named_alone = name is not None and (url is None or url == "")
        if not is_named_alone and (not isinstance(url, str) or not url):
            raise UserError(f"{where}: an image needs a URL", param=where)
        if detail is not None and detail not in DETAILS:
            known = ", ".join(DETAILS)
            raise UserError(f"{where}: detail must be one of {known}, not {detail!r:.50}", param=where)
        image = None if not isinstance(url, str) else read_data_url(url, where) if is_data_url(url) else url or None
        return cls(where, image, "auto" if detail is None else str(detail), name)


def picture_of(part: Any, where: str, *, takes_objects: bool = False) -> Picture | None:
    """Image of a content part, or None. takes_objects: it may hold a program's object. Raises UserError with the
    path."""
    if isinstance(part, Picture):
        return part
    if not isinstance(part, Mapping) or not isinstance(kind := part.get("type"), str):
        return None
    if kind == FEATURES:
        return _picture_of_features(part, f"{where}.{FEATURES}")
    if kind == VIDEO_PART or (kind == "video" and takes_objects):
        video: Any = part.get(kind)
        video = video.get("url") if isinstance(video, Mapping) else video
        return Picture.of_video(video, f"{where}.{kind}", part.get("uuid"))
    name = IMAGE_OF_PART.get(kind) or (OBJECT_OF_PART.get(kind) if takes_objects else None)
    if name is None:
        return None
    image: Any = part.get(name)
    detail: Any = part.get("detail")
    uuid: Any = part.get("uuid")
    if image is None and uuid is None:
        raise UserError(f"{where}: a content part of type {kind!r} needs a {name}", param=f"{where}.{name}")
    if isinstance(image, Mapping):
        detail = image.get("detail", detail)
        image = image.get("url")
    if kind in OBJECT_OF_PART and not isinstance(image, str):
        return Picture(where, image, uuid=checked_uuid(uuid, where))
    return Picture.of_url(image, f"{where}.{name}", detail, uuid)


def _picture_of_features(part: Mapping[str, Any], where: str) -> Picture:
    features = part.get(FEATURES)
    if not isinstance(features, Mapping):
        raise UserError(f"{where}: an object with image_embeds and image_grid_thw is needed", param=where)
    return Picture(where, dict(features), uuid=checked_uuid(part.get("uuid"), where))


def checked_uuid(uuid: object, where: str) -> str | None:
    """Client's name for a picture, or None. Raises UserError."""
    if uuid is None:
        return None
    if not isinstance(uuid, str) or not 1 <= len(uuid) <= MAX_UUID:
        raise UserError(f"{where}: a uuid is a string of 1 to {MAX_UUID} characters", param=where)
    return uuid


def is_data_url(url: str) -> bool:
    return url[:5].lower() == "data:"


def read_data_url(url: str, where: str, limits: ImageLimits = DEFAULT_LIMITS) -> bytes:
    """Decode a base64 data URL. Raises UserError."""
    head, comma, body = url.partition(",")
    found, *options = head[5:].split(";")
    if not is_data_url(head) or not comma or "base64" not in options:
        raise UserError(
            f"{where}: a data URL of {limits.name} must be data:{limits.kind}/...;base64,...",
            param=where,
        )
    if found and not found.lower().startswith(f"{limits.kind}/"):
        raise UserError(f"{where}: a data URL of type {found!r:.100} holds no {limits.kind}", param=where)
    return read_base64(body, where, limits)


def read_base64(text: str, where: str, limits: ImageLimits = DEFAULT_LIMITS) -> bytes:
    """Decode a base64 file. Raises UserError."""
    if len(text) // 4 * 3 > limits.max_bytes + 3:
        raise too_many_bytes(where, len(text) // 4 * 3, limits)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise UserError(f"{where}: the {limits.kind}'s data is not valid base64", param=where) from None


def too_many_bytes(where: str, num_bytes: int, limits: ImageLimits) -> UserError:
    return UserError(
        f"{where}: {limits.name} of {num_bytes} bytes is over the limit of {limits.max_bytes}", param=where
    )
