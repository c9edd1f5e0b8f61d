"""What the blocks of KV groups of every kind hold, for the fake executor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quire.config.model_shape import AttentionShape
from quire.kv_cache.layout import KVGroup
from quire.kv_cache.spec import AttentionSpec, LatentSpec, LayerSpec, SlidingWindowSpec, StateSpec

Kind = int | str | None
"""Of a layer: its sliding window, None for full attention, "latent" or "state"."""


def layer_spec(kind: Kind) -> LayerSpec:
    """A latent takes half the bytes of a token, a state those of four tokens."""
    if kind == "latent":
        return LatentSpec(width=8, dtype_bytes=4)
    if kind == "state":
        return StateSpec(num_bytes=256)
    if kind is None:
        return AttentionSpec(num_kv_heads=1, key_dim=8, value_dim=8, dtype_bytes=4)
    return SlidingWindowSpec(num_kv_heads=1, key_dim=8, value_dim=8, dtype_bytes=4, window=int(kind))


def kind_of(attention: AttentionShape) -> Kind:
    """Of a layer of a fake model (tests/fakes/core.py)."""
    return attention.kind if attention.kind in ("latent", "state") else attention.window


def first_read(group: KVGroup, start: int) -> int:
    """The first block that a query at position `start` reads."""
    if not group.spec.token_bytes:
        return max(0, start - 1) // group.block_size
    return 0 if group.spec.window is None else max(0, start - group.spec.window + 1) // group.block_size


def read_by(group: KVGroup, chain: Sequence[int], start: int, index: int) -> Sequence[int]:
    """The content of block `index`, from its first slot on, that a step from position `start` on reads. A state has one
    slot. chain[i] stands for the tokens up to position i."""
    first, stop = index * group.block_size, min(start, (index + 1) * group.block_size)
    return chain[first:stop] if group.spec.token_bytes else chain[stop - 1 : stop]


def written_by(group: KVGroup, chain: Sequence[int], start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(block, slot, content) that a step over positions start .. end - 1 leaves."""
    size = group.block_size
    if group.spec.token_bytes:
        for position in range(start, end):
            yield position // size, position % size, chain[position]
    else:
        for index in range(start // size, (end - 1) // size + 1):
            yield index, 0, chain[min(end, (index + 1) * size) - 1]
