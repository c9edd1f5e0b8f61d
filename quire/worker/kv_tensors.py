"""The pools' memory: one tensor per page of a block, on the device and, for swapped requests, on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.errors import ConfigError, InsufficientMemoryError
from quire.kernels.cpu.memory import allocate
from quire.kv_cache.layout import KVCacheLayout, KVGroup
from quire.utils.sizes import format_bytes


def allocate_pages(layout: KVCacheLayout) -> list[torch.Tensor]:
    """`layers_per_group` tensors [num_blocks, page bytes] uint8, zero. The attention back
    end decides what a page's bytes mean.

    On a CPU the memory is only reserved: the system backs it, by huge pages, when a block is first written, so a
    pool that is larger than the load needs costs nothing. Raises InsufficientMemoryError if even reserving it fails.
    """
    return _reserve(layout, layout.num_blocks, "the KV cache", "kv_cache_memory")


def allocate_host_pages(layout: KVCacheLayout) -> list[torch.Tensor]:
    """The page tensors of the host pool, of `num_host_blocks` blocks and an unused block 0, as `allocate_pages`."""
    return _reserve(layout, layout.num_host_blocks + 1, "swapped requests", "swap_space")


def _reserve(layout: KVCacheLayout, num_blocks: int, purpose: str, option: str) -> list[torch.Tensor]:
    page_bytes = layout.page_bytes
    try:
        return [allocate(num_blocks * page_bytes).view(num_blocks, page_bytes) for _ in range(layout.layers_per_group)]
    except InsufficientMemoryError:
        total = format_bytes(layout.layers_per_group * num_blocks * page_bytes)
        raise InsufficientMemoryError(
            f"the system refuses to reserve {total} for {purpose} ({num_blocks} blocks); set {option} to less"
        ) from None


def typed_pages(pages: Sequence[torch.Tensor], layout: KVCacheLayout, dtype: torch.dtype) -> list[torch.Tensor]:
    """Views of the pages for a back end that reads all groups alike: [num_blocks, 2, block_size, num_kv_heads,
    head_dim]. Raises ConfigError where groups have pages of different shapes."""
    group, *others = layout.groups
    shape = group.spec.page_shape(group.block_size)
    if any(other.spec.page_shape(other.block_size) != shape for other in others):
        raise ConfigError("the attention back end takes pages of one shape, and this model's KV groups have several")
    return group_pages(pages, group, dtype)


def group_pages(pages: Sequence[torch.Tensor], group: KVGroup, dtype: torch.dtype) -> list[torch.Tensor]:
    """Views of the pages as one group uses them: for each of its layers [num_blocks, *spec.page_shape(block_size)],
    without the padding. dtype: of stored elements; torch.uint8 for states."""
    shape = group.spec.page_shape(group.block_size)
    used = [page[:, : group.page_bytes].view(dtype) for page in pages[: len(group.layers)]]
    return [page.unflatten(1, shape) for page in used]
