"""The pool's tensors and block copies."""

from __future__ import annotations

import pytest
import torch

from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.kv_cache.spec import FullAttentionSpec, SlidingWindowSpec
from quire.worker.kv_tensors import allocate_pages, typed_pages
from quire.worker.platform.cpu_blocks import copy_blocks
from quire.worker.platform.host_memory import resident_memory


def test_an_int8_cache_stores_a_scale_for_each_key_and_value() -> None:
    groups, layers_per_group = group_layers([FullAttentionSpec(3, 8, 1, 4)])
    (page,) = allocate_pages(KVCacheLayout(4, 7, groups, layers_per_group))
    assert page.shape == (7, 4 * 2 * 3 * (8 + 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shape_dtype_and_zeros(dtype: torch.dtype) -> None:
    full, window = FullAttentionSpec(3, 8, dtype.itemsize), SlidingWindowSpec(3, 8, dtype.itemsize, window=4)
    groups, layers_per_group = group_layers([full, window, full, window])
    layout = KVCacheLayout(4, 7, groups, layers_per_group)
    pages = typed_pages(allocate_pages(layout), layout, dtype)
    assert len(pages) == 2
    for page in pages:
        assert page.shape == (7, 2, 4, 3, 8)
        assert page.dtype == dtype
        assert not page.any()


def test_untouched_blocks_cost_nothing() -> None:
    groups, layers_per_group = group_layers([FullAttentionSpec(2, 16, 4)])
    layout = KVCacheLayout(16, 2**19, groups, layers_per_group)
    assert layout.num_blocks * layout.block_bytes == 2**31
    before = resident_memory()
    pages = typed_pages(allocate_pages(layout), layout, torch.float32)
    pages[0][1234] = 1.0
    after = resident_memory()
    assert before is not None
    assert after is not None
    assert after - before < 2**26
    assert pages[0][1234].all()


def test_copies_are_one_batch_over_all_pages() -> None:
    pages = [torch.randn(6, 2, 4, 2, 3) for _ in range(3)]
    before = [page.clone() for page in pages]
    copy_blocks(pages, [(1, 4), (1, 5), (4, 2)])
    for page, old in zip(pages, before, strict=True):
        assert torch.equal(page, old[[0, 1, 4, 3, 1, 1]])
