"""How layers share one pool of blocks: layers of a kind form groups of equal size, a block serves one group.

A physical block is `layers_per_group` pages. Page j of a block lies in tensor j, so layer number j of every group
uses tensor j: a model with full and sliding layers has one pool, and a block freed by one kind serves the other.
When the kinds' layer counts do not divide, the last group of a kind leaves some pages of its blocks unused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from quire.errors import ConfigError
from quire.kv_cache.spec import LayerSpec

NULL_BLOCK = 0
"""Block 0 is never handed out: table entries outside a sliding window point to it."""


@dataclass(frozen=True)
class KVGroup:
    """Layers that share a block table. `layers[j]` uses page j of the group's blocks."""

    spec: LayerSpec
    layers: tuple[int, ...]


@dataclass(frozen=True)
class KVCacheLayout:
    """The pool: `num_blocks` blocks (block 0 reserved) of `layers_per_group` pages, and the groups that use them.

    num_host_blocks: blocks of the same shape in host memory, numbered from 1, for swapped requests. 0: none.
    """

    block_size: int
    num_blocks: int
    groups: tuple[KVGroup, ...]
    layers_per_group: int
    num_host_blocks: int = 0

    @property
    def block_bytes(self) -> int:
        return block_bytes(self.groups, self.layers_per_group, self.block_size)

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1

    def page_of_layer(self, layer: int) -> tuple[int, int]:
        """(group index, page index) of a layer."""
        for index, group in enumerate(self.groups):
            if layer in group.layers:
                return index, group.layers.index(layer)
        raise KeyError(f"layer {layer} has no KV cache")


def block_bytes(groups: Sequence[KVGroup], layers_per_group: int, block_size: int) -> int:
    """Bytes of one physical block over all its pages."""
    return layers_per_group * groups[0].spec.page_bytes(block_size)


def group_layers(specs: Sequence[LayerSpec]) -> tuple[tuple[KVGroup, ...], int]:
    """Partition layers (by index) into groups of one kind and equal size; return them and the size.

    The size is the greatest common divisor of the kinds' layer counts if that is at least half of the smallest
    count, else the smallest count. Raises ConfigError when kinds differ in page size.
    """
    kinds: dict[LayerSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        kinds.setdefault(spec, []).append(layer)
    if len({spec.token_bytes for spec in kinds}) > 1:
        raise ConfigError("layers with KV pages of different sizes in one model are not supported yet")
    counts = [len(layers) for layers in kinds.values()]
    size = gcd(*counts)
    if 2 * size < min(counts):
        size = min(counts)
    groups = [
        KVGroup(spec, tuple(layers[start : start + size]))
        for spec, layers in kinds.items()
        for start in range(0, len(layers), size)
    ]
    return tuple(groups), size
