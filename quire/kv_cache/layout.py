"""Layout of one pool for all layers (docs/kv-cache.md): layers of a kind form groups of equal size, and a block serves
one group. Kinds with more bytes per token get blocks of fewer tokens; a state's page is padded. A page holds a whole
number of kernels' blocks of `block_size` tokens (the option)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd, lcm

from quire.config.cache import SNAPSHOT_INTERVAL
from quire.config.model_shape import STATE_BORDER
from quire.kv_cache.spec import LayerSpec

FOREIGN_LAYER = -1
"""Layer of another model, in a group of a pool that several models share."""
NULL_BLOCK = 0
"""Block that is never handed out: table entries outside a sliding window point to it."""

PADDING_GOAL = 0.05
"""Padding, as a share of the pages' bytes, that ends the search for a size. Larger pages have less, but emptier last
blocks."""
MOST_GROWTH = 8
"""Largest factor between a page and its least size."""
ALIGNMENT = 64
"""Alignment in bytes of pages of different kinds, whose arrays have different dtypes."""


@dataclass(frozen=True)
class KVGroup:
    """Layers that share a block table; `layers[j]` uses page j of the group's blocks. block_size: tokens of a block;
    for states, tokens between snapshots. page_bytes: bytes of a page that a layer uses."""

    spec: LayerSpec
    layers: tuple[int, ...]
    block_size: int
    page_bytes: int


@dataclass(frozen=True)
class KVCacheLayout:
    """Pool: `num_blocks` blocks (block 0 reserved) of `layers_per_group` pages. block_size: tokens of a kernels'
    block (the option), of which groups' block sizes are multiples. layers_per_group: pages of a block, in the largest
    pipeline stage. num_host_blocks: blocks in host memory, numbered from 1, for swapped requests."""

    block_size: int
    num_blocks: int
    groups: tuple[KVGroup, ...]
    layers_per_group: int
    num_host_blocks: int = 0

    @property
    def page_bytes(self) -> int:
        """Bytes of a page (one layer's part of a block), padding included."""
        return page_bytes(self.groups)

    @property
    def block_bytes(self) -> int:
        return block_bytes(self.groups, self.layers_per_group)

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1

    @property
    def token_groups(self) -> tuple[KVGroup, ...]:
        """Groups that keep something of each token; the others keep states. Attention back ends use them."""
        return tuple(group for group in self.groups if group.spec.token_bytes)

    @property
    def state_groups(self) -> tuple[KVGroup, ...]:
        return tuple(group for group in self.groups if not group.spec.token_bytes)

    @property
    def sequence_block(self) -> int:
        """Least number of tokens of a sequence that share a block, those on other ranks included."""
        return min((self.entry_tokens(group) for group in self.token_groups), default=self.block_size)

    def entry_tokens(self, group: KVGroup) -> int:
        """Tokens of a sequence for which the group's tables have an entry: of a kernels' block on each rank."""
        return self.block_size * group.spec.dealt_to

    def kernel_blocks(self, group: KVGroup) -> int:
        """Kernel blocks in a page of the group; 1 for states, which are read and written whole."""
        return group.block_size // self.entry_tokens(group) if group.spec.token_bytes else 1


def page_bytes(groups: Sequence[KVGroup]) -> int:
    """Bytes of a page of the pool: the most that one layer of a group uses, aligned if groups differ."""
    sizes = {group.page_bytes for group in groups} or {0}
    return max(sizes) if len(sizes) == 1 else _aligned(max(sizes))


def block_bytes(groups: Sequence[KVGroup], layers_per_group: int) -> int:
    return layers_per_group * page_bytes(groups)


def group_layers(
    specs: Sequence[LayerSpec], block_size: int, snapshot_interval: int = SNAPSHOT_INTERVAL
) -> tuple[tuple[KVGroup, ...], int]:
    """Partition layers (by index) into groups of one kind and equal size; returns (groups, size). block_size: groups
    get multiples of it. snapshot_interval: least number of tokens in a block of states, whose size is the next multiple
    of STATE_BORDER and of the other groups' block sizes. size: the greatest common divisor of the kinds' layer counts
    if at least half of the smallest count, else the smallest count."""
    if not specs:
        return (), 0
    kinds: dict[LayerSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        kinds.setdefault(spec, []).append(layer)
    counts = {spec: len(layers) for spec, layers in kinds.items()}
    sizes = _block_sizes(counts, block_size)
    boundary = lcm(block_size, STATE_BORDER, *sizes.values())
    interval = -(-snapshot_interval // boundary) * boundary
    size = gcd(*counts.values())
    if 2 * size < min(counts.values()):
        size = min(counts.values())
    groups = [
        KVGroup(spec, tuple(layers[start : start + size]), tokens, spec.page_bytes(tokens))
        for spec, layers in kinds.items()
        for tokens in (sizes.get(spec, interval),)
        for start in range(0, len(layers), size)
    ]
    return tuple(groups), size


def _block_sizes(counts: Mapping[LayerSpec, int], block_size: int) -> dict[LayerSpec, int]:
    """Tokens of a block for each kind with something per token; such kinds fill their pages exactly. counts: layers of
    each kind.
    """
    quanta = {spec: spec.page_bytes(block_size * spec.dealt_to) for spec in counts if spec.token_bytes}
    if not quanta:
        return {}
    step = lcm(*quanta.values()) if len(counts) == 1 else lcm(ALIGNMENT, *quanta.values())
    states = [(spec.page_bytes(block_size), count) for spec, count in counts.items() if not spec.token_bytes]
    width, padding = _page_width(step * (lcm(block_size, STATE_BORDER) // block_size if states else 1), states, counts)
    if padding > PADDING_GOAL:
        # Blocks that end between borders make snapshots rarer, because snapshots lie where all groups' blocks end.
        width = min((padding, width), _page_width(step, states, counts)[::-1])[1]
    return {spec: width // quantum * block_size * spec.dealt_to for spec, quantum in quanta.items()}


def _page_width(step: int, states: Sequence[tuple[int, int]], counts: Mapping[LayerSpec, int]) -> tuple[int, float]:
    """(bytes of a page, a multiple of step; its padding). states: (bytes, number of layers) of each kind."""
    least = -(-max([step, *(size for size, _ in states)]) // step) * step
    best, best_padding = least, 1.0
    for width in range(least, MOST_GROWTH * least + 1, step):
        padding = sum([count * (1 - size / width) for size, count in states]) / sum(counts.values())
        if padding < best_padding:
            best, best_padding = width, padding
        if padding <= PADDING_GOAL:
            break
    return best, best_padding


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
