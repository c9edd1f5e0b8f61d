"""Positions of prompts with images are Transformers', and so are keys of blocks by content and place."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.multimodal.positions import ROTARY_COLUMNS, image_keys, rotary_shift, rotary_values, with_positions
from quire.prompt_image import PromptImage, ReadyImage
from tests.models.vision_models import qwen2_5_vl, qwen3_vl, rotary_positions

Grid = tuple[int, int, int]


def images_at(layout: list[int | Grid]) -> tuple[list[PromptImage], int]:
    """Images between runs of text, and the prompt's number of tokens."""
    images: list[PromptImage] = []
    place = 0
    for part in layout:
        if isinstance(part, int):
            place += part
            continue
        images.append(PromptImage(part, bytes([len(images)]), b"", (1, 1), False, False, place))
        place = images[-1].end
    return images, place


@pytest.mark.parametrize(
    "layout",
    [
        [5, (1, 2, 7), 4],
        [(1, 6, 3), 2],
        [1, (1, 1, 1), 1, (1, 4, 4), 2, (1, 9, 2), 30, (1, 2, 2), 1],
    ],
)
def test_positions_are_those_of_transformers(layout: list[int | Grid]) -> None:
    images, length = images_at(layout)
    token_ids = torch.full((1, length), 5)
    types = torch.zeros(1, length, dtype=torch.int32)
    for image in images:  # with text between two: Transformers takes neighbours as one
        types[0, image.start : image.end] = 1
    grids = torch.tensor([(frames, 2 * rows, 2 * columns) for frames, rows, columns in (each.grid for each in images)])
    expected, shift = qwen3_vl().model.get_rope_index(token_ids, types, image_grid_thw=grids)
    assert rotary_shift(images) == int(shift)
    lists = rotary_values(images)
    for axis, name in enumerate(ROTARY_COLUMNS):
        start, end = lists[name].start, lists[name].end
        assert (start, end) == (images[0].start, images[-1].end)
        assert lists[name].values == expected[axis, 0, start:end].tolist()
        assert expected[axis, 0, :start].tolist() == list(range(start))
        assert expected[axis, 0, end:].tolist() == [place + int(shift) for place in range(end, length)]


@pytest.mark.parametrize(
    ("layout", "interval"),
    [
        ([5, (3, 2, 5), 4], 2.0),
        ([5, (4, 2, 5), 3, (1, 3, 2), 2, (2, 2, 2), 6], 1.25),
        ([(9, 3, 1), 1, (6, 2, 3), 4], 0.3),
        ([5, (4, 2, 3), 2, (1, 4, 2), 1, (3, 1, 1), 7], 12.5),
    ],
)
def test_times_of_a_video(layout: list[int | Grid], interval: float) -> None:
    """Transformers' where no time outgrows rows and columns, and with text behind the largest position where one does.
    (1, ...) is an image."""
    images, spans, place = [], [], 0
    for part in layout:
        if isinstance(part, int):
            place += part
            continue
        for number in range(part[0]):
            moment = int(np.float32(number) * np.float32(interval)) if number else None
            image = ReadyImage((1, *part[1:]), bytes([len(images)]), b"", (1, 1), is_encoded=False, is_whole=False)
            images.append(image.at(place, moment))
            place = images[-1].end
        spans.append((part, place))
    types = torch.zeros(1, place, dtype=torch.int32)
    grids: dict[int, list[Grid]] = {1: [], 2: []}
    for (frames, rows, columns), end in spans:
        kind = 1 if frames == 1 else 2
        types[0, end - frames * rows * columns : end] = kind
        grids[kind].append((frames, 2 * rows, 2 * columns))
    model = qwen2_5_vl(tokens_per_second=2)
    expected, shift = rotary_positions(model, types, grids, [interval] * len(grids[2]))
    if interval < 2.5:
        given = {1: "image_grid_thw", 2: "video_grid_thw"}
        options = {given[kind]: torch.tensor(each) for kind, each in grids.items() if each}
        seconds = torch.tensor([interval / 2] * len(grids[2]))
        theirs = model.model.get_rope_index(types.long(), types, **options, second_per_grid_ts=seconds)
        assert torch.equal(theirs[0], expected)
        assert torch.equal(theirs[1], shift)
    assert rotary_shift(images) == int(shift)
    for axis, each in enumerate(rotary_values(images).values()):
        assert each.values == expected[axis, 0, each.start : each.end].tolist()
        assert expected[axis, 0, each.end :].tolist() == [number + int(shift) for number in range(each.end, place)]


def test_values_of_a_request_stay() -> None:
    assert with_positions([], {"segments": 3}, {}) == ({"segments": 3}, {})
    columns, lists = with_positions(images_at([2, (1, 2, 2), 1])[0], {"segments": 3}, {})
    assert columns == {"segments": 3, **dict.fromkeys(ROTARY_COLUMNS, -2)}
    assert set(lists) == set(ROTARY_COLUMNS)


def test_keys_are_of_blocks_with_placeholders() -> None:
    """By content, and by place in the block: one image that begins a token later is another content."""
    images, _ = images_at([6, (1, 2, 5), 1, (1, 1, 1), 9])
    keys = list(image_keys(images, 4))
    assert [block for block, _ in keys] == [1, 2, 3, 4]
    assert len({key for _, key in keys}) == 4
    later, _ = images_at([7, (1, 2, 5)])
    assert {key for _, key in image_keys(later, 4)}.isdisjoint(key for _, key in keys)
    moved, _ = images_at([10, (1, 2, 5)])
    assert [key for _, key in image_keys(moved, 4)] == [key for _, key in keys[:3]]
    assert next(iter(image_keys(images_at([6, (1, 2, 5)])[0], 4))) == keys[0]
    (timed,) = (image.at(6, 3) for image in images[:1])
    assert {key for _, key in image_keys([timed], 4)}.isdisjoint(key for _, key in keys), "its rotary time is content"
