"""Layouts of pipeline stages: the same groups and block ids, pages for the stage's layers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quire.kv_cache.layout import KVCacheLayout, KVGroup


def pages_of(groups: Sequence[KVGroup], layers: range) -> list[int]:
    """Indices of a block's pages that these layers use in any of the KV groups, ascending."""
    return sorted({page for group in groups for page, layer in enumerate(group.layers) if layer in layers})


def most_pages(groups: Sequence[KVGroup], stages: Sequence[range]) -> int:
    """Number of a block's pages in the pipeline stage that has the most. stages: layers of each stage."""
    return max(len(pages_of(groups, layers)) for layers in stages)


def layout_of_stage(layout: KVCacheLayout, layers: range) -> KVCacheLayout:
    pages = pages_of(layout.groups, layers)
    groups = tuple(
        replace(group, layers=tuple(group.layers[page] for page in pages if page < len(group.layers)))
        for group in layout.groups
    )
    return replace(layout, groups=groups, layers_per_group=len(pages))
