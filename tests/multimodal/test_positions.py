"""Positions of prompts with images are Transformers', and so are keys of blocks by content and place."""

from __future__ import annotations

import pytest
import torch

from quire.multimodal.positions import ROTARY_COLUMNS, image_keys, rotary_shift, rotary_values, with_positions
from quire.prompt_image import PromptImage
from tests.models.vision_models import qwen3_vl

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
