"""The interface between the worker and the attention back ends: a step's batch, and the calls of a back end.

The worker builds one AttentionBatch a step; a back end plans once (`plan`) and returns an AttentionStep, which layers
call. Work that depends only on lengths and tables is done once a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from quire.kernels.arguments import HeadWeights, IndexShape, LatentExpansion, LatentShape
from quire.kernels.value import AnyValue, Value


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
    """Block tables, [S, max_blocks] int32, of each KV group that keeps tokens: the kernels' blocks in logical order.
    Entries behind those of a sequence's tokens are 0 where torch reads the tables, and anything where native kernels
    do."""
    slot_mapping: tuple[torch.Tensor, ...]
    """Slots, [T] int64, of each KV group that keeps tokens: block * block_size + offset that the token's key and value
    are written to."""
    state_tables: tuple[torch.Tensor, ...] = ()
    """Block tables, [S, max_blocks] int32, of each KV group that keeps states: blocks in logical order, then as in
    `block_tables`."""


@dataclass(frozen=True, slots=True)
class StateStep:
    """The pages in which S sequences with T tokens in all keep their states, for layers that keep a state instead of
    each token.

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


LatentInputs: TypeAlias = tuple[AnyValue, AnyValue, AnyValue, AnyValue]
"""Inputs of latent attention for a step's T tokens: queries against the compressed part of keys [T, num_heads * rank]
and against the rotated part [T, num_heads * rope_dim], the tokens' own compressed vectors [T, rank] and rotated keys
[T, rope_dim]."""

IndexInputs: TypeAlias = tuple[AnyValue, AnyValue, AnyValue]
"""Inputs of an indexer for a step's T tokens: queries [T, num_heads * dim], keys [T, dim], and the heads' weights [T,
num_heads]."""


class AttentionStep:
    """A planned step, and the operations of layers over it. A back end implements those that its models use.

    All values are rows of the step's T tokens, of the kind that the back end computes: tensors, or placeholders while a
    program is recorded; they are used up. rotation: `Operations.rotation` of the tokens' positions (None: none is
    applied). A token sees the positions up to its own, of its own sequence, read through the block table; an encoder's
    token sees all positions of its sequence, which the step has whole.
    """

    __slots__ = ()

    def attend(self, heads: HeadWeights, qkv: AnyValue, rotation: AnyValue | None) -> Value:
        """Norm and rotate query and key heads, write keys and values to the pages of `heads.shape.layer`, and attend.

        qkv: [T, (num_heads + num_kv_heads) * head_dim + num_kv_heads * value_width], query, key and value heads.
        Returns [T, num_heads * value_width].
        """
        raise NotImplementedError

    def attend_latent(
        self,
        shape: LatentShape,
        inputs: LatentInputs,
        rotation: AnyValue | None,
        selected: AnyValue | None = None,
    ) -> Value:
        """Rotate, write the tokens' latents to their pages, and attend. selected: the result of `select_keys`, if
        `shape.top` is set. Returns [T, num_heads * rank]."""
        raise NotImplementedError

    def attend_expanded(
        self, shape: LatentShape, expansion: LatentExpansion, inputs: LatentInputs, rotation: AnyValue | None
    ) -> Value:
        """Attend as `attend_latent` does, but compute prompts with keys and values of each head where that is cheaper
        (`ExpansionRule`). The queries of `inputs` are [T, num_heads * nope_dim]. Returns [T, num_heads * value_dim]."""
        raise NotImplementedError

    def select_keys(self, shape: IndexShape, inputs: IndexInputs, rotation: AnyValue | None) -> Value:
        """Rotate, write the tokens' keys to their pages, and choose the keys that each token reads. Returns [T, top]:
        positions, ascending; rows of tokens that see at most `top` keys, and read all, hold anything."""
        raise NotImplementedError


class AttentionBackend(Protocol):
    """Plans the attention of a step. Made with the pool's tensors; owns no memory."""

    def plan(self, batch: AttentionBatch) -> AttentionStep:
        """The step that a model's forward pass takes."""
        ...
