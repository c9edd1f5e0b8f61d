"""Videos of Qwen3-VL, Qwen 3.5 and Qwen2.5-VL: sampled frames, two of which are computed as one image.

Sampling, sizes and times are Transformers'. PyAV decodes files.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np

from quire.config.hf_json import Fields, read_optional_json
from quire.config.media import MODEL_SIZE, MOST_FRAMES, MediaSize, VideoOptions
from quire.errors import ConfigError, PromptTooLongError, UserError
from quire.multimodal.decoding import Pixels, read_pixels
from quire.multimodal.processors import LARGEST_RATIO, QwenProcessor, channels, content_key, resize
from quire.multimodal.sizes import NO_LIMIT, OPTION, check_tokens, sides
from quire.multimodal.sources import VIDEO_LIMITS, read_data_url, too_many_bytes
from quire.multimodal.video_marks import ReadyVideo
from quire.prompt_image import ReadyImage
from quire.utils.extras import how_to_install

USUAL_FPS = 24.0
"""Frames a second of a list of frames without metadata, as in Transformers."""
MOST_SECONDS = 3600
MOST_DECODED = 2**34
"""Maximum pixels of all frames of a file."""
VIDEO_SECONDS = 60.0
"""Processor time for one file in a helper, in seconds."""
DECODER_BYTES = 2**30
"""Memory of a helper for FFmpeg beside the resized frames: decoders keep frames."""
COPIES = 6
"""Copies of the resized frames in a helper that answers."""
_VP8_SHOWN = 0x10
"""Bit of a VP8 frame's first byte; frames without it are not shown."""
METADATA = ("fps", "frames_indices", "total_num_frames", "duration", "do_sample_frames", "video_backend")
"""Keys beside frames, as in vLLM; the last and `duration` have no effect, `total_num_frames` only for Qwen2.5-VL."""
_FILE, _JOINT_FILE, _VIDEOS = "video_preprocessor_config.json", "processor_config.json", "video_processor"
_IMAGE_FILE = "preprocessor_config.json"


class VideoProcessor(msgspec.Struct, frozen=True, tag="marked"):
    """Processor of Qwen3-VL and Qwen 3.5. min_pixels, max_pixels: pixels of all resized frames. fps: frames sampled of
    a second (None: all), from min_frames to max_frames. num_frames: frames in place of fps. max_tokens: tokens of a
    frame (None: no limit). most_tokens: limit of a video. samples_lists: sample frames that a program gives without
    `do_sample_frames`. most_sized_tokens, most_part_tokens: limits by `limited`."""

    image: QwenProcessor
    min_pixels: int
    max_pixels: int
    fps: float | None
    num_frames: int | None
    min_frames: int
    max_frames: int
    max_tokens: int | None
    most_tokens: int = 2**32
    samples_lists: bool = True
    most_sized_tokens: int = NO_LIMIT
    most_part_tokens: int = NO_LIMIT

    @property
    def most_memory(self) -> int:
        """Upper estimate of the bytes that a helper needs for a file."""
        side, step = self.image.patch_size * self.image.merge_size, self.image.frames
        most = min(
            self._most_pixels(self.num_frames or self.max_frames),
            min(self.most_tokens, self.most_sized_tokens) * side**2 * step,
        )
        return DECODER_BYTES + COPIES * 3 * most

    def _most_pixels(self, num_frames: int) -> int:
        side = self.image.patch_size * self.image.merge_size
        least = side**2 if self.max_tokens is None else max(side**2, int(self.min_pixels * 1.05))
        return max(self.max_pixels, num_frames * least)

    def sample(self, total: int, fps: float) -> list[int]:
        """Indices of the sampled frames of `total`, which follow one another at `fps`."""
        count = self.num_frames
        if count is None and self.fps is not None:
            count = min(max(int(total / fps * self.fps), self.min_frames), self.max_frames, total)
        if count is None:
            count = min(max(total, self.min_frames), self.max_frames)
        found: list[int] = np.linspace(0, total - 1, count).round().astype(int).tolist()
        return found

    def target_size(self, num_frames: int, height: int, width: int, where: str) -> tuple[int, int]:
        """Resized height and width of the frames. A part has no more patches than an image, for which the tower's
        memory is planned. Raises UserError for a ratio that the processor refuses."""
        side, step = self.image.patch_size * self.image.merge_size, self.image.frames
        most = self.max_pixels
        if self.max_tokens is not None:
            cap = min(self.max_tokens * side**2, self.max_pixels // num_frames)
            most = max(cap, int(self.min_pixels * 1.05)) * num_frames
        if height < side or width < side:
            stretch = max(side / height, side / width)
            height, width = int(height * stretch), int(width * stretch)
        if max(height, width) > LARGEST_RATIO * min(height, width):
            raise UserError(f"{where}: frames are more than {LARGEST_RATIO} times as long as wide", param=where)
        rows, columns = round(height / side), round(width / side)
        steps = max(1, round(num_frames / step)) * step
        if steps * rows * columns * side**2 > most:
            stretch = math.sqrt(num_frames * height * width / most)
            rows = max(1, math.floor(height / stretch / side))
            columns = max(1, math.floor(width / stretch / side))
        elif steps * rows * columns * side**2 < self.min_pixels:
            stretch = math.sqrt(self.min_pixels / (num_frames * height * width))
            rows, columns = math.ceil(height * stretch / side), math.ceil(width * stretch / side)
        return self._bounded(rows, columns, num_frames, where)

    def _bounded(self, rows: int, columns: int, num_frames: int, where: str) -> tuple[int, int]:
        side, most = self.image.patch_size * self.image.merge_size, self.image.max_pixels
        height, width = rows * side, columns * side
        if height * width > most:
            stretch = math.sqrt(height * width / most)
            rows, columns = (max(1, math.floor(each / stretch / side)) for each in (height, width))
        num_tokens = math.ceil(num_frames / self.image.frames) * rows * columns
        if num_tokens > self.most_tokens:
            raise PromptTooLongError(
                f"{where}: {num_frames} frames of {columns * side} x {rows * side} pixels have {num_tokens} tokens, "
                f"and the model's context is {self.most_tokens} tokens",
                param=where,
            )
        check_tokens(num_tokens, self.most_sized_tokens, "a video", where)
        check_tokens(rows * columns, self.most_part_tokens, f"a run of {self.image.frames} frames", where)
        return rows * side, columns * side

    def limited(self, size: MediaSize) -> Self:
        """Processor that refuses videos of more tokens than one of the size has. Raises ConfigError."""
        if size == MODEL_SIZE:
            return self
        free, side = msgspec.structs.replace(self, most_tokens=NO_LIMIT), self.image.patch_size * self.image.merge_size
        num_frames = min(size.num_frames or NO_LIMIT, self.num_frames or self.max_frames)
        height, width = sides(size, self.image.max_pixels)
        asked = round(height / side) * round(width / side)

        def tokens_of(count: int) -> int:
            """Tokens of a part; NO_LIMIT if the model makes frames smaller."""
            try:
                found = math.prod(free.target_size(count, height, width, f"{OPTION}.video")) // side**2
            except UserError as error:
                raise ConfigError(str(error), param=OPTION) from None
            return found if found >= asked else NO_LIMIT

        whole = tokens_of(num_frames) * math.ceil(num_frames / self.image.frames)
        part = tokens_of(min(self.image.frames, num_frames)) if size.has_sides else NO_LIMIT
        return msgspec.structs.replace(self, most_sized_tokens=whole, most_part_tokens=part)

    def moments(self, num_parts: int, rate: float) -> list[int]:
        """Rotary times of the parts; empty: each has positions of its own. rate: sampled frames of a second."""
        return []

    def prepare(self, video: Any, where: str) -> ReadyVideo:
        """Decode, sample and resize a video. video: bytes of a file, data URL, or a program's frames: a list of images
        or an array [frames, height, width, channels], maybe in a pair with metadata. Raises UserError."""
        if isinstance(video, str):
            video = read_data_url(video, where, VIDEO_LIMITS)
        if isinstance(video, bytes):
            return self._made(*decode_video(video, where, self))
        frames, metadata = video if isinstance(video, tuple) and len(video) == 2 else (video, {})
        if not hasattr(frames, "__len__") or isinstance(frames, Mapping) or not len(frames):
            raise UserError(f"{where}: a video must be a list of frames, not {type(frames).__name__}", param=where)
        if len(frames) > MOST_FRAMES:
            raise UserError(f"{where}: a video of more than {MOST_FRAMES} frames is not taken", param=where)
        known = FrameFacts.of(metadata, len(frames), where)
        chosen, total = list(range(len(frames))), known.total
        if self.samples_lists if known.is_sampled is None else known.is_sampled:
            chosen, total = self.sample(len(frames), known.fps), len(frames)
        read = {place: read_pixels(frames[place], where, VIDEO_LIMITS) for place in dict.fromkeys(chosen)}
        if len({frame.shape for frame in read.values()}) > 1:
            raise UserError(f"{where}: frames of a video must have one size", param=where)
        height, width, _ = read[chosen[0]].shape
        size = self.target_size(len(chosen), height, width, where)
        resized = {place: resize(frame, *size, self.image.resample) for place, frame in read.items()}
        seconds = [known.places[place] / known.fps for place in chosen]
        return self._made([resized[place] for place in chosen], seconds, len(chosen) / total * known.fps)

    def _made(self, resized: list[Pixels], seconds: list[float], rate: float) -> ReadyVideo:
        """Parts of consecutive frames; the last is repeated to fill its part. rate: frames of a second."""
        step, merge = self.image.frames, self.image.merge_size
        height, width, _ = resized[0].shape
        lacking = -len(resized) % step
        resized, times = [*resized, *resized[-1:] * lacking], [*seconds, *seconds[-1:] * lacking]
        rows, columns = height // self.image.patch_size, width // self.image.patch_size
        parts, middles = [], []
        for first in range(0, len(resized), step):
            pixels = np.stack(resized[first : first + step])
            key = content_key(pixels, (1, rows, columns), self.image)
            grid = 1, rows // merge, columns // merge
            parts.append(ReadyImage(grid, key, pixels.tobytes(), (height, width), is_encoded=False, is_whole=False))
            middles.append((times[first] + times[first + step - 1]) / 2)
        return ReadyVideo(parts, middles, self.moments(len(parts), rate))


class TimedVideoProcessor(VideoProcessor, frozen=True, tag="timed", kw_only=True):
    """Processor of Qwen2.5-VL, whose parts have rotary times in place of marks. min_pixels, max_pixels: pixels of a
    resized frame. max_tokens: tokens of a video, nine tenths of which the frames share (None: no limit).
    tokens_per_second: rotary times of a second."""

    tokens_per_second: float

    def _most_pixels(self, num_frames: int) -> int:
        return num_frames * max(self.max_pixels, int(self.min_pixels * 1.05))

    def sample(self, total: int, fps: float) -> list[int]:
        step, count = self.image.frames, total
        if self.num_frames is not None:
            count = min(max(step, round(self.num_frames / step) * step), total)
        elif self.fps is not None:
            most = min(self.max_frames, total) // step * step
            count = max(1, int(min(max(total / fps * self.fps, self.min_frames), most)) // step * step)
        # float32, as in Transformers: rounding decides between two neighbours.
        found: list[int] = (np.arange(count) * (total / count)).astype(np.float32).astype(int).tolist()
        return found

    def target_size(self, num_frames: int, height: int, width: int, where: str) -> tuple[int, int]:
        step, side, most = self.image.frames, self.image.patch_size * self.image.merge_size, self.max_pixels
        if self.max_tokens is not None:
            share = int(self.max_tokens * side**2 * 0.9) * step // num_frames
            most = max(min(most, share), int(self.min_pixels * 1.05))
        frame = msgspec.structs.replace(self.image, min_pixels=self.min_pixels, max_pixels=most, resizes=True)
        height, width = frame.target_size(height, width, where)
        return self._bounded(height // side, width // side, num_frames, where)

    def moments(self, num_parts: int, rate: float) -> list[int]:
        # float32, as in Transformers: another precision would round some times to the neighbour.
        interval = np.float32(self.tokens_per_second) * np.float32(self.image.frames / rate)
        found: list[int] = (np.arange(num_parts, dtype=np.float32) * interval).astype(int).tolist()
        return found


AnyVideoProcessor = VideoProcessor | TimedVideoProcessor


class FrameFacts(NamedTuple):
    """Metadata of a program's frames. places: frames' numbers in the video. total: its frames. is_sampled: None: as the
    model's files say."""

    fps: float
    places: list[int]
    total: int
    is_sampled: bool | None

    @classmethod
    def of(cls, metadata: Any, num_frames: int, where: str) -> FrameFacts:
        """Read a program's metadata. Raises UserError."""
        if not isinstance(metadata, Mapping) or metadata.keys() - set(METADATA):
            raise UserError(f"{where}: metadata of a video has {', '.join(METADATA)}", param=where)
        fps: Any = metadata.get("fps")
        places: Any = metadata.get("frames_indices")
        total: Any = metadata.get("total_num_frames")
        is_known = places is not None and total is not None
        try:
            fps, total = float(USUAL_FPS if fps is None else fps), int(total) if is_known else num_frames
            places = [int(place) for place in (range(num_frames) if places is None else places)]
        except (TypeError, ValueError, OverflowError):
            fps = math.nan
        if not 0 < fps < math.inf or total < 1 or min(places, default=0) < 0:
            raise UserError(f"{where}: fps, frames_indices or total_num_frames is invalid", param=where)
        if len(places) != num_frames:
            raise UserError(f"{where}: {len(places)} frames_indices for {num_frames} frames", param=where)
        return cls(fps, places, total, metadata.get("do_sample_frames"))


def decode_video(data: bytes, where: str, processor: VideoProcessor) -> tuple[list[Pixels], list[float], float]:
    """Sampled frames of a file, resized, their times in seconds, and their number in a second. The last frame stands
    for missing ones. Limits apply before a frame is decoded. Raises UserError; MemoryError in a helper."""
    if len(data) > VIDEO_LIMITS.max_bytes:
        raise too_many_bytes(where, len(data), VIDEO_LIMITS)
    try:
        import av  # noqa: F401
    except ImportError:
        raise UserError(f"{where}: videos need PyAV: {how_to_install('videos')}", param=where) from None
    kind = _container(data, where)
    try:
        with _opened(data, kind) as container:
            stream = container.streams.video[0]
            total = _num_frames(container.demux(stream), stream.codec_context.codec.name)
            fps = float(stream.average_rate or stream.guessed_rate or USUAL_FPS)
            size = stream.codec_context.width, stream.codec_context.height
    except MemoryError:
        raise
    except Exception:
        raise UserError(f"{where}: the video is damaged, or has no frames that are known", param=where) from None
    _check_sizes(total, fps, size, where)
    chosen = processor.sample(total, fps)
    height, width = processor.target_size(len(chosen), size[1], size[0], where)
    wanted, found, last = set(chosen), dict[int, Pixels](), -1

    def keep(index: int, frame: Any) -> None:
        pixels = np.asarray(frame.to_ndarray(format="rgb24"), np.uint8)
        turns = round(frame.rotation / 90)
        target = (width, height) if turns % 2 else (height, width)
        found[index] = resize(np.ascontiguousarray(np.rot90(pixels, turns)), *target, processor.image.resample)

    try:
        with _opened(data, kind) as container:
            frame = None
            for last, frame in enumerate(container.decode(video=0)):
                if (frame.width, frame.height) != size:
                    raise UserError(f"{where}: frames of a video must have one size", param=where)
                if last in wanted:
                    keep(last, frame)
                if last >= chosen[-1]:
                    break
            if last not in found and frame is not None:
                keep(last, frame)
    except (MemoryError, UserError):
        raise
    except Exception:
        raise UserError(f"{where}: the video is damaged or cut off", param=where) from None
    if not found:
        raise UserError(f"{where}: the video is damaged or cut off", param=where)
    shown = [min(index, last) for index in chosen]
    return [found[index] for index in shown], [index / fps for index in shown], len(chosen) / total * fps


def _opened(data: bytes, kind: str) -> Any:
    """Container whose decoder has one thread and makes no room for frames over the limit."""
    import av

    limits = {"max_pixels": str(2 * VIDEO_LIMITS.max_pixels)}  # a decoder may pad frames
    container = av.open(io.BytesIO(data), "r", format=kind, options=limits)
    for stream in container.streams.video:
        stream.codec_context.thread_count, stream.codec_context.options = 1, limits
    return container


def _num_frames(packets: Iterable[Any], codec: str) -> int:
    shown = (each for each in packets if each.size and not each.is_discard and not each.is_corrupt)
    if codec in ("vp8", "libvpx"):
        shown = (each for each in shown if memoryview(each)[0] & _VP8_SHOWN)
    return sum(1 for _ in itertools.islice(shown, MOST_FRAMES + 1))


def _container(data: bytes, where: str) -> str:
    """FFmpeg's name of the container, because a guess may be a playlist of other files."""
    if data[4:8] == b"ftyp":
        return "mov"
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return "avi"
    raise UserError(f"{where}: the video is of an unknown format (known: MP4, MOV, WebM, Matroska, AVI)", param=where)


def _check_sizes(total: int, fps: float, size: tuple[int, int], where: str) -> None:
    width, height = size
    if not total or width < 1 or height < 1 or fps <= 0:
        raise UserError(f"{where}: the video is damaged, or has no frames that are known", param=where)
    if width * height > VIDEO_LIMITS.max_pixels:
        raise UserError(
            f"{where}: frames of {width} x {height} pixels have more than {VIDEO_LIMITS.max_pixels}, the limit",
            param=where,
        )
    for count, limit, what in (
        (total, MOST_FRAMES, "frames"),
        (total / fps, MOST_SECONDS, "seconds"),
        (total * width * height, MOST_DECODED, "pixels in all frames"),
    ):
        if count > limit:
            raise UserError(f"{where}: the video has more than {limit} {what}, the limit", param=where)


def read_video_processor(
    directory: Path,
    image: QwenProcessor,
    options: VideoOptions,
    *,
    most_tokens: int = 2**32,
    tokens_per_second: float | None = None,
) -> AnyVideoProcessor | None:
    """Read a checkpoint's video processor; None for one that differs from that of images in patches or normalisation.
    options: the engine's. tokens_per_second: None for models other than Qwen2.5-VL, which may have one file for images
    and videos. Raises ModelLoadError with file and key."""
    path, values = directory / _JOINT_FILE, read_optional_json(directory / _JOINT_FILE).get(_VIDEOS)
    for name in (_FILE,) if tokens_per_second is None else (_FILE, _IMAGE_FILE):
        if not isinstance(values, dict) or not values:
            path, values = directory / name, read_optional_json(directory / name)
    values = values or {}
    fields = Fields(values, str(path))
    size = values.get("size")
    edges = Fields(size if isinstance(size, dict) else {}, f"{path}: size")
    sizes = [image.patch_size, image.merge_size, image.frames]
    keys = ("patch_size", "merge_size", "temporal_patch_size")
    if [fields.integer(key, usual) for key, usual in zip(keys, sizes, strict=True)] != sizes:
        return None
    colours = image.normalisation
    for key, usual, above in (("image_mean", colours.mean, -math.inf), ("image_std", colours.deviation, 0.0)):
        if values.get(key) is not None and (usual is None or channels(fields, key, usual, above) != usual):
            return None
    takes_all = tokens_per_second is None and "fps" in values and values["fps"] is None
    fps = None if takes_all else fields.number("fps", 2.0)
    num_frames = fields.optional_integer("num_frames")
    if options != VideoOptions():
        fps, num_frames = options.fps, options.num_frames
    is_capped = values.get("cap_pixels_per_frame") is True
    is_timed, side = tokens_per_second is not None, image.patch_size * image.merge_size if tokens_per_second else 32
    common: dict[str, Any] = {
        "image": image,
        "min_pixels": edges.integer("shortest_edge", 128 * side**2),
        "max_pixels": edges.integer("longest_edge", 768 * side**2),
        "fps": fps,
        "num_frames": num_frames,
        "min_frames": fields.integer("min_frames", 4),
        "max_frames": fields.integer("max_frames", 768),
        "max_tokens": fields.integer("max_video_tokens", 128_000 if is_timed else 768) if is_capped else None,
        "most_tokens": most_tokens,
    }
    if tokens_per_second is None:
        return VideoProcessor(**common)
    for key in ("min_pixels", "max_pixels"):  # they take precedence
        common[key] = fields.optional_integer(key) or common[key]
    return TimedVideoProcessor(
        **common, samples_lists=fields.boolean("do_sample_frames", False), tokens_per_second=tokens_per_second
    )


class VideoJob(msgspec.Struct, frozen=True):
    """Argument of `prepare_video` besides the file."""

    how: AnyVideoProcessor
    where: str


def prepare_video(argument: str, data: bytes) -> bytes:
    """Prepare a file in a helper; return msgpack of the ReadyVideo. argument: JSON of a VideoJob. Raises UserError."""
    job = msgspec.json.decode(argument, type=VideoJob)
    return msgspec.msgpack.encode(job.how.prepare(data, job.where))
