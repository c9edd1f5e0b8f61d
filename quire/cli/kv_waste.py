"""`quire plan --kv-waste`: share of the KV pool that no layer can write, for models of each kind of layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from quire.config.parallel import ParallelConfig
from quire.kv_cache.coordinator import padding
from quire.kv_cache.layout import KVGroup, block_bytes, group_layers
from quire.simulator.memory import device_specs
from quire.simulator.shape import built_in, find_shape

LENGTHS = (1, 1024, 8192, 131_072)
"""Lengths of the sequences that fill the pool, in tokens."""


class Waste(NamedTuple):
    """Unused shares (0 to 1) of a pool full of sequences of one length, for each length: share of pages unused by the
    block's group, and page padding."""

    model: str
    groups: tuple[KVGroup, ...]
    shares: tuple[float, ...]


def hybrid_models() -> list[str]:
    """Names of built-in shapes with layers other than full attention."""
    return [name for name in built_in() if {layer.attention.kind for layer in find_shape(name).layers} != {"full"}]


def kv_waste(
    models: Sequence[str], dtype: str, layout: ParallelConfig, block_size: int, snapshot_interval: int
) -> list[Waste]:
    """Wasted share of a full pool for each model. models: see `find_shape`. dtype: type of keys and values. layout:
    devices; the result is for one of them."""
    found = []
    for model in models:
        specs = device_specs(find_shape(model), dtype, layout)
        groups, layers_per_group = group_layers(specs, block_size, snapshot_interval)
        size = block_bytes(groups, layers_per_group)
        found.append(Waste(model, groups, tuple(padding(groups, size, length) for length in LENGTHS)))
    return found


def as_table(found: Sequence[Waste]) -> str:
    """Markdown table for `quire plan --kv-waste`, in per cent of the pool."""
    lengths = [f"{length:,}" for length in LENGTHS]
    rows = [
        ["model", "layers", "tokens of a block", f"waste (%) with sequences of {lengths[0]} token", *lengths[1:]],
        ["---"] * (3 + len(LENGTHS)),
    ]
    for waste in found:
        layers: Counter[str] = Counter()
        for group in waste.groups:
            layers[group.spec.kind] += len(group.layers)
        sizes = {group.spec.kind: group.block_size for group in waste.groups}
        rows.append(
            [
                waste.model,
                ", ".join(f"{count} {kind}" for kind, count in layers.items()),
                ", ".join(f"{kind} {size:,}" for kind, size in sizes.items()),
                *(f"{100 * share:.1f}" for share in waste.shares),
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
