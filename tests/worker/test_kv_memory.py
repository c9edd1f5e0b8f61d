"""The pool's tensors and block copies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.errors import InsufficientMemoryError
from quire.kv_cache.layout import KVCacheLayout, group_layers
from quire.kv_cache.spec import AttentionSpec, LatentSpec, LayerSpec, SlidingWindowSpec, StateSpec
from quire.worker import kv_tensors
from quire.worker.kv_tensors import allocate_pages, layer_pages, state_pages
from quire.worker.platform.cpu import CpuPlatform
from quire.worker.platform.cpu_blocks import copy_blocks
from quire.worker.platform.host_memory import resident_memory


def test_an_int8_cache_stores_a_scale_for_each_key_and_value() -> None:
    groups, layers_per_group = group_layers([AttentionSpec(3, 8, 8, 1, 4)], 4)
    (page,) = allocate_pages(KVCacheLayout(4, 7, groups, layers_per_group))
    assert page.shape == (7, 4 * 2 * 3 * (8 + 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shape_dtype_and_zeros(dtype: torch.dtype) -> None:
    full, window = AttentionSpec(3, 8, 8, dtype.itemsize), SlidingWindowSpec(3, 8, 8, dtype.itemsize, window=4)
    groups, layers_per_group = group_layers([full, window, full, window], 4)
    layout = KVCacheLayout(4, 7, groups, layers_per_group)
    pages = layer_pages(allocate_pages(layout), layout, dtype)
    assert [pages[layer].data_ptr() for layer in (0, 2)] == [pages[layer].data_ptr() for layer in (1, 3)]
    for page in pages.values():
        assert page.shape == (7, 2, 4, 3, 8)
        assert page.dtype == dtype
        assert not page.any()


def test_untouched_blocks_cost_nothing() -> None:
    groups, layers_per_group = group_layers([AttentionSpec(2, 16, 16, 4)], 16)
    layout = KVCacheLayout(16, 2**19, groups, layers_per_group)
    assert layout.num_blocks * layout.block_bytes == 2**31
    before = resident_memory()
    pages = layer_pages(allocate_pages(layout), layout, torch.float32)
    pages[0][1234] = 1.0
    after = resident_memory()
    assert before is not None
    assert after is not None
    assert after - before < 2**26
    assert pages[0][1234].all()


def test_a_prefaulted_pool_is_in_memory_from_the_start(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups, layers_per_group = group_layers([AttentionSpec(2, 16, 16, 4)] * 3, 16)
    layout = KVCacheLayout(16, 2**12, groups, layers_per_group)
    size = layout.num_blocks * layout.block_bytes
    platform = CpuPlatform(resolve(EngineOptions(model=str(model_path), num_threads=2, prefault_kv_cache=True)))
    before = resident_memory()
    with torch.inference_mode():  # as in the worker
        pages = platform.allocate_pages(layout)
    after = resident_memory()
    assert before is not None
    assert after is not None
    assert after - before > 0.9 * size
    assert not any(page.any() for page in pages)
    monkeypatch.setattr(kv_tensors, "available_memory", lambda: size - 1)
    with pytest.raises(InsufficientMemoryError, match=r"prefault_kv_cache: the KV cache takes 48\.0 MiB"):
        platform.allocate_pages(layout)


def test_copies_are_one_batch_over_all_pages() -> None:
    pages = [torch.randn(6, 2, 4, 2, 3) for _ in range(3)]
    before = [page.clone() for page in pages]
    copy_blocks(pages, [(1, 4), (1, 5), (4, 2)])
    for page, old in zip(pages, before, strict=True):
        assert torch.equal(page, old[[0, 1, 4, 3, 1, 1]])


def fill(views: list[torch.Tensor], block: int, start: int) -> torch.Tensor:
    """Distinct values in one block of every view; returns them."""
    values = torch.arange(start, start + views[0][block].numel() * len(views), dtype=torch.float32)
    values = (values % 251).to(views[0].dtype).view(len(views), *views[0].shape[1:])
    for view, content in zip(views, values, strict=True):
        view[block] = content
    return values


@pytest.mark.parametrize(
    ("specs", "shapes"),
    [
        ((AttentionSpec(4, 8, 8, 2), AttentionSpec(1, 8, 8, 2)), [(1, 2, 16, 4, 8), (4, 2, 16, 1, 8)]),
        ((LatentSpec(40, 2), AttentionSpec(2, 8, 8, 2)), [(4, 16, 40), (5, 2, 16, 2, 8)]),
        ((AttentionSpec(2, 24, 16, 2), StateSpec(20000)), [(8, 16, 2, 40), (20000,)]),
    ],
)
def test_groups_see_the_same_pages_in_their_own_shape(
    specs: tuple[LayerSpec, ...], shapes: list[tuple[int, ...]]
) -> None:
    """Block sizes 16 and 64, a latent beside full attention, and a state: each group writes blocks of its own, one or
    several of the kernels' blocks each, and a copy of a block carries the whole page of every layer."""
    groups, layers_per_group = group_layers(specs * 2, 16)
    layout = KVCacheLayout(16, 7, groups, layers_per_group)
    pages = allocate_pages(layout)
    assert [page.shape for page in pages] == [(7, layout.page_bytes)] * 2
    assert sum(page.numel() for page in pages) == layout.num_blocks * layout.block_bytes
    by_layer = layer_pages(pages, layout, torch.bfloat16) | state_pages(pages, layout)
    views = [
        [
            by_layer[layer].unflatten(0, (layout.num_blocks, -1)) if group.spec.token_bytes else by_layer[layer]
            for layer in group.layers
        ]
        for group in groups
    ]
    assert [[view.shape[1:] for view in group] for group in views] == [[shape] * 2 for shape in shapes]
    written = [fill(group, block, 100 * block) for block, group in enumerate(views, 1)]
    copy_blocks(pages, [(1, 5), (2, 6)])
    for (block, copy), group, content in zip(((1, 5), (2, 6)), views, written, strict=True):
        for view, expected in zip(group, content, strict=True):
            assert torch.equal(view[block], expected)
            assert torch.equal(view[copy], expected)
    assert not any(page[[0, 3, 4]].any() for page in pages)
