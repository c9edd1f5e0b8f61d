"""Copies of whole blocks, for copy-on-write: one batched order a step, all layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def copy_blocks(pages: Sequence[torch.Tensor], copies: Sequence[tuple[int, int]]) -> None:
    """Copy block `source` to block `destination` in every page tensor, for each (source, destination).

    pages[j]: [num_blocks, ...]. All sources are read before any destination is written; destinations are distinct.
    """
    sources, destinations = torch.tensor(copies, dtype=torch.int64).unbind(dim=1)
    for page in pages:
        page.index_copy_(0, destinations, page.index_select(0, sources))
