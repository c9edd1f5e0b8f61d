"""Images and videos of prompts: settings and placeholders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from quire.config.engine import EngineConfig
from quire.config.hf_config import CONFIG_FILE
from quire.config.media import (
    OF_FILES,
    TEXT_DEFAULTS,
    Color,
    MediaConfig,
    ProcessorOptions,
    VideoOptions,
    background_of,
    video_options_of,
)
from quire.config.vision import VIDEO_TOKENS, VISION_TOWERS, EncoderCosts, VisionConfig, read_vision
from quire.errors import ConfigError, UserError
from quire.multimodal.marks import Encoder, ImageMarks
from quire.multimodal.sizes import NO_LIMIT, check_tokens, image_limit
from quire.multimodal.sources import LOW_DETAIL_PIXELS, Picture, checked_uuid, is_data_url
from quire.multimodal.video_marks import ReadyMedium, ReadyVideo, VideoMarks, VideoRuns, runs_of
from quire.prompt_image import PromptImage, ReadyImage

if TYPE_CHECKING:
    from quire.multimodal.preparing import Preparation
    from quire.multimodal.processors import QwenProcessor, SquareProcessor
    from quire.multimodal.videos import AnyVideoProcessor

TEXT_ALONE = "prompts are text, without images, sound or video"
ONE_SIZE = "mm_processor_kwargs: all pictures of this model have one size"
IMAGES, VIDEOS = "multi_modal_data.image", "multi_modal_data.video"
NO_VIDEOS = "this model takes no videos: Qwen3-VL, Qwen 3.5 and Qwen2.5-VL do, with patches and colours as of images"


MEDIA = ("multi_modal_data", "multi_modal_uuids")


@dataclass(frozen=True)
class MediaOptions:
    """Image and video options of one request. background, video: None for the engine's. owner: client that the images'
    names belong to."""

    processor: ProcessorOptions = OF_FILES
    background: Color | None = None
    owner: str = ""
    video: VideoOptions | None = None

    @classmethod
    def of(
        cls,
        mm_processor_kwargs: Mapping[str, Any] | None,
        media_io_kwargs: Mapping[str, Any] | None = None,
        owner: str = "",
    ) -> MediaOptions:
        """Read options of an `LLM` or `AsyncLLM` call. Raises ConfigError for unknown names and wrong values."""
        if not isinstance(mm_processor_kwargs, Mapping | None):
            raise ConfigError("mm_processor_kwargs must be an object", param="mm_processor_kwargs")
        others = dict(media_io_kwargs or {})
        video = video_options_of(others.pop("video")) if "video" in others else None
        asked = ProcessorOptions.of(mm_processor_kwargs or {})
        return cls(asked, background_of(others) if others else None, owner, video)


NO_OPTIONS = MediaOptions()


@dataclass(frozen=True)
class NoImages:
    """Substitute for ImageInputs if the model gets no images. reason: told to clients."""

    reason: str = TEXT_ALONE


@dataclass(frozen=True)
class VideoInputs:
    """Video processor and marks of one model."""

    processor: AnyVideoProcessor
    marks: VideoMarks | VideoRuns

    def processor_of(self, options: MediaOptions) -> AnyVideoProcessor:
        """Processor for one request, whose frames cannot exceed the server's limit."""
        found, most = self.processor, options.processor.max_pixels
        if options.video is not None:
            found = msgspec.structs.replace(found, fps=options.video.fps, num_frames=options.video.num_frames)
        if most is not None and most < found.image.max_pixels:
            found = msgspec.structs.replace(found, image=msgspec.structs.replace(found.image, max_pixels=most))
        return found


@dataclass(frozen=True)
class ImageInputs:
    """Settings and steps from a request's images to its prompt, for one model. token_id: placeholder's. marks: tokens
    around an image's tokens that prompts lack (None: prompts have them). videos: None if the model takes none.
    most_tokens: limit per image."""

    processor: QwenProcessor | SquareProcessor
    vision: VisionConfig
    token_id: int
    media: MediaConfig = TEXT_DEFAULTS
    marks: ImageMarks | None = None
    videos: VideoInputs | None = None
    most_tokens: int = NO_LIMIT

    @property
    def largest_tokens(self) -> int:
        """Approximate tokens of the largest image or part of a video, for the tower's memory."""
        most, videos = min(self.most_tokens, self.processor.max_tokens), self.videos
        if videos is None or not self.media.videos.count:
            return most
        part = min(videos.processor.most_part_tokens, self.processor.max_tokens)
        return max(part, most) if self.media.images.count else part

    def check_numbers(self, pictures: Sequence[Picture]) -> None:
        """Raise UserError for too many images or videos in a prompt."""
        for is_video, limit, what in (
            (False, self.media.images.count, "images"),
            (True, self.media.videos.count, "videos"),
        ):
            given = [each for each in pictures if each.is_video == is_video]
            if given and is_video and self.videos is None:
                raise UserError(f"{given[0].where}: {NO_VIDEOS}", param=given[0].where)
            if len(given) > limit:
                where = given[limit].where
                raise UserError(
                    f"{where}: at most {limit} {what} may be given in one prompt (limit_mm_per_prompt), "
                    f"not {len(given)}",
                    param=where,
                )

    def preparation(self, detail: str = "auto", options: MediaOptions = NO_OPTIONS) -> Preparation:
        """Steps from image to model input, doable in a helper process. detail: one of DETAILS. options: request's."""
        from quire.multimodal.preparing import Preparation
        from quire.multimodal.processors import SquareProcessor

        background = options.background or self.media.background
        if isinstance(self.processor, SquareProcessor):
            if options.processor != OF_FILES:
                raise UserError(ONE_SIZE, param="mm_processor_kwargs")
            return Preparation(self.processor, background, self.most_tokens)
        processor, most = self.processor, self.processor.max_pixels
        least, asked = processor.min_pixels, options.processor
        if asked.max_pixels is not None:
            most = min(most, asked.max_pixels)  # a request cannot exceed the server's limit
        if asked.min_pixels is not None:
            least = asked.min_pixels
        if detail == "low":
            most = min(most, LOW_DETAIL_PIXELS)
        processor = msgspec.structs.replace(processor, min_pixels=min(least, most), max_pixels=most)
        return Preparation(processor, background, self.most_tokens)

    def prepare(self, picture: Picture, options: MediaOptions = NO_OPTIONS) -> ReadyMedium:
        """Fetch and decode an image or a video in this process. Raises UserError."""
        image = picture.image
        if isinstance(image, str) and not is_data_url(image):
            from quire.multimodal.fetching import fetch_image

            image = fetch_image(image, picture.where, self.media, picture.limits)
        if picture.is_video:
            assert self.videos is not None, "check_numbers comes before"
            return self.videos.processor_of(options).prepare(image, picture.where)
        if isinstance(image, Mapping):
            return self._encoded(image, picture)
        return self.preparation(picture.detail, options).prepare(image, picture.where)

    def _encoded(self, features: Mapping[str, Any], picture: Picture) -> ReadyImage:
        where = picture.where
        if not self.media.takes_features:
            raise UserError(
                f"{where}: features of images are not taken: the engine needs enable_mm_embeds", param=where
            )
        if picture.uuid is not None:
            raise UserError(f"{where}: features of an image have no uuid", param=where)
        from quire.multimodal.embeddings import read_features

        vision = self.vision
        found = read_features(features, where, vision.feature_size, vision.merge_size, is_whole=vision.is_pooled)
        check_tokens(found.num_tokens, self.most_tokens, "an image", where)
        return found

    def place(
        self, token_ids: list[int], media: Sequence[ReadyMedium], where: str
    ) -> tuple[list[int], list[PromptImage]]:
        """Prompt with all placeholders, and placed images and parts of videos. token_ids: prompt with one placeholder
        or mark per image, or with all; for videos see VideoMarks. where: field named in the UserError for placeholders
        that do not match."""
        images = [each for each in media if isinstance(each, ReadyImage)]
        videos = [each for each in media if isinstance(each, ReadyVideo)]
        if self.videos is not None:
            token_ids = self.videos.marks.written(token_ids, videos, VIDEOS if where == IMAGES else where)
        token_ids, placed = self._place(token_ids, images, where)
        parts = [] if self.videos is None else self.videos.marks.placed(token_ids, videos)
        return token_ids, sorted([*placed, *parts], key=lambda each: each.start)

    def _place(
        self, token_ids: list[int], images: Sequence[ReadyImage], where: str
    ) -> tuple[list[int], list[PromptImage]]:
        counts, marks = [each.num_tokens for each in images], self.marks
        if marks is not None and token_ids.count(marks.begin) == len(counts) and self.token_id not in token_ids:
            token_ids = marks.written(token_ids, self.token_id, counts)
        runs = runs_of(token_ids, self.token_id)
        if [end - start for start, end in runs] == counts:
            starts, placed = [start for start, _ in runs], token_ids
        else:
            places = [place for start, end in runs for place in range(start, end)]
            if len(places) != len(images):
                raise UserError(
                    f"{where}: the prompt has {len(places)} placeholders (token {self.token_id}), and {len(images)} "
                    f"images are given",
                    param=where,
                )
            starts, placed, last = [], [], 0
            for place, count in zip(places, counts, strict=True):
                placed += token_ids[last:place]
                starts.append(len(placed))
                placed += [self.token_id] * count
                last = place + 1
            placed += token_ids[last:]
        return placed, [image.at(start) for start, image in zip(starts, images, strict=True)]


def image_inputs(config: EngineConfig, tokenizer: Encoder | None = None) -> ImageInputs | NoImages:
    """Image inputs of the engine's model, or NoImages. Raises ModelLoadError."""
    model, media = config.model, config.media
    if model.vision is None or model.image_token_id is None or model.architecture not in VISION_TOWERS:
        return NoImages()
    if media.language_model_only:
        return NoImages("the engine was started with its language model alone")
    from quire.multimodal.processors import has_settings, read_qwen_processor, read_square_processor

    settings = model.mmproj or model.path
    if not has_settings(settings):
        return NoImages(f"{model.path} has no preprocessor_config.json, which says how the model takes images")
    vision = read_vision(model.architecture, model.vision, model.hidden_size, str(model.path / CONFIG_FILE))
    if vision.is_pooled:
        if media.processor != OF_FILES:
            raise ConfigError(ONE_SIZE, param="mm_processor_kwargs")
        square = read_square_processor(settings, vision.patch_size, vision.table_side, vision.image_tokens)
        marks = None if vision.marks is None else ImageMarks.of(*vision.marks, tokenizer)
        return ImageInputs(square, vision, model.image_token_id, media, marks)
    processor = read_qwen_processor(settings)
    least, most = media.processor.min_pixels, media.processor.max_pixels
    processor = msgspec.structs.replace(
        processor,
        min_pixels=least or min(processor.min_pixels, most or processor.min_pixels),
        max_pixels=most or max(processor.max_pixels, least or 0),
    )
    videos = _video_inputs(config, processor, vision, tokenizer)
    most_tokens = image_limit(processor, media.images.size)
    return ImageInputs(processor, vision, model.image_token_id, media, videos=videos, most_tokens=most_tokens)


def _video_inputs(
    config: EngineConfig, processor: QwenProcessor, vision: VisionConfig, tokenizer: Encoder | None
) -> VideoInputs | None:
    model, is_timed = config.model, vision.tokens_per_second is not None
    given = [(model.vision or {}).get(key) for key in (VIDEO_TOKENS[:1] if is_timed else VIDEO_TOKENS)]
    tokens = [token for token in given if type(token) is int and 0 <= token < model.vocab_size]
    if model.mmproj is not None or len(tokens) < len(given):
        return None
    from quire.multimodal.videos import read_video_processor

    found = read_video_processor(
        model.path,
        processor,
        config.media.video,
        most_tokens=model.max_model_len,
        tokens_per_second=vision.tokens_per_second,
    )
    marks = VideoRuns(tokens[0]) if is_timed else VideoMarks(tokens[0], tokens[1], tokens[2], tokenizer)
    return None if found is None else VideoInputs(found.limited(config.media.videos.size), marks)


def encoder_costs(config: EngineConfig) -> EncoderCosts | None:
    """Vision tower's costs relative to text tokens, for the scheduler; None without images."""
    found = image_inputs(config)
    if isinstance(found, NoImages):
        return None
    return EncoderCosts.of(found.vision, config.model.shape.active_parameters(), config.parallel)


def pictures_of(prompt: Mapping[str, Any]) -> list[Picture]:
    """Images and videos of a program's prompt (`multi_modal_data`), with images' names (`multi_modal_uuids`). Raises
    UserError for other data."""
    images, names = (_media_in(prompt.get(key), key, "image") for key in MEDIA)
    videos, video_names = (_media_in(prompt.get(key), key, "video") for key in MEDIA)
    if any(name is not None for name in video_names):
        raise UserError("multi_modal_uuids.video: videos have no uuid", param="multi_modal_uuids.video")
    images = images or [None] * len(names)
    if names and len(names) != len(images):
        raise UserError(
            f"multi_modal_uuids.image has {len(names)} names for {len(images)} images", param="multi_modal_uuids.image"
        )
    found = []
    for index, image in enumerate(images):
        where, uuid = f"{IMAGES}[{index}]", names[index] if names else None
        if image is None or isinstance(image, str):
            found.append(Picture.of_url(image, where, uuid=uuid))
        else:
            found.append(Picture(where, image, uuid=checked_uuid(uuid, where)))
    return found + [Picture.of_video(video, f"{VIDEOS}[{index}]") for index, video in enumerate(videos)]


def _media_in(data: object, key: str, kind: str) -> list[Any]:
    if data is None:
        return []
    if not isinstance(data, Mapping):
        raise UserError(f"{key} must be an object, not {type(data).__name__}", param=key)
    for name in data:
        if name not in ("image", "video"):
            raise UserError(
                f"{key}.{name!s:.50} is not supported: a prompt has images and videos alone",
                param=f"{key}.{name!s:.50}",
            )
    given = data.get(kind)
    if given is None:
        return []
    if kind == "video" and key == MEDIA[0] and _is_one_video(given):
        return [given]
    is_batch = getattr(given, "ndim", 0) == (4 if kind == "image" else 5)  # an array of images or videos
    return list(given) if is_batch or isinstance(given, list | tuple) else [given]


def _is_one_video(given: object) -> bool:
    if isinstance(given, tuple):
        return len(given) == 2 and isinstance(given[1], Mapping)
    if not isinstance(given, list):
        return getattr(given, "ndim", 0) != 5
    first = given[0] if given else None
    return getattr(first, "ndim", 0) == 3 or hasattr(first, "getbands")  # an array, or a Pillow image
