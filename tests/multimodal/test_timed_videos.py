"""Videos of Qwen2.5-VL: frames and sizes are those of Transformers' processor, and times those of its frames."""

from __future__ import annotations

import importlib
import importlib.util
import json
import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from transformers.video_utils import VideoMetadata

from quire.config.media import VideoOptions
from quire.errors import ConfigError, ModelLoadError, PromptTooLongError, UserError
from quire.multimodal.inputs import MediaOptions, VideoInputs
from quire.multimodal.processors import read_qwen_processor
from quire.multimodal.video_marks import ReadyVideo, VideoRuns
from quire.multimodal.videos import (
    AnyVideoProcessor,
    TimedVideoProcessor,
    VideoJob,
    prepare_video,
    read_video_processor,
)
from quire.prompt_image import ReadyImage
from tests.models.vision_models import PROCESSOR
from tests.multimodal.clips import recorded
from tests.multimodal.pictures import draw

FRAMES = [draw(seed, size=(32, 16)) for seed in range(9)]


@pytest.fixture(scope="module")
def transformers() -> Any:
    """Transformers' module, which needs torchvision for resizing alone."""
    names = [f"torchvision{part}" for part in ("", ".transforms", ".transforms.v2", ".transforms.v2.functional")]
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("torchvision") is None:
            for name in names:
                patch.setitem(sys.modules, name, ModuleType(name))
            for name in names[1:]:
                outer, _, own = name.rpartition(".")
                patch.setattr(sys.modules[outer], own, sys.modules[name], raising=False)
            patch.setattr(sys.modules[names[-1]], "InterpolationMode", None, raising=False)
        return importlib.import_module("transformers.models.qwen2_vl.video_processing_qwen2_vl")


def processor(directory: Path, options: VideoOptions | None = None, **others: Any) -> AnyVideoProcessor:
    """others: file -> its values."""
    files = {"preprocessor_config": PROCESSOR, **others}
    for name, values in files.items():
        (directory / f"{name}.json").write_text(json.dumps(values))
    image = read_qwen_processor(directory)
    found = read_video_processor(directory, image, options or VideoOptions(), most_tokens=10**9, tokens_per_second=2.0)
    assert found is not None
    return found


def test_files(tmp_path: Path) -> None:
    """An older checkpoint has one file for images and videos, a newer one an object in processor_config.json."""
    old = {**PROCESSOR, "min_pixels": 100, "max_pixels": 2000}
    made = processor(tmp_path, preprocessor_config=old)
    assert isinstance(made, TimedVideoProcessor)
    assert (made.min_pixels, made.max_pixels, made.fps, made.samples_lists) == (100, 2000, 2.0, False)
    video = {"size": {"shortest_edge": 64, "longest_edge": 900}, "do_sample_frames": True, "fps": None,
             "cap_pixels_per_frame": True, "max_video_tokens": 500}  # fmt: skip
    made = processor(tmp_path, preprocessor_config=old, processor_config={"video_processor": video})
    assert (made.min_pixels, made.max_pixels, made.fps, made.samples_lists) == (64, 900, 2.0, True)
    assert made.max_tokens == 500
    made = processor(tmp_path, VideoOptions(num_frames=6), processor_config={}, video_preprocessor_config={"fps": 4})
    assert (made.min_pixels, made.max_pixels, made.fps, made.num_frames) == (128 * 64, 768 * 64, None, 6)
    made = processor(tmp_path, video_preprocessor_config={"image_mean": 0.5})
    with pytest.raises(ModelLoadError, match="image_mean"):
        processor(tmp_path, video_preprocessor_config={"image_mean": "grey"})


def test_sampled_frames(transformers: Any, tmp_path: Path) -> None:
    chance, made, longer = random.Random(1), processor(tmp_path), 0
    for _ in range(400):
        total, fps = chance.randint(2, 3000), chance.choice([1.0, 10.0, 23.976, 24.0, 60.0])
        asked = chance.choice([{"fps": chance.choice([0.5, 1.7, 4])}, {"num_frames": chance.randint(1, 60)}])
        most = chance.choice([16, 768])
        found = msgspec.structs.replace(
            made, max_frames=most, fps=asked.get("fps"), num_frames=asked.get("num_frames")
        ).sample(total, fps)
        if not 2 <= round(asked.get("num_frames", 2) / 2) * 2 <= total:
            assert 1 <= len(found) <= total  # Transformers refuses it
            continue
        usual = SimpleNamespace(num_frames=None, fps=None, temporal_patch_size=2, min_frames=4, max_frames=most)
        metadata = VideoMetadata(total_num_frames=total, fps=fps)
        wanted = transformers.Qwen2VLVideoProcessor.sample_frames(usual, metadata, **asked).tolist()
        if wanted[-1] == total:  # rounding adds a frame, which no file has
            longer += 1
            wanted.pop()
        assert found == wanted
    assert longer < 20
    assert made.sample(1, 24.0) == [0]


def test_sizes(transformers: Any, tmp_path: Path) -> None:
    chance, made = random.Random(2), processor(tmp_path)
    made = msgspec.structs.replace(made, image=msgspec.structs.replace(made.image, max_pixels=10**6))
    for _ in range(300):
        height, width = chance.randint(3, 90), chance.randint(3, 90)
        least, most = chance.choice([64, 4096, 60_000]), chance.choice([60_001, 100_000, 10**6])
        found = msgspec.structs.replace(made, min_pixels=least, max_pixels=most)
        wanted = transformers.smart_resize(height, width, factor=8, min_pixels=least, max_pixels=most)
        assert found.target_size(chance.randint(1, 40), height, width, "") == wanted
    capped = msgspec.structs.replace(made, min_pixels=64, max_pixels=10**6, max_tokens=100)
    wanted = transformers.smart_resize(80, 80, factor=8, min_pixels=64, max_pixels=int(100 * 64 * 0.9) * 2 // 10)
    assert capped.target_size(10, 80, 80, "") == wanted
    short = msgspec.structs.replace(made, max_pixels=10**6, most_tokens=299)
    with pytest.raises(PromptTooLongError, match=r"x: 5 frames of 80 x 80 pixels have 300 tokens, .* 299 tokens"):
        short.target_size(5, 80, 80, "x")
    assert short.target_size(4, 80, 80, "x") == (80, 80)


def test_a_file(tmp_path: Path) -> None:
    """Times are those of the frames of a second that were sampled; a helper's answer is the same."""
    sizes = {"size": {"shortest_edge": 64, "longest_edge": 4096}}
    made = processor(tmp_path, VideoOptions(fps=7.0), video_preprocessor_config=sizes)
    data = recorded(FRAMES, "matroska", fps=10)
    ready = made.prepare(data, "x")
    assert ready.moments == [0, 0, 1], "6 of 9 frames at 10 a second: 0.6 times a part"
    assert ready.parts[1].pixels == np.stack([np.asarray(FRAMES[each]) for each in (3, 4)]).tobytes()
    answer = prepare_video(msgspec.json.encode(VideoJob(made, "x")).decode(), data)
    assert msgspec.msgpack.decode(answer, type=ReadyVideo) == ready


def test_options_of_a_request(tmp_path: Path) -> None:
    made = processor(tmp_path)
    inputs = VideoInputs(made, VideoRuns(9))
    assert inputs.processor_of(MediaOptions.of({}, {"image": {}})) == made
    asked = inputs.processor_of(MediaOptions.of({"max_pixels": 640}, {"video": {"num_frames": 6}}))
    assert (asked.image.max_pixels, asked.fps, asked.num_frames) == (640, None, 6)
    rows, columns = asked.target_size(6, 80, 80, "x")
    assert rows * columns <= 640
    assert inputs.processor_of(MediaOptions.of({"max_pixels": 10**9})).image == made.image, "within the server's"
    for wrong in (
        {"fps": 0.0},
        {"num_frames": 0},
        {"num_frames": 2**15 + 1},
        {"fps": 1.0, "num_frames": 2},
        {"codec": 1},
    ):
        with pytest.raises(ConfigError, match=r"media_io_kwargs\.video"):
            MediaOptions.of(None, {"video": wrong})


@pytest.mark.parametrize(
    "metadata",
    [{"fps": "x"}, {"fps": 0}, {"fps": float("nan")}, {"frames_indices": ["x", 1]}, {"frames_indices": [-1, 2]},
     {"frames_indices": [0, 1], "total_num_frames": 0}, {"frames_indices": 3}],
)  # fmt: skip
def test_metadata_that_is_refused(metadata: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="x: fps, frames_indices or total_num_frames is invalid"):
        processor(tmp_path).prepare((FRAMES[:2], metadata), "x")


def test_placeholders() -> None:
    """One for each video, or all."""
    part = ReadyImage((1, 1, 2), b"key", b"", (8, 16), is_encoded=False, is_whole=False)
    clips = [ReadyVideo([part, part], [0.0, 1.0], [0, 3]), ReadyVideo([part], [0.0], [0])]
    runs, whole = VideoRuns(9), [1, 9, 9, 9, 9, 2, 9, 9, 3]
    assert runs.written([1, 9, 2, 9, 3], clips, "x") == runs.written(whole, clips, "x") == whole
    placed = [(each.start, each.moment) for each in runs.placed(whole, clips)]
    assert placed == [(1, None), (3, 3), (6, None)]
    with pytest.raises(UserError, match=r"the prompt has 6 placeholders .token 9., and 2 videos of together 6 tokens"):
        runs.written([1, 9, 9, 9, 2, 9, 9, 9], clips, "x")
