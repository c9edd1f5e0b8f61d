"""The KV cache's memory on a device."""

from __future__ import annotations

import torch

from quire.errors import InsufficientMemoryError
from quire.kv_cache.layout import KVCacheLayout
from quire.utils.sizes import format_bytes


def allocate_device_pages(layout: KVCacheLayout, device: torch.device) -> list[torch.Tensor]:
    """`layers_per_group` tensors [num_blocks, page bytes] uint8, zero: what no block has held yet must be finite, since
    masked keys are multiplied as well. Raises InsufficientMemoryError."""
    page_bytes = layout.groups[0].spec.page_bytes(layout.block_size)
    shape = (layout.num_blocks, page_bytes)
    try:
        return [torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(layout.layers_per_group)]
    except torch.OutOfMemoryError:
        total = format_bytes(layout.num_blocks * layout.block_bytes)
        raise InsufficientMemoryError(
            f"the device has no room for {total} of KV cache ({layout.num_blocks} blocks); set kv_cache_memory or "
            "gpu_memory_utilization to less"
        ) from None
