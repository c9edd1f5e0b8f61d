"""The interface between the worker and the attention back ends: a step's batch, and the calls of a back end.

The worker builds one AttentionBatch a step; a back end plans once (`plan`) and then attends once per layer
(`AttentionStep`), so that whatever depends only on lengths and tables is computed once a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import torch

if TYPE_CHECKING:
    from quire.attention.latent import IndexShape

IntegersT = TypeVar("IntegersT", int, np.ndarray, torch.Tensor)


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """S scheduled sequences with T tokens in all, concatenated in batch order. Host tensors."""

    query_start: torch.Tensor
    """[S + 1] int64: sequence s owns tokens query_start[s]:query_start[s + 1]."""
    start_positions: torch.Tensor
    """[S] int64: position of the sequence's first token of this step (= tokens computed before)."""
    slot_positions: torch.Tensor
    """[T] int64: position of each token in its sequence."""
    sequence_index: torch.Tensor
    """[T] int64: s of each token."""
    block_tables: tuple[torch.Tensor, ...]
    """Per KV group that keeps tokens [S, max_blocks] int32: the kernels' blocks in logical order. Entries behind those
    of a sequence's tokens are 0 where torch reads the tables, and anything where native kernels do."""
    slot_mapping: tuple[torch.Tensor, ...]
    """Per KV group that keeps tokens [T] int64: block * block_size + offset that the token's key and value are written
    to."""
    state_tables: tuple[torch.Tensor, ...] = ()
    """Per KV group that keeps states [S, max_blocks] int32: blocks in logical order, then as in `block_tables`."""


@dataclass(frozen=True, slots=True)
class LengthScale:
    """Queries multiplied by 1 + strength * log(1 + (position + 1) // floor), against scores that flatten in a long
    context."""

    floor: int
    strength: float

    def factors(self, positions: torch.Tensor) -> torch.Tensor:
        """positions: [T] integers -> [T] float32."""
        steps = (positions + 1).div(self.floor, rounding_mode="floor")
        return (torch.log1p(steps.double()) * self.strength + 1.0).float()


def first_seen(positions: IntegersT, window: int, *, is_chunked: bool) -> IntegersT:
    """The first position, possibly below 0, that a token at a position sees: of the last `window` ones, its own
    included, or of its chunk of `window`."""
    return positions // window * window if is_chunked else positions - (window - 1)


@dataclass(slots=True)
class CacheScale:
    """What the elements of a layer's keys, and of its values, are multiplied with in a cache of e4m3 numbers: they are
    stored divided by it, in float32, and rounded once. Set while a checkpoint is loaded, before anything attends."""

    key: float = 1.0
    value: float = 1.0


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """The constants of one layer's attention. scale: multiplies q·k; window: tokens seen, the own one included
    (None: all), or, if is_chunked, the chunks that positions are cut into, of which a token sees its own; length_scale:
    of queries (None: none); soft_cap: scores become cap * tanh(score / cap) (None: off). value_dim: elements of a value
    head (None: head_dim). sinks: [num_heads] float32, a score for each head that no value belongs to (None: none).
    cache_scale: 1 in caches of other numbers than e4m3."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    is_chunked: bool = False
    length_scale: LengthScale | None = None
    soft_cap: float | None = None
    value_dim: int | None = None
    sinks: torch.Tensor | None = field(default=None, compare=False)
    cache_scale: CacheScale = field(default_factory=CacheScale, compare=False)

    @property
    def stored_scale(self) -> float:
        """Multiplies q·k of keys as they are stored."""
        return self.scale * self.cache_scale.key

    @property
    def value_width(self) -> int:
        """Elements of a value head, and of a head of the result."""
        return self.head_dim if self.value_dim is None else self.value_dim


@dataclass(frozen=True, slots=True)
class StateStep:
    """Where S sequences with T tokens in all keep their states, for layers that keep one instead of each token.

    Block i of a sequence is a page of each layer: its state after (i + 1) * interval tokens, or fewer: after all. A
    step that computes tokens a to b - 1 reads block (a - 1) // interval (none if a is 0: the state is zero, whatever
    the pages hold) and writes every block from a // interval to (b - 1) // interval. Where a is a multiple of interval,
    other sequences may own the block that it reads, too; it writes only blocks that the sequence owns alone.

    query_start: S + 1 numbers; sequence s owns tokens query_start[s]:query_start[s + 1]. starts: [S] int64, tokens of
    each sequence computed before this step. tables: by layer, [S, max_blocks] int32. interval: tokens of a block, a
    multiple of STATE_BORDER. pages: by layer, [num_blocks, page bytes] uint8, the pool. Host tensors.
    """

    query_start: Sequence[int]
    starts: torch.Tensor
    tables: Mapping[int, torch.Tensor]
    interval: int
    pages: Mapping[int, torch.Tensor]


class PlannedStep(Protocol):
    """What a back end planned for one step. Models pass it on; the operations of the same back end look inside."""


class AttentionStep(PlannedStep, Protocol):
    """One step of a back end that computes at once, over the KV pool."""

    def write_kv(self, layer: LayerAttention, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k and v ([T, num_kv_heads, head_dim] and [T, num_kv_heads, value_width]) to their slots."""
        ...

    def write_latent(self, layer: int, latent: torch.Tensor) -> None:
        """Write vectors that all heads read, [T, width], to their slots."""
        ...

    def write_index(self, index: IndexShape, keys: torch.Tensor) -> None:
        """Write an indexer's keys, [T, dim], to their slots, beside the latents."""
        ...

    def select_keys(self, index: IndexShape, q: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """As `CacheOperations.select_keys`, of rotated queries [T, num_heads, dim], float32; all keys are written."""
        ...

    def attend_selected(self, layer: LayerAttention, q: torch.Tensor, selected: torch.Tensor) -> torch.Tensor:
        """As `attend_cached` over latents, but a token that sees more keys than `selected` is wide reads the positions
        in its row of it alone."""
        ...

    def attend_cached(self, layer: LayerAttention, q: torch.Tensor) -> torch.Tensor:
        """q: [T, num_heads, head_dim]. Returns [T, num_heads, value_width] in q's dtype. Causal: a token sees positions
        up to its own, of its own sequence only, read through the block table; all of them are written."""
        ...


class AttentionBackend(Protocol):
    """Plans the attention of a step. Made with the pool's tensors; owns no memory."""

    def plan(self, batch: AttentionBatch) -> PlannedStep:
        """What a model's forward pass takes: a AttentionStep, or what the back end's own operations know."""
        ...
