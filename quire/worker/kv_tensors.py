"""Memory of the KV pools: one tensor per page of a block."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.errors import InsufficientMemoryError
from quire.kernels.cpu.memory import allocate, touch
from quire.kv_cache.layout import KVCacheLayout
from quire.utils.sizes import format_bytes
from quire.worker.platform.host_memory import available_memory

STORED_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}
"""Torch dtype of a page's elements, by `kv_cache_dtype`."""


def allocate_pages(layout: KVCacheLayout) -> list[torch.Tensor]:
    """`layers_per_group` zeroed tensors [num_blocks, page bytes] uint8; the attention back end interprets them. Raises
    InsufficientMemoryError if reserving fails."""
    return _reserve(layout, layout.num_blocks, "the KV cache", "kv_cache_memory")


def prefault(pages: Sequence[torch.Tensor], num_threads: int) -> None:
    """Write to the pool's memory, so the system provides it now. Raises InsufficientMemoryError if the pool exceeds the
    available memory."""
    total, available = sum(page.nbytes for page in pages), available_memory()
    if total > available:
        raise InsufficientMemoryError(
            f"prefault_kv_cache: the KV cache takes {format_bytes(total)} of the {format_bytes(available)} that are "
            "available; set kv_cache_memory to less"
        )
    touch(pages, num_threads)


def allocate_host_pages(layout: KVCacheLayout) -> list[torch.Tensor]:
    """Page tensors of the host pool, with `num_host_blocks` blocks and an unused block 0."""
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


def layer_pages(pages: Sequence[torch.Tensor], layout: KVCacheLayout, dtype: torch.dtype) -> dict[int, torch.Tensor]:
    """Pool as each layer that keeps tokens uses it: [kernel blocks, *spec.page_shape(layout.block_size)] of
    `dtype`; a pool block is `layout.kernel_blocks` kernel blocks."""
    views: dict[int, torch.Tensor] = {}
    for group in layout.token_groups:
        num_blocks = layout.num_blocks * layout.kernel_blocks(group)
        shape = num_blocks, *group.spec.page_shape(layout.block_size)
        views |= {
            layer: page.view(-1).view(dtype).view(shape) for layer, page in zip(group.layers, pages, strict=False)
        }
    return views


def state_pages(pages: Sequence[torch.Tensor], layout: KVCacheLayout) -> dict[int, torch.Tensor]:
    """Pool as each layer with states uses it: [num_blocks, page bytes] uint8, without padding."""
    return {
        layer: page[:, : group.page_bytes]
        for group in layout.state_groups
        for layer, page in zip(group.layers, pages, strict=False)
    }
