"""Layouts of pipeline stages: the same groups and block ids, pages for the stage's layers only."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from quire.kv_cache.layout import KVCacheLayout, KVGroup


def _with_drafts(layers: range) -> range:
    return range(layers.start, sys.maxsize)  # a draft model's layers are behind the last stage's


def pages_of(groups: Sequence[KVGroup], layers: range) -> list[int]:
    """Indices of a block's pages that these layers use in any of the KV groups, ascending."""
    return sorted({page for group in groups for page, layer in enumerate(group.layers) if layer in layers})


def most_pages(groups: Sequence[KVGroup], stages: Sequence[range]) -> int:
    """Number of a block's pages in the pipeline stage that has the most. stages: layers of each stage."""
    *others, last = stages
    return max(len(pages_of(groups, layers)) for layers in (*others, _with_drafts(last)))


def layout_of_stage(layout: KVCacheLayout, layers: range, *, is_last: bool) -> KVCacheLayout:
    pages = pages_of(layout.groups, _with_drafts(layers) if is_last else layers)
    groups = tuple(
        replace(group, layers=tuple(group.layers[page] for page in pages if page < len(group.layers)))
        for group in layout.groups
    )
    return replace(layout, groups=groups, layers_per_group=len(pages))
