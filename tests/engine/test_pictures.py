"""Pictures of prompts in helpers: a video has limits of its own, and holds up other videos alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from quire.config.media import TEXT_DEFAULTS, MediaConfig, MediaLimit, MediaSize
from quire.engine.pictures import Pictures
from quire.errors import ConfigError
from quire.multimodal.inputs import VideoInputs
from quire.multimodal.preparing import Preparation
from quire.multimodal.processors import Normalisation, QwenProcessor
from quire.multimodal.sources import Picture
from quire.multimodal.video_marks import ReadyVideo, VideoRuns
from quire.multimodal.videos import VIDEO_SECONDS, VideoProcessor
from quire.prompt_image import ReadyImage
from quire.tokenization.jobs import BODY_LIMITS, ReadLimits
from quire.utils.fair_threads import FairThreads

IMAGE = ReadyImage((1, 1, 1), b"key", b"", (8, 8), is_encoded=False, is_whole=False)
QWEN = QwenProcessor(4, 2, 2, 64, 1600, 3, True, Normalisation(None, None, None))
VIDEO = VideoProcessor(QWEN, 64, 4096, 2.0, None, 4, 768, None)
INPUTS: Any = SimpleNamespace(
    videos=VideoInputs(VIDEO, VideoRuns(9)), preparation=lambda *_: Preparation(QWEN, (255, 255, 255))
)


class Helpers:
    """Helpers whose videos last until `release` is set."""

    def __init__(self) -> None:
        self.release, self.has_begun = threading.Event(), threading.Event()
        self.done: list[tuple[str, ReadLimits]] = []

    def read(
        self, reader: str, argument: str, content: Sequence[bytes], limits: ReadLimits = BODY_LIMITS
    ) -> bytes | bytearray:
        is_video = reader.endswith("prepare_video")
        if is_video:
            self.has_begun.set()
            self.release.wait(120)
        self.done.append(("video" if is_video else "image", limits))
        return msgspec.msgpack.encode(ReadyVideo([IMAGE], [0.0], []) if is_video else IMAGE)


def test_limits_of_a_prompt() -> None:
    """Videos alone are possible; without images and videos no tower is loaded."""
    usual = {"language_model_only": False, "mm_processor_kwargs": {}, "media_io_kwargs": {}, "mm_processor_cache_gb": 0,
             "allowed_media_domains": [], "allowed_local_media_path": "", "enable_mm_embeds": False}  # fmt: skip
    for limits, wanted in (
        ({}, (999, 4, False)),
        ({"image": 0}, (0, 4, True)),
        ({"image": 0, "video": 1}, (0, 1, False)),
        ({"image": 0, "video": 0}, (0, 0, True)),
    ):
        found = MediaConfig.of(limit_mm_per_prompt=limits, **usual)
        assert (found.images.count, found.videos.count, found.language_model_only) == wanted
    sized = MediaConfig.of(
        limit_mm_per_prompt={"image": {"width": 64}, "video": {"count": 1, "num_frames": 8, "height": 32}}, **usual
    )
    assert sized.images == MediaLimit(999, MediaSize(width=64))
    assert sized.videos == MediaLimit(1, MediaSize(height=32, num_frames=8))
    for limits, message in (
        ({"image": {"num_frames": 2}}, "image has count, width, height, not 'num_frames'"),
        ({"image": {"width": 0}}, "image.width must be a number from 1 on, not 0"),
        ({"video": {"num_frames": True}}, "video.num_frames must be a number from 1 on"),
        ({"image": {"count": -1}}, "image must be a number from 0 on, not -1"),
        ({"audio": {"width": 5}}, "audio has count, not 'width'"),
    ):
        with pytest.raises(ConfigError, match=message):
            MediaConfig.of(limit_mm_per_prompt=limits, **usual)


async def test_an_image_does_not_wait_for_videos() -> None:
    helpers, threads = Helpers(), FairThreads(2, "test", long_size=100)
    front_end: Any = SimpleNamespace(
        helpers=helpers,
        config=SimpleNamespace(media=TEXT_DEFAULTS),
        named_pictures=None,
        input_processor=SimpleNamespace(max_model_len=100),
    )
    pictures = Pictures(front_end, threads)
    try:
        videos = [
            asyncio.ensure_future(pictures.ready(INPUTS, [Picture(f"x[{number}]", bytes([number]), is_video=True)]))
            for number in range(3)
        ]
        await asyncio.to_thread(helpers.has_begun.wait, 120)
        assert await pictures.ready(INPUTS, [Picture("y", b"image")]) == [IMAGE]
        assert helpers.done == [("image", BODY_LIMITS)]
        helpers.release.set()
        assert await asyncio.gather(*videos) == [[ReadyVideo([IMAGE], [0.0], [])]] * 3
    finally:
        pictures.close()
        threads.shutdown(wait=False)
    limits = [
        ReadLimits(VIDEO_SECONDS, VIDEO.most_memory, f"x[{number}]: the video", f"x[{number}]") for number in range(3)
    ]
    assert helpers.done[1:] == [("video", each) for each in limits]
