"""How layers share one pool of blocks: layers of a kind form groups of equal size, a block serves one group.

A physical block is `layers_per_group` pages. Page j of a block lies in tensor j, so layer number j of every group
uses tensor j: a model with full and sliding layers has one pool, and a block freed by one kind serves the other.
All pages have the same number of bytes. Kinds that keep more or fewer bytes of a token get blocks of fewer or more
tokens, so that their pages are nearly equal; what is left of a page is padding. When the kinds' layer counts do not
divide, the last group of a kind leaves some pages of its blocks unused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, lcm

from quire.kv_cache.spec import LayerSpec

NULL_BLOCK = 0
"""Block 0 is never handed out: table entries outside a sliding window point to it."""

PADDING_GOAL = 0.05
"""Of the pages' bytes. Larger pages would have less padding, but leave more slots of a sequence's last block empty."""
MOST_GROWTH = 8
"""Most times that a page is larger than it must be."""
ALIGNMENT = 64
"""Bytes. Pages of different kinds are padded to a multiple of it, as they hold arrays of different dtypes."""


@dataclass(frozen=True)
class KVGroup:
    """Layers that share a block table. `layers[j]` uses page j of the group's blocks.

    block_size: tokens of a block; of a group of states, tokens from one snapshot to the next. page_bytes: bytes of a
    page that a layer of this group uses.
    """

    spec: LayerSpec
    layers: tuple[int, ...]
    block_size: int
    page_bytes: int


@dataclass(frozen=True)
class KVCacheLayout:
    """The pool: `num_blocks` blocks (block 0 reserved) of `layers_per_group` pages, and the groups that use them.

    block_size: tokens, the option: every group's block size is a multiple of it. num_host_blocks: blocks of the same
    shape in host memory, numbered from 1, for swapped requests. 0: none.
    """

    block_size: int
    num_blocks: int
    groups: tuple[KVGroup, ...]
    layers_per_group: int
    num_host_blocks: int = 0

    @property
    def page_bytes(self) -> int:
        """Bytes of every page of the pool, padding included."""
        return page_bytes(self.groups)

    @property
    def block_bytes(self) -> int:
        return block_bytes(self.groups, self.layers_per_group)

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1

    def page_of_layer(self, layer: int) -> tuple[int, int]:
        """(group index, page index) of a layer."""
        for index, group in enumerate(self.groups):
            if layer in group.layers:
                return index, group.layers.index(layer)
        raise KeyError(f"layer {layer} has no KV cache")


def page_bytes(groups: Sequence[KVGroup]) -> int:
    """Bytes of every page: the largest that a group uses, aligned where groups use different numbers."""
    sizes = {group.page_bytes for group in groups} or {0}
    return max(sizes) if len(sizes) == 1 else _aligned(max(sizes))


def block_bytes(groups: Sequence[KVGroup], layers_per_group: int) -> int:
    """Bytes of one physical block over all its pages."""
    return layers_per_group * page_bytes(groups)


def group_layers(specs: Sequence[LayerSpec], block_size: int) -> tuple[tuple[KVGroup, ...], int]:
    """Partition layers (by index) into groups of one kind and equal size; return them and the size.

    block_size: tokens. Groups get multiples of it: itself where all kinds keep as many bytes of a token. Without specs
    there are no groups: nothing is kept. The size is
    the greatest common divisor of the kinds' layer counts if that is at least half of the smallest count, else the
    smallest count.
    """
    if not specs:
        return (), 0
    kinds: dict[LayerSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        kinds.setdefault(spec, []).append(layer)
    sizes = _block_sizes({spec: len(layers) for spec, layers in kinds.items()}, block_size)
    counts = [len(layers) for layers in kinds.values()]
    size = gcd(*counts)
    if 2 * size < min(counts):
        size = min(counts)
    groups = [
        KVGroup(spec, tuple(layers[start : start + size]), sizes[spec], spec.page_bytes(sizes[spec]))
        for spec, layers in kinds.items()
        for start in range(0, len(layers), size)
    ]
    return tuple(groups), size


def _block_sizes(counts: Mapping[LayerSpec, int], block_size: int) -> dict[LayerSpec, int]:
    """Tokens of a block for each kind. counts: layers of the kind.

    Takes the smallest pages with at most PADDING_GOAL of padding; where no size reaches it, those with the least.
    """
    of_tokens = {spec: spec.token_bytes * block_size for spec in counts if spec.token_bytes}
    states = [spec.page_bytes(block_size) for spec in counts if not spec.token_bytes]
    least = max([*of_tokens.values(), *states])
    widths = {least} if len({*of_tokens.values(), *states}) == 1 else _page_widths(least, set(of_tokens.values()))
    best, best_padding = least, 1.0
    for width in sorted(widths):
        used = sum(count * (width - width % of_tokens[spec]) for spec, count in counts.items() if spec in of_tokens)
        used += sum(count * spec.page_bytes(block_size) for spec, count in counts.items() if spec not in of_tokens)
        padding = 1 - used / (width * sum(counts.values()))
        if padding < best_padding:
            best, best_padding = width, padding
        if padding <= PADDING_GOAL:
            break
    sizes = {spec: best // quantum * block_size for spec, quantum in of_tokens.items()}
    boundary = lcm(*sizes.values()) if sizes else block_size
    # A snapshot is of use only where all other groups have full blocks.
    return sizes | {spec: -(-spec.snapshot_interval // boundary) * boundary for spec in counts if spec not in of_tokens}


def _page_widths(least: int, quanta: Iterable[int]) -> set[int]:
    """Page sizes that fit a multiple of some kind's smallest page (bytes) exactly, and the least one."""
    widths = {_aligned(least)}
    for quantum in quanta:
        multiples = range(-(-least // quantum) * quantum, MOST_GROWTH * least + 1, quantum)
        widths.update(_aligned(width) for width in multiples)
    return widths


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
