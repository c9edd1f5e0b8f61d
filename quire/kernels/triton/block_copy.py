"""Copies of whole blocks in all page tensors: copy-on-write, and to and from a contiguous buffer (swapping). Limit:
memory bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.triton.runtime import launch

CHUNK_BYTES = 16384
"""Bytes of a page per program of 4 warps: eight 16-byte loads per thread."""
ALIGNMENT = 16


@triton.jit
def _copy_kernel(
    source_pages,
    destination_pages,
    pairs,
    source_stride,
    destination_stride,
    page_words,
    WORD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    pair = pairs + 2 * tl.program_id(0)
    page = tl.program_id(1)
    words = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    inside = words < page_words
    from_page = tl.multiple_of(tl.load(source_pages + page).to(tl.pointer_type(WORD)), 16)
    to_page = tl.multiple_of(tl.load(destination_pages + page).to(tl.pointer_type(WORD)), 16)
    from_block = from_page + tl.load(pair).to(tl.int64) * source_stride
    to_block = to_page + tl.load(pair + 1).to(tl.int64) * destination_stride
    tl.store(to_block + words, tl.load(from_block + words, mask=inside), mask=inside)


@dataclass(frozen=True, slots=True, eq=False)
class PageTable:
    """Places of pages, on one side of a copy. addresses: [num_pages] int64 on the device, of block 0's
    pages. block_bytes: distance to the next block. page_bytes: copied bytes per page. memory: kept alive."""

    addresses: torch.Tensor
    block_bytes: int
    page_bytes: int
    memory: tuple[torch.Tensor, ...]

    @classmethod
    def of_pages(cls, pages: Sequence[torch.Tensor]) -> PageTable:
        """Table of page addresses. pages[j]: [num_blocks, ...], contiguous, all alike. Waits for the device; make it
        once."""
        first = pages[0]
        assert all(page.is_contiguous() and page.shape == first.shape for page in pages), (
            "pages are alike, in one piece"
        )
        addresses = torch.tensor([page.data_ptr() for page in pages], dtype=torch.int64, device=first.device)
        page_bytes = first[0].nbytes
        return cls(addresses, page_bytes, page_bytes, tuple(pages))

    @classmethod
    def of_buffer(cls, buffer: torch.Tensor) -> PageTable:
        """Table of the pages in one buffer, [num_blocks, num_pages, page bytes] uint8, contiguous."""
        assert buffer.is_contiguous(), "a buffer lies in one piece"
        _, num_pages, page_bytes = buffer.shape
        start = buffer.data_ptr()
        addresses = torch.arange(
            start, start + num_pages * page_bytes, page_bytes, dtype=torch.int64, device=buffer.device
        )
        return cls(addresses, num_pages * page_bytes, page_bytes, (buffer,))

    @property
    def num_pages(self) -> int:
        return len(self.addresses)


def copy_pages(source: PageTable, destination: PageTable, pairs: torch.Tensor) -> None:
    """Copy all pages of the source's block pairs[i, 0] to the destination's pairs[i, 1], in any order: no block may be
    both read and written. pairs: [n, 2] int32 on the device, contiguous."""
    assert source.num_pages == destination.num_pages, "both have the same pages"
    assert source.page_bytes == destination.page_bytes, "of the same size"
    if not len(pairs):
        return
    word = _word(source, destination)
    chunk = min(triton.next_power_of_2(source.page_bytes), CHUNK_BYTES) // word.itemsize
    page_words = source.page_bytes // word.itemsize
    launch(
        _copy_kernel,
        (len(pairs), source.num_pages, triton.cdiv(page_words, chunk)),
        source.addresses,
        destination.addresses,
        pairs,
        source.block_bytes // word.itemsize,
        destination.block_bytes // word.itemsize,
        page_words,
        WORD=_TRITON_WORDS[word],
        CHUNK=chunk,
        num_warps=4,
    )


_TRITON_WORDS = {torch.int32: tl.int32, torch.int16: tl.int16, torch.int8: tl.int8}


def _word(*tables: PageTable) -> torch.dtype:
    """Widest integer type to copy in: it divides all strides (bytes)."""
    for word in _TRITON_WORDS:
        if all(size % word.itemsize == 0 for table in tables for size in (table.block_bytes, table.page_bytes)):
            return word
    raise AssertionError("every size is a multiple of one byte")
