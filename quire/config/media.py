from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.config.checks import converted
from quire.errors import ConfigError

MAX_IMAGES = 999
"""Default of `limit_mm_per_prompt`, which is vLLM's."""
MAX_VIDEOS = 4
"""Its default for videos, each of which may take a minute to decode."""
MOST_FRAMES = 2**15
CACHE_GIB = 1.0
OTHER_MEDIA = ("video", "audio", "vision_chunk")
SIDES = {"image": ("width", "height"), "video": ("num_frames", "width", "height")}
"""Sizes in `limit_mm_per_prompt`."""
WHITE = (255, 255, 255)
Color = tuple[int, int, int]
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True)
class ProcessorOptions:
    """`mm_processor_kwargs`, which override the model's image processor. min_pixels, max_pixels: pixels of a resized
    picture."""

    min_pixels: int | None = None
    max_pixels: int | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any], option: str = "mm_processor_kwargs") -> ProcessorOptions:
        """Read the option; `size` may hold the fields as `shortest_edge` and `longest_edge`. Raises ConfigError for
        unknown names and wrong values."""
        values = dict(given)
        size = values.pop("size", None) or {}
        if not isinstance(size, Mapping) or size.keys() - {"shortest_edge", "longest_edge"}:
            raise ConfigError(f"{option}.size has shortest_edge and longest_edge, numbers of pixels", param=option)
        for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
            if edge in size:
                values.setdefault(name, size[edge])
        found = converted(option, values, cls, ("min_pixels", "max_pixels"))
        for number in (found.min_pixels, found.max_pixels):
            if number is not None and number < 1:
                raise ConfigError(f"{option}: min_pixels and max_pixels must be at least 1", param=option)
        if found.min_pixels is not None and found.max_pixels is not None and found.min_pixels > found.max_pixels:
            raise ConfigError(f"{option}: min_pixels must be at most max_pixels", param=option)
        return found


OF_FILES = ProcessorOptions()


@dataclass(frozen=True)
class VideoOptions:
    """`media_io_kwargs.video`, which overrides the model's video processor. fps: frames sampled of a second.
    num_frames: in place of fps."""

    fps: float | None = None
    num_frames: int | None = None


@dataclass(frozen=True)
class MediaSize:
    """Largest image or video, in pixels, that memory is planned for; None: the model's largest. num_frames: frames in a
    video."""

    width: int | None = None
    height: int | None = None
    num_frames: int | None = None

    @property
    def has_sides(self) -> bool:
        return self.width is not None or self.height is not None


MODEL_SIZE = MediaSize()


@dataclass(frozen=True)
class MediaLimit:
    """Limit of images or of videos in a prompt, and the size to plan for."""

    count: int
    size: MediaSize = MODEL_SIZE


@dataclass(frozen=True)
class MediaConfig:
    """Settings for pictures and videos of requests. language_model_only: take text alone and load no tower. images,
    videos: limits per prompt. background: color under transparent pictures. cache_bytes: size of the front end's
    processed pictures. domains: permitted hosts of URLs, in lower case. networks: permitted private addresses.
    local_path: directory whose files file URLs may name. takes_features: accept a client's features
    (`image_embeds`)."""

    language_model_only: bool = False
    images: MediaLimit = MediaLimit(MAX_IMAGES)
    processor: ProcessorOptions = OF_FILES
    background: Color = WHITE
    cache_bytes: int = int(CACHE_GIB * 2**30)
    domains: tuple[str, ...] = ()
    networks: tuple[Network, ...] = ()
    local_path: Path | None = None
    takes_features: bool = False
    videos: MediaLimit = MediaLimit(MAX_VIDEOS)
    video: VideoOptions = VideoOptions()

    @classmethod
    def of(
        cls,
        *,
        language_model_only: bool,
        limit_mm_per_prompt: Mapping[str, Any],
        mm_processor_kwargs: Mapping[str, Any],
        media_io_kwargs: Mapping[str, Any],
        mm_processor_cache_gb: float,
        allowed_media_domains: list[str],
        allowed_local_media_path: str,
        enable_mm_embeds: bool,
    ) -> MediaConfig:
        """Read vLLM's options. Raises ConfigError for unknown names and wrong values."""
        if mm_processor_cache_gb < 0:
            raise ConfigError("mm_processor_cache_gb must be at least 0", param="mm_processor_cache_gb")
        images, videos = _limits(limit_mm_per_prompt)
        return cls(
            language_model_only=language_model_only
            or (images.count == 0 and (videos.count == 0 or "video" not in limit_mm_per_prompt)),
            images=images,
            processor=ProcessorOptions.of(mm_processor_kwargs),
            background=background_of({kind: each for kind, each in media_io_kwargs.items() if kind != "video"}),
            videos=videos,
            video=video_options_of(media_io_kwargs.get("video", {})),
            cache_bytes=int(mm_processor_cache_gb * 2**30),
            domains=tuple(each.lower().rstrip(".") for each in allowed_media_domains),
            networks=tuple(found for each in allowed_media_domains if (found := _network(each)) is not None),
            local_path=_directory(allowed_local_media_path),
            takes_features=enable_mm_embeds,
        )


def background_of(media_io_kwargs: Mapping[str, Any], option: str = "media_io_kwargs") -> Color:
    """RGB color under transparent pictures. Raises ConfigError."""
    for kind, settings in media_io_kwargs.items():
        if kind != "image" or not isinstance(settings, Mapping):
            raise ConfigError(f"{option} has an object for 'image' alone, not {kind!r:.50}", param=option)
    image = dict(media_io_kwargs.get("image", {}))
    color = image.pop("rgba_background_color", WHITE)
    image.pop("image_mode", "RGB")
    if image or media_io_kwargs.get("image", {}).get("image_mode", "RGB") != "RGB":
        raise ConfigError(f"{option}.image has rgba_background_color, and image_mode 'RGB'", param=option)
    is_color = isinstance(color, list | tuple) and len(color) == 3
    if not is_color or not all(type(each) is int and 0 <= each <= 255 for each in color):
        raise ConfigError(f"{option}.image.rgba_background_color must be three numbers from 0 to 255", param=option)
    red, green, blue = color
    return red, green, blue


def video_options_of(given: object, option: str = "media_io_kwargs") -> VideoOptions:
    """Video options in `media_io_kwargs.video`. Raises ConfigError."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"{option}.video must be an object", param=option)
    found = converted(f"{option}.video", dict(given), VideoOptions, ("fps", "num_frames"))
    if found.fps is not None and found.num_frames is not None:
        raise ConfigError(f"{option}.video has fps or num_frames, not both", param=option)
    fps, num_frames = (1 if each is None else each for each in (found.fps, found.num_frames))
    if not 0 < fps <= 1000 or not 0 < num_frames <= MOST_FRAMES:
        raise ConfigError(f"{option}.video: fps is at most 1000, num_frames {MOST_FRAMES}, both above 0", param=option)
    return found


def _limits(limits: Mapping[str, Any]) -> tuple[MediaLimit, MediaLimit]:
    option = "limit_mm_per_prompt"
    found = {"image": MediaLimit(MAX_IMAGES), "video": MediaLimit(MAX_VIDEOS)}
    for kind, limit in limits.items():
        if kind not in ("image", *OTHER_MEDIA):
            known = ", ".join(("image", *OTHER_MEDIA))
            raise ConfigError(f"{option}: {kind!r:.50} is no kind of input ({known})", param=option)
        size = MODEL_SIZE
        if isinstance(limit, Mapping):
            values = dict(limit)
            limit = values.pop("count", MAX_VIDEOS if kind == "video" else MAX_IMAGES)
            size = _size(f"{option}.{kind}", values, SIDES.get(kind, ()))
        if type(limit) is not int or limit < 0:
            raise ConfigError(f"{option}.{kind} must be a number from 0 on, not {limit!r:.50}", param=option)
        found[kind] = MediaLimit(limit, size)
    return found["image"], found["video"]


def _size(name: str, values: Mapping[str, Any], keys: tuple[str, ...]) -> MediaSize:
    for key, value in values.items():
        if key not in keys:
            known = ", ".join(("count", *keys))
            raise ConfigError(f"{name} has {known}, not {key!r:.50}", param="limit_mm_per_prompt")
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(
                f"{name}.{key} must be a number from 1 on, not {value!r:.50}", param="limit_mm_per_prompt"
            )
    return MediaSize(**values)


def _network(text: str) -> Network | None:
    try:
        return ipaddress.ip_network(text.strip("[]"))
    except ValueError:
        return None


def _directory(text: str) -> Path | None:
    if not text:
        return None
    path = Path(text).expanduser().resolve()
    if not path.is_dir():
        raise ConfigError(f"allowed_local_media_path: {text} is no directory", param="allowed_local_media_path")
    return path


TEXT_DEFAULTS = MediaConfig()
