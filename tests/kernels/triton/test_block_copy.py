"""Copies of blocks against the plain twin: all sources are read before any destination is written."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels import reference
from quire.kernels.triton.block_copy import BlockCopier, PageTable, copy_pages, gather_blocks, scatter_blocks

NUM_BLOCKS = 9


def pages_of(device: torch.device, page_bytes: int, num_pages: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(page_bytes)
    shape = (num_pages, NUM_BLOCKS, page_bytes)
    return list(torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(device).unbind(0))


def copier(pages: Sequence[torch.Tensor]) -> BlockCopier:
    return BlockCopier(pages, lambda array: torch.from_numpy(array).to(pages[0].device))


@pytest.mark.parametrize("page_bytes", [1, 6, 96, 16384 + 64])
@pytest.mark.parametrize(
    "pairs",
    [[(1, 2)], [(1, 2), (1, 3), (5, 4)], [(1, 2), (2, 3), (3, 4)], [(1, 2), (2, 1)], [(4, 5), (6, 7), (7, 6), (6, 8)]],
    ids=["one", "fan", "chain", "swap", "mixed"],
)
def test_like_the_plain_twin(page_bytes: int, pairs: list[tuple[int, int]], device: torch.device) -> None:
    pages = pages_of(device, page_bytes)
    expected = [page.clone() for page in pages]
    reference.copy_blocks(expected, pairs)
    copier(pages)(pairs)
    assert all(torch.equal(page, wanted) for page, wanted in zip(pages, expected, strict=True))


@settings(max_examples=15)
@given(st.dictionaries(st.integers(0, NUM_BLOCKS - 1), st.integers(0, NUM_BLOCKS - 1), max_size=NUM_BLOCKS))
def test_any_copies(sources: dict[int, int]) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pairs = [(source, destination) for destination, source in sources.items()]
    pages = pages_of(device, 32, 1)
    expected = [page.clone() for page in pages]
    reference.copy_blocks(expected, pairs)
    copier(pages)(pairs)
    assert torch.equal(pages[0], expected[0])


def test_pages_in_any_dtype(device: torch.device) -> None:
    pages = [torch.arange(NUM_BLOCKS * 2 * 4 * 3 * 5, device=device).to(torch.bfloat16).view(NUM_BLOCKS, 2, 4, 3, 5)]
    expected = pages[0].clone()
    expected[7] = expected[2]
    copier(pages)([(2, 7)])
    assert torch.equal(pages[0], expected)


def test_out_to_a_buffer_and_back(device: torch.device) -> None:
    pages = pages_of(device, 80)
    pool = PageTable.of_pages(pages)
    blocks = torch.tensor([4, 0, 7], dtype=torch.int32, device=device)
    buffer = gather_blocks(pool, blocks)
    assert torch.equal(buffer, torch.stack([page[blocks.long()] for page in pages], dim=1))
    back = torch.tensor([1, 2, 3], dtype=torch.int32, device=device)
    expected = [page.clone() for page in pages]
    for page in expected:
        page[1:4] = page[[4, 0, 7]]
    scatter_blocks(buffer, pool, back)
    assert all(torch.equal(page, wanted) for page, wanted in zip(pages, expected, strict=True))


def test_between_pools(device: torch.device) -> None:
    pages, others = pages_of(device, 48), pages_of(device, 48)
    before = [page.clone() for page in others]
    pairs = torch.tensor([[1, 5], [8, 0]], dtype=torch.int32, device=device)
    copy_pages(PageTable.of_pages(pages), PageTable.of_pages(others), pairs)
    for page, other, old in zip(pages, others, before, strict=True):
        assert torch.equal(other[[5, 0]], page[[1, 8]])
        assert torch.equal(other[[1, 2, 3, 4, 6, 7, 8]], old[[1, 2, 3, 4, 6, 7, 8]])


def test_nothing_to_copy(device: torch.device) -> None:
    pages = pages_of(device, 16)
    before = [page.clone() for page in pages]
    copier(pages)([])
    assert gather_blocks(PageTable.of_pages(pages), torch.empty(0, dtype=torch.int32, device=device)).numel() == 0
    assert all(torch.equal(page, old) for page, old in zip(pages, before, strict=True))


def test_uploads_once(device: torch.device) -> None:
    pages = pages_of(device, 16)
    uploads: list[np.ndarray] = []

    def upload(array: np.ndarray) -> torch.Tensor:
        uploads.append(array)
        return torch.from_numpy(array).to(device)

    BlockCopier(pages, upload)([(1, 2), (2, 3), (5, 6)])
    assert [array.dtype for array in uploads] == [np.int32]
    assert sorted(map(tuple, uploads[0].tolist())) == [(1, 2), (2, 3), (5, 6)]
