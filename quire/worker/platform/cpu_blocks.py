"""Copies of whole blocks, for copy-on-write: one batched order a step, all layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch

if TYPE_CHECKING:
    from quire.kernels.cpu.runtime import NativeRuntime

BlockCopier: TypeAlias = Callable[[Sequence[tuple[int, int]]], None]
"""Copies block `source` to block `destination` in every page tensor, for each (source, destination). All sources are
read before any destination is written; destinations are distinct."""


def block_copier(pages: Sequence[torch.Tensor], runtime: NativeRuntime | None) -> BlockCopier:
    """pages[j]: [num_blocks, page bytes] uint8. runtime: the native kernels to copy with; None: plain torch."""
    if runtime is None:
        return lambda copies: copy_blocks(pages, copies)
    from quire.kernels.cpu import paged_attention

    pool, (num_blocks, page_bytes) = runtime.pool, pages[0].shape
    return lambda copies: paged_attention.copy_blocks(pool, pages, page_bytes, num_blocks, copies)


def copy_blocks(pages: Sequence[torch.Tensor], copies: Sequence[tuple[int, int]]) -> None:
    """The plain BlockCopier. pages[j]: [num_blocks, ...]."""
    sources, destinations = torch.tensor(copies, dtype=torch.int64).unbind(dim=1)
    for page in pages:
        page.index_copy_(0, destinations, page.index_select(0, sources))
