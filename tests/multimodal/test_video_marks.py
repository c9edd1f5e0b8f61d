"""Marks and times of videos in prompts (Qwen3-VL): token ids are those of the text that has them written out."""

from __future__ import annotations

import pytest

from quire.errors import UserError
from quire.multimodal.video_marks import ReadyVideo, VideoMarks
from quire.prompt_image import ReadyImage

BEGIN, END, VIDEO = 7, 8, 9


class Times:
    """A tokenizer of times: 100 and ten times the seconds."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [100, round(10 * float(text.removeprefix("<").removesuffix(" seconds>")))]


def video(*counts: int) -> ReadyVideo:
    parts = [ReadyImage((1, 1, each), b"key", b"", (8, 8), is_encoded=False, is_whole=False) for each in counts]
    return ReadyVideo(parts, [0.5 + number for number in range(len(parts))], [])


WHOLE = [1, 100, 5, BEGIN, VIDEO, END, 2]


@pytest.mark.parametrize(
    ("token_ids", "videos", "wanted"),
    [
        ([1, VIDEO, 2], [video(1)], WHOLE),
        ([1, BEGIN, VIDEO, END, 2], [video(1)], WHOLE),
        (WHOLE, [video(1)], WHOLE),
        (WHOLE[3:], [video(1)], WHOLE[1:]),
        ([*WHOLE, *WHOLE[3:]], [video(1), video(1)], [*WHOLE, *WHOLE[1:]]),
        ([BEGIN, VIDEO, END], [video(2, 1)], [100, 5, BEGIN, VIDEO, VIDEO, END, 100, 15, BEGIN, VIDEO, END]),
    ],
)
def test_written(token_ids: list[int], videos: list[ReadyVideo], wanted: list[int]) -> None:
    marks = VideoMarks(VIDEO, BEGIN, END, Times())
    assert marks.written(token_ids, videos, "x") == wanted
    assert marks.written(wanted, videos, "x") == wanted, "nothing is written twice"
    without = VideoMarks(VIDEO, BEGIN, END, None)
    assert without.written(wanted, videos, "x") == wanted
    if len(videos[0].parts) > 1:
        with pytest.raises(UserError, match="the prompt needs all placeholders"):
            without.written(token_ids, videos, "x")
