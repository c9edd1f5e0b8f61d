"""Copies of blocks against the plain twin: all sources are read before any destination is written."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels import reference
from quire.kernels.triton.block_copy import PageTable, copy_pages
from quire.worker.platform.device_step import copy_rounds

NUM_BLOCKS = 9


def pages_of(device: torch.device, page_bytes: int, num_pages: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(page_bytes)
    shape = (num_pages, NUM_BLOCKS, page_bytes)
    return list(torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(device).unbind(0))


def copy_within(pages: Sequence[torch.Tensor], copies: Sequence[tuple[int, int]]) -> None:
    """Copies of one step, as a device makes them: a launch for each round."""
    pool = PageTable.of_pages(pages)
    for pairs in copy_rounds(copies):
        copy_pages(pool, pool, torch.tensor(pairs, dtype=torch.int32, device=pages[0].device))


@pytest.mark.parametrize("page_bytes", [1, 6, 96, 16384 + 64])
@pytest.mark.parametrize(
    "pairs",
    [[(1, 2)], [(1, 2), (1, 3), (5, 4)], [(1, 2), (2, 3), (3, 4)], [(4, 5), (6, 7), (7, 2), (6, 8)]],
    ids=["one", "fan", "chain", "mixed"],
)
def test_like_the_plain_twin(page_bytes: int, pairs: list[tuple[int, int]], device: torch.device) -> None:
    pages = pages_of(device, page_bytes)
    expected = [page.clone() for page in pages]
    reference.copy_blocks(expected, pairs)
    copy_within(pages, pairs)
    assert all(torch.equal(page, wanted) for page, wanted in zip(pages, expected, strict=True))


@settings(max_examples=15)
@given(st.dictionaries(st.integers(0, NUM_BLOCKS - 1), st.integers(0, NUM_BLOCKS - 1), max_size=NUM_BLOCKS))
def test_any_copies(sources: dict[int, int]) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pairs = [(source, destination) for destination, source in sources.items() if source < destination]  # no circle
    pages = pages_of(device, 32, 1)
    expected = [page.clone() for page in pages]
    reference.copy_blocks(expected, pairs)
    copy_within(pages, pairs)
    assert torch.equal(pages[0], expected[0])


def test_pages_in_any_dtype(device: torch.device) -> None:
    pages = [torch.arange(NUM_BLOCKS * 2 * 4 * 3 * 5, device=device).to(torch.bfloat16).view(NUM_BLOCKS, 2, 4, 3, 5)]
    expected = pages[0].clone()
    expected[7] = expected[2]
    copy_within(pages, [(2, 7)])
    assert torch.equal(pages[0], expected)


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
    copy_within(pages, [])
    copy_pages(
        PageTable.of_pages(pages), PageTable.of_pages(pages), torch.empty(0, 2, dtype=torch.int32, device=device)
    )
    assert all(torch.equal(page, old) for page, old in zip(pages, before, strict=True))
