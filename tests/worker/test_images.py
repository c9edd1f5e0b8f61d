"""Features of images that ranks deal out among themselves have the bits of one rank."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from quire.image_orders import EncodeSlice, ImageOrders
from quire.multimodal.preparing import Preparation
from quire.multimodal.processors import read_qwen_processor
from quire.parallel.interface import ProcessGroup
from quire.prompt_image import PromptImage
from quire.worker.images import ImageOverlays
from tests.models.harness import randomize, save
from tests.models.test_vision import tower
from tests.models.vision_models import PROCESSOR, qwen3_vl
from tests.multimodal.pictures import draw

SIZES = ((48, 24), (16, 40), (8, 8), (40, 24))


class Pair:
    """Broadcasts between two threads, which both have to call."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = [torch.empty(0)] * 2
        self.barrier = threading.Barrier(2, timeout=60)
        self.sources: list[int] = []

    def of(self, rank: int) -> ProcessGroup:
        return Half(self, rank)  # type: ignore[return-value]  # it only broadcasts


class Half:
    size = 2

    def __init__(self, pair: Pair, rank: int) -> None:
        self.pair, self.rank = pair, rank

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        pair = self.pair
        pair.sent[self.rank] = tensor
        pair.barrier.wait()
        assert pair.sent[0].shape == pair.sent[1].shape
        found = pair.sent[source].clone()
        pair.barrier.wait()
        if self.rank == 0:
            pair.sources.append(source)
        return found


def followed(overlays: ImageOverlays, plans: Sequence[ImageOrders]) -> dict[bytes, torch.Tensor]:
    for orders in plans:
        overlays._follow(orders)
    return overlays._kept


def ordered(images: Sequence[PromptImage], num_ranks: int) -> list[ImageOrders]:
    """Three layers of each image in one plan, the last one in the next; one image a rank."""
    plans = []
    for first in range(0, len(images), num_ranks):
        dealt = list(enumerate(images[first : first + num_ranks]))
        plans.append(ImageOrders([], [EncodeSlice(image.key, 3, image, rank) for rank, image in dealt]))
        plans.append(ImageOrders([], [EncodeSlice(image.key, 1, None, rank) for rank, image in dealt]))
    return plans


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_two_ranks_have_the_bits_of_one(backend: str, tmp_path: Path) -> None:
    path = save(randomize(qwen3_vl()), tmp_path)
    (path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    processor, encoders = read_qwen_processor(path), [tower(path, backend) for _ in range(3)]
    how = Preparation(processor, (255, 255, 255))
    images = [how.prepare(draw(number, size=size), "x").at(0) for number, size in enumerate(SIZES)]
    wanted = followed(ImageOverlays(encoders[0], processor, 100), ordered(images, 1))
    pair = Pair()
    ranks = [ImageOverlays(encoders[rank], processor, 100, pair.of(rank)) for rank in range(2)]
    begun: list[list[bytes]] = [[], []]
    for rank, overlays in enumerate(ranks):
        begin = overlays._begin
        overlays._begin = lambda image, r=rank, b=begin: (begun[r].append(image.key), b(image))[1]  # type: ignore
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda overlays: followed(overlays, ordered(images, 2)), ranks))
    keys = [image.key for image in images]
    assert begun == [keys[0::2], keys[1::2]], "each rank encodes images of its own"
    assert pair.sources == [0, 1, 0, 1]
    for kept in found:
        assert kept.keys() == wanted.keys()
        assert all(torch.equal(kept[key], wanted[key]) for key in keys)


def test_a_dropped_image_leaves_its_rank_free(tmp_path: Path) -> None:
    path = save(randomize(qwen3_vl()), tmp_path)
    (path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    processor = read_qwen_processor(path)
    how = Preparation(processor, (255, 255, 255))
    first, second = (how.prepare(draw(number, size=(16, 16)), "x").at(0) for number in range(2))
    overlays = ImageOverlays(tower(path), processor, 100)
    plans = [ImageOrders([], [EncodeSlice(first.key, 1, first)])]
    plans.append(ImageOrders([first.key], [EncodeSlice(second.key, 4, second)]))
    assert followed(overlays, plans).keys() == {second.key}
