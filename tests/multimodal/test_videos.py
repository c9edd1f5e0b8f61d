"""Videos: frames, sizes and times are those of Transformers' processor; limits hold before frames are decoded."""

from __future__ import annotations

import json
import random
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor, smart_resize
from transformers.video_utils import VideoMetadata, read_video_pyav

from quire.config.media import MediaSize, VideoOptions
from quire.errors import ConfigError, UserError
from quire.multimodal import videos
from quire.multimodal.processors import read_qwen_processor
from quire.multimodal.sources import ImageLimits
from quire.multimodal.videos import VideoProcessor, decode_video, read_video_processor
from quire.tokenization.helpers import Helpers
from quire.tokenization.jobs import ReadLimits, Setup, TemplateLimits
from tests.models.vision_models import PROCESSOR
from tests.multimodal import clips
from tests.multimodal.clips import CODECS, recorded
from tests.multimodal.pictures import draw

FRAMES = [draw(seed, size=(32, 16)) for seed in range(9)]


def processor(directory: Path, options: VideoOptions | None = None, **values: Any) -> VideoProcessor:
    (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    (directory / "video_preprocessor_config.json").write_text(json.dumps(values))
    found = read_video_processor(directory, read_qwen_processor(directory), options or VideoOptions())
    assert found is not None
    return found


def test_sampled_frames(tmp_path: Path) -> None:
    chance, made = random.Random(1), processor(tmp_path)
    for _ in range(200):
        total, fps = chance.randint(1, 3000), chance.choice([1.0, 10.0, 23.976, 24.0, 60.0])
        asked = chance.choice([{"fps": chance.choice([0.5, 2, 4])}, {"num_frames": chance.randint(1, 60)}, {}])
        usual = {"fps": None if "num_frames" in asked else 2, "min_frames": 4, "max_frames": chance.choice([16, 768])}
        wanted = Qwen3VLVideoProcessor.sample_frames(
            SimpleNamespace(**usual), VideoMetadata(total_num_frames=total, fps=fps), **asked
        )
        own = {"fps": asked.get("fps"), "num_frames": asked.get("num_frames")} if asked else {"fps": 2.0}
        found = msgspec.structs.replace(made, max_frames=usual["max_frames"], **own)
        assert found.sample(total, fps) == wanted.tolist()


def test_sizes(tmp_path: Path) -> None:
    """Also of frames smaller than a token."""
    chance, made = random.Random(2), processor(tmp_path)
    made = msgspec.structs.replace(made, image=msgspec.structs.replace(made.image, max_pixels=10**6), min_pixels=64)
    for _ in range(300):
        count, height, width = chance.randint(2, 40), chance.randint(3, 90), chance.randint(3, 90)
        least, most = chance.choice([64, 4096, 60_000]), chance.choice([60_001, 100_000, 10**6])
        found = msgspec.structs.replace(made, min_pixels=least, max_pixels=most)
        wanted = smart_resize(count, height, width, factor=8, min_pixels=least, max_pixels=most)
        assert found.target_size(count, height, width, "") == wanted
    capped = processor(tmp_path, size={"shortest_edge": 64, "longest_edge": 10**6}, cap_pixels_per_frame=True,
                       max_video_tokens=9)  # fmt: skip
    assert made.target_size(1, 32, 32, "") == (32, 32), "one frame, which Transformers refuses, is not shrunk"
    assert capped.target_size(4, 80, 80, "") == smart_resize(4, 80, 80, factor=8, min_pixels=64, max_pixels=4 * 9 * 64)


def test_a_part_has_no_more_tokens_than_an_image(tmp_path: Path) -> None:
    """The memory for the tower is planned for images (`ImageProcessor.max_tokens`)."""
    chance, made = random.Random(3), processor(tmp_path, size={"shortest_edge": 64, "longest_edge": 10**6})
    for _ in range(300):
        most = chance.choice([64, 900, 1600])
        found = msgspec.structs.replace(made, image=msgspec.structs.replace(made.image, max_pixels=most))
        height, width = (round(8 * 200 ** chance.random()) for _ in range(2))
        rows, columns = (edge // 8 for edge in found.target_size(chance.randint(1, 9), height, width, ""))
        assert rows * columns <= found.image.max_tokens
        assert rows * columns * 64 <= most or 1 in (rows, columns)


def test_sizes_that_are_planned(tmp_path: Path) -> None:
    """A video of the size is taken, longer ones and larger frames are refused; what the model itself bounds is free."""
    made = processor(tmp_path, size={"shortest_edge": 64, "longest_edge": 10**6})
    made = msgspec.structs.replace(made, image=msgspec.structs.replace(made.image, max_pixels=10**6))
    found = made.limited(MediaSize(width=48, height=32, num_frames=5))
    assert (found.most_sized_tokens, found.most_part_tokens) == (3 * 24, 24)
    assert found.target_size(5, 32, 48, "x") == found.target_size(6, 32, 48, "x") == (32, 48)
    assert found.target_size(5, 48, 32, "x") == (48, 32)
    with pytest.raises(UserError, match=r"x: a video of 96 tokens is larger than the 72 that"):
        found.target_size(7, 32, 48, "x")
    with pytest.raises(UserError, match=r"x: a run of 2 frames of 30 tokens is larger than the 24 that"):
        found.target_size(2, 40, 48, "x")
    assert made.limited(MediaSize()) is made
    assert made.limited(MediaSize(width=2000, height=1000)).target_size(4, 480, 640, "x") == (432, 576)
    with pytest.raises(ConfigError, match="200 times"):
        made.limited(MediaSize(width=1, height=900))


@pytest.mark.parametrize("kind", CODECS)
def test_decoded_frames(kind: str, tmp_path: Path) -> None:
    data = recorded(FRAMES, kind)
    made = processor(tmp_path, fps=5, size={"shortest_edge": 64, "longest_edge": 4096})
    path = tmp_path / f"clip.{kind}"
    path.write_bytes(data)
    wanted, _ = read_video_pyav(str(path), lambda metadata, **_: np.array(made.sample(len(FRAMES), 10.0)))
    frames, seconds, _ = decode_video(data, "x", made)
    assert seconds == [index / 10 for index in (0, 3, 5, 8)]
    assert np.array_equal(np.stack(frames), wanted)
    assert np.array_equal(frames[1], np.asarray(FRAMES[3])) == (kind == "matroska"), "which loses nothing"
    ready = made.prepare(data, "x")
    assert [part.num_tokens for part in ready.parts] == [8, 8]
    assert ready.seconds == pytest.approx([0.15, 0.65])


def test_frames_are_resized_as_they_are_decoded(tmp_path: Path) -> None:
    """So no more is kept than the processor's pixels, whatever the file's."""
    made = processor(tmp_path, fps=10, size={"shortest_edge": 64, "longest_edge": 9 * 128})
    frames, *_ = decode_video(recorded([draw(seed, size=(64, 32)) for seed in range(9)]), "x", made)
    assert [frame.shape for frame in frames] == [(8, 16, 3)] * 9
    assert all(frame.base is None for frame in frames), "none is a view of a decoded frame"


def test_frames_that_are_not_shown_are_not_counted(tmp_path: Path) -> None:
    """Those before an edit list's begin, and VP8's hidden ones: the others are sampled as if there were no more."""

    def begin_at_the_third(number: int, packet: Any) -> bytes:
        packet.pts, packet.dts = packet.pts - 2 * packet.duration, packet.dts - 2 * packet.duration
        return bytes(packet)

    def hide_the_fifth(number: int, packet: Any) -> bytes:
        first, *others = bytes(packet)
        return bytes([first & ~0x10 if number == 4 else first, *others])

    made = processor(tmp_path, fps=None, size={"shortest_edge": 64, "longest_edge": 9 * 512})
    for kind, change, shown in (("mp4", begin_at_the_third, 7), ("webm", hide_the_fifth, 8)):
        frames, seconds, _ = decode_video(clips.changed(recorded(FRAMES, kind), kind, change), "x", made)
        assert seconds == [index / 10 for index in range(shown)], kind
        wanted, *_ = decode_video(recorded(FRAMES, kind), "x", made)
        places = range(2, 9) if kind == "mp4" else [0, 1, 2, 3, 5, 6, 7, 8]
        assert np.array_equal(np.stack(frames[:4]), np.stack([wanted[place] for place in places[:4]])), kind


def test_the_last_frame_stands_for_those_that_the_end_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is cut off, and packets of which the decoder makes fewer frames."""
    made = processor(tmp_path, fps=None, size={"shortest_edge": 64, "longest_edge": 20 * 512})
    whole = recorded(FRAMES, "avi")
    frames, seconds, _ = decode_video(whole[: whole.rindex(b"00dc", 0, whole.index(b"idx1")) + 40], "x", made)
    assert seconds == [index / 10 for index in range(8)]
    monkeypatch.setattr(videos, "_num_frames", lambda packets, codec: 12)
    frames, seconds, _ = decode_video(recorded(FRAMES, "matroska"), "x", made)
    assert seconds == [index / 10 for index in (0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8)]
    assert np.array_equal(frames[-1], np.asarray(FRAMES[8]))


def test_frames_of_other_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turned as a phone's file says, and refused if they change, or before there is room for a frame over the limit."""
    file, made = bytearray(recorded(FRAMES)), processor(tmp_path, size={"shortest_edge": 64, "longest_edge": 9 * 512})
    upright, *_ = decode_video(bytes(file), "x", made)
    for matrix, turns in (((0, 1, -1, 0), 3), ((-1, 0, 0, -1), 2), ((0, -1, 1, 0), 1)):
        one, two, three, four = (each * 2**16 for each in matrix)
        struct.pack_into(">9i", file, file.find(b"tkhd") + 44, one, two, 0, three, four, 0, 0, 0, 2**30)
        turned, *_ = decode_video(bytes(file), "x", made)
        assert np.array_equal(np.stack(turned), np.rot90(np.stack(upright), turns, axes=(1, 2)))
        assert made.prepare(bytes(file), "x").parts[0].grid == ((1, 4, 2) if turns % 2 else (1, 2, 4))
    larger = next(clips.packets(recorded([draw(1, size=(64, 32))], "webm")))
    data = clips.changed(
        recorded(FRAMES, "webm"), "webm", lambda number, packet: larger if number == 4 else bytes(packet)
    )
    with pytest.raises(UserError, match="x: frames of a video must have one size"):
        decode_video(data, "x", made)
    monkeypatch.setattr(videos, "VIDEO_LIMITS", ImageLimits(max_pixels=600, kind="video"))
    with pytest.raises(UserError, match="x: the video is damaged or cut off"):
        decode_video(data, "x", made)


def test_counting_ends_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(videos, "MOST_FRAMES", 3)
    packets = iter([SimpleNamespace(size=size, is_discard=False, is_corrupt=False) for size in (0, 1, 1, 1, 1, 1, 1)])
    assert videos._num_frames(packets, "h264") == 4
    assert len(list(packets)) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_a_file_that_states_too_many_packets_fills_no_memory(tmp_path: Path) -> None:
    """80 million packets, for each of which FFmpeg takes 24 bytes when it opens the file."""
    file, made = bytearray(recorded(FRAMES)), processor(tmp_path)
    for box, place, values in (
        (b"stsz", 8, (1, 80_000_000)),
        (b"stsc", 16, (80_000_000,)),
        (b"stts", 12, (80_000_000,)),
    ):
        struct.pack_into(f">{len(values)}I", file, file.find(box) + place, *values)
    helpers = Helpers(Setup({}, {}, TemplateLimits()))
    try:
        argument = msgspec.json.encode(videos.VideoJob(made, "x")).decode()
        limits = ReadLimits(videos.VIDEO_SECONDS, made.most_memory)
        # What was taken before the limit was set counts beside it.
        assert int(helpers.read(f"{clips.__name__}:growth", argument, [bytes(file)], limits)) <= made.most_memory
    finally:
        helpers.close()


def test_files_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, data = processor(tmp_path), recorded(FRAMES)

    def refusal(given: bytes) -> str:
        with pytest.raises(UserError) as caught:
            made.prepare(given, "x")
        assert caught.value.param == "x"
        return str(caught.value)

    assert "of an unknown format" in refusal(b"#EXTM3U\nfile:///etc/passwd\n")
    assert "damaged" in refusal(data[: len(data) // 2])
    assert "damaged" in refusal(b"RIFF\0\0\0\0AVI " + bytes(100))
    for name, limit, message in (
        ("MOST_FRAMES", 8, "the video has more than 8 frames, the limit"),
        ("MOST_SECONDS", 0.5, "the video has more than 0.5 seconds, the limit"),
        ("MOST_DECODED", 9 * 32 * 16 - 1, "more than 4607 pixels in all frames, the limit"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(f"quire.multimodal.videos.{name}", limit)
            assert message in refusal(data)
    monkeypatch.setitem(sys.modules, "av", None)
    assert "videos need PyAV: pip install -e '.[videos]'" in refusal(data)


def test_a_processor_that_differs_from_that_of_images_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps({"image_mean": [0.4, 0.4, 0.4]}))
    assert read_video_processor(tmp_path, read_qwen_processor(tmp_path), VideoOptions()) is None
