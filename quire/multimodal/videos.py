"""Videos of Qwen3-VL and Qwen 3.5: sampled frames, two of which are computed as one image with a time before it.

Sampling, sizes and times are those of Transformers' processor. PyAV decodes files (extra `videos`).
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from quire.config.hf_json import Fields, read_optional_json
from quire.config.media import VideoOptions
from quire.errors import UserError
from quire.multimodal.decoding import Pixels, read_pixels
from quire.multimodal.processors import LARGEST_RATIO, QwenProcessor, content_key, resize
from quire.multimodal.sources import VIDEO_LIMITS, read_data_url, too_many_bytes
from quire.multimodal.video_marks import ReadyVideo
from quire.prompt_image import ReadyImage
from quire.utils.extras import how_to_install

USUAL_FPS = 24.0
"""Frames a second of a list of frames without metadata, as in Transformers."""
MOST_FRAMES = 2**15
MOST_SECONDS = 3600
MOST_DECODED = 2**34
"""Largest number of pixels of all frames of a file."""
VIDEO_SECONDS = 60.0
"""Processor time for one file in a helper, in seconds."""
DECODER_BYTES = 2**30
"""Memory of a helper for FFmpeg beside the resized frames: a decoder keeps up to 16 frames and more."""
COPIES = 6
"""Copies of all resized frames while a helper answers: frames, parts, and a growing message."""
_VP8_SHOWN = 0x10
"""Bit of a VP8 frame's first byte; frames without it are references of others alone."""
METADATA = ("fps", "frames_indices", "total_num_frames", "duration", "do_sample_frames", "video_backend")
"""Keys beside frames, as in vLLM; the last and `duration` have no effect."""
_FILE, _JOINT_FILE, _VIDEOS = "video_preprocessor_config.json", "processor_config.json", "video_processor"


class VideoProcessor(msgspec.Struct, frozen=True):
    """image: processor of the frames. min_pixels, max_pixels: pixels of all frames after resizing. fps: frames
    sampled of a second (None: all), from min_frames to max_frames. num_frames: frames sampled in all, in place of
    fps. max_tokens: tokens of a frame (None: no limit of its own)."""

    image: QwenProcessor
    min_pixels: int
    max_pixels: int
    fps: float | None
    num_frames: int | None
    min_frames: int
    max_frames: int
    max_tokens: int | None

    @property
    def most_memory(self) -> int:
        """Upper estimate in bytes of the memory for a file."""
        side, most = self.image.patch_size * self.image.merge_size, self.num_frames or self.max_frames
        least = side**2 if self.max_tokens is None else max(side**2, int(self.min_pixels * 1.05))
        return DECODER_BYTES + COPIES * 3 * max(self.max_pixels, most * least)

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
        """Resized height and width of the frames. A part has no more patches than an image: the tower's memory is
        planned for images. Raises UserError for a ratio that the processor refuses."""
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
        if rows * columns * side**2 > self.image.max_pixels:
            stretch = math.sqrt(height * width / self.image.max_pixels)
            rows = max(1, math.floor(height / stretch / side))
            columns = max(1, math.floor(width / stretch / side))
        return rows * side, columns * side

    def prepare(self, video: Any, where: str) -> ReadyVideo:
        """video: bytes of a file, data URL, or a program's frames: a list of images or an array [frames, height, width,
        channels], maybe in a pair with metadata. Raises UserError."""
        if isinstance(video, str):
            video = read_data_url(video, where, VIDEO_LIMITS, kind="video")
        if isinstance(video, bytes):
            return self._made(*decode_video(video, where, self))
        frames, metadata = video if isinstance(video, tuple) and len(video) == 2 else (video, {})
        if not isinstance(metadata, Mapping) or metadata.keys() - set(METADATA):
            raise UserError(f"{where}: metadata of a video has {', '.join(METADATA)}", param=where)
        if not hasattr(frames, "__len__") or isinstance(frames, Mapping) or not len(frames):
            raise UserError(f"{where}: a video must be a list of frames, not {type(frames).__name__}", param=where)
        if len(frames) > MOST_FRAMES:
            raise UserError(f"{where}: a video of more than {MOST_FRAMES} frames is not taken", param=where)
        fps = metadata.get("fps") or USUAL_FPS
        chosen = list(range(len(frames)))
        if metadata.get("do_sample_frames", True):
            chosen = self.sample(len(frames), fps)
        places = metadata.get("frames_indices")
        places = list(range(len(frames))) if places is None else [int(place) for place in places]
        if len(places) != len(frames):
            raise UserError(f"{where}: {len(places)} frames_indices for {len(frames)} frames", param=where)
        read = {place: read_pixels(frames[place], where, VIDEO_LIMITS) for place in dict.fromkeys(chosen)}
        if len({frame.shape for frame in read.values()}) > 1:
            raise UserError(f"{where}: frames of a video must have one size", param=where)
        height, width, _ = read[chosen[0]].shape
        size = self.target_size(len(chosen), height, width, where)
        resized = {place: resize(frame, *size, self.image.resample) for place, frame in read.items()}
        return self._made([resized[place] for place in chosen], [places[place] / fps for place in chosen])

    def _made(self, resized: list[Pixels], seconds: list[float]) -> ReadyVideo:
        """Parts of consecutive frames, the last of which is repeated to fill its part."""
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
        return ReadyVideo(parts, middles)


def decode_video(data: bytes, where: str, processor: VideoProcessor) -> tuple[list[Pixels], list[float]]:
    """Sampled frames of a file, resized, and their times in seconds. The last frame stands for those that the end of
    the file lacks. Limits apply before a frame is decoded. Raises UserError; MemoryError in a helper, whose memory is
    limited."""
    if len(data) > VIDEO_LIMITS.max_bytes:
        raise too_many_bytes(where, len(data), VIDEO_LIMITS, "video")
    try:
        import av
    except ImportError:
        raise UserError(f"{where}: videos need PyAV: {how_to_install('videos')}", param=where) from None
    kind = _container(data, where)
    try:
        with av.open(io.BytesIO(data), "r", format=kind) as container:
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
        found[index] = resize(pixels, height, width, processor.image.resample)

    try:
        with av.open(io.BytesIO(data), "r", format=kind) as container:
            container.streams.video[0].codec_context.thread_count = 1
            frame = None
            for last, frame in enumerate(container.decode(video=0)):
                if (frame.width, frame.height) != size:
                    raise ValueError("frames of several sizes")
                if last in wanted:
                    keep(last, frame)
                if last >= chosen[-1]:
                    break
            if last not in found and frame is not None:
                keep(last, frame)
    except MemoryError:
        raise
    except Exception:
        raise UserError(f"{where}: the video is damaged or cut off", param=where) from None
    if not found:
        raise UserError(f"{where}: the video is damaged or cut off", param=where)
    shown = [min(index, last) for index in chosen]
    return [found[index] for index in shown], [index / fps for index in shown]


def _num_frames(packets: Iterable[Any], codec: str) -> int:
    """Packets with a frame that is shown, up to one beyond the limit: a file of a few bytes may state any number."""
    shown = (each for each in packets if each.size and not each.is_discard and not each.is_corrupt)
    if codec in ("vp8", "libvpx"):
        shown = (each for each in shown if memoryview(each)[0] & _VP8_SHOWN)
    return sum(1 for _ in itertools.islice(shown, MOST_FRAMES + 1))


def _container(data: bytes, where: str) -> str:
    """FFmpeg's name of the container. Named to the opener, because a guess may be a playlist of other files."""
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


def read_video_processor(directory: Path, image: QwenProcessor, options: VideoOptions) -> VideoProcessor | None:
    """Read a checkpoint's video processor; None for one that differs from that of images in patches or normalisation.
    options: the engine's. Raises ModelLoadError with file and key."""
    path = directory / _JOINT_FILE
    values = read_optional_json(path).get(_VIDEOS)
    if not isinstance(values, dict):
        path = directory / _FILE
        values = read_optional_json(path)
    fields = Fields(values, str(path))
    size = values.get("size")
    edges = Fields(size if isinstance(size, dict) else {}, f"{path}: size")
    sizes = [image.patch_size, image.merge_size, image.frames]
    keys = ("patch_size", "merge_size", "temporal_patch_size")
    mean, deviation = image.normalisation.mean, image.normalisation.deviation
    stated = [tuple(values.get(key) or usual or ()) for key, usual in (("image_mean", mean), ("image_std", deviation))]
    if [fields.integer(key, usual) for key, usual in zip(keys, sizes, strict=True)] != sizes:
        return None
    if stated != [tuple(mean or ()), tuple(deviation or ())]:
        return None
    fps = fields.number("fps", 2.0) if values.get("fps", 2) is not None else None
    num_frames = fields.optional_integer("num_frames")
    if options != VideoOptions():
        fps, num_frames = options.fps, options.num_frames
    is_capped = values.get("cap_pixels_per_frame") is True
    return VideoProcessor(
        image=image,
        min_pixels=edges.integer("shortest_edge", 128 * 32 * 32),
        max_pixels=edges.integer("longest_edge", 32 * 32 * 768),
        fps=fps,
        num_frames=num_frames,
        min_frames=fields.integer("min_frames", 4),
        max_frames=fields.integer("max_frames", 768),
        max_tokens=fields.integer("max_video_tokens", 768) if is_capped else None,
    )


class VideoJob(msgspec.Struct, frozen=True):
    """Argument of a helper's job besides the file."""

    how: VideoProcessor
    where: str


def prepare_video(argument: str, data: bytes) -> bytes:
    """Prepare a file in a helper (quire/tokenization/helpers.py); return msgpack of the ReadyVideo. argument: JSON of a
    VideoJob. Raises UserError."""
    job = msgspec.json.decode(argument, type=VideoJob)
    return msgspec.msgpack.encode(job.how.prepare(data, job.where))
