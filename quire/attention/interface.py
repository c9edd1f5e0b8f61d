"""Interface between worker and attention back ends. The worker builds an AttentionBatch per step; `plan` makes it an
AttentionStep for all layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from quire.kernels.arguments import HeadWeights, IndexShape, LatentExpansion, LatentShape
from quire.kernels.value import AnyValue, Value


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """S scheduled sequences with T tokens, concatenated. Host tensors, from the worker for `plan`."""

    query_start: torch.Tensor
    """[S + 1] int64: tokens of sequence s are query_start[s]:query_start[s + 1]."""
    start_positions: torch.Tensor
    """[S] int64: position of the sequence's first token in this step."""
    slot_positions: torch.Tensor
    """[T] int64: position of each token in its sequence."""
    sequence_index: torch.Tensor
    """[T] int64: sequence index of each token."""
    block_tables: tuple[torch.Tensor, ...]
    """[S, max_blocks] int32 per KV group of tokens: kernel blocks in logical order. Entries beyond a sequence's tokens
    are 0 for torch, and arbitrary for native kernels."""
    slot_mapping: tuple[torch.Tensor, ...]
    """[T] int64 per KV group of tokens: slot to write to, block * block_size + offset."""
    state_tables: tuple[torch.Tensor, ...] = ()
    """[S, max_blocks] int32 per KV group of states; see `block_tables`."""
    last_seen: torch.Tensor | None = None
    """[T] int64: position of the last token that each token sees, of this step at most and never falling in a sequence;
    None: its own."""


@dataclass(frozen=True, slots=True)
class StateStep:
    """Pages with the recurrent states of S sequences with T tokens (layers with states read and write them). Block i of
    a sequence is a page per layer with the state after (i + 1) * interval tokens, or after all if fewer. A step over
    tokens a to b - 1 reads block (a - 1) // interval (none for a = 0: the state is zero) and writes blocks a //
    interval to (b - 1) // interval; only a block that it reads may be shared.

    query_start: S + 1 numbers, bounds of the sequences' tokens. starts: [S] int64, tokens computed before. tables: by
    layer, [S, max_blocks] int32. interval: tokens per block, a multiple of STATE_BORDER. pages: by layer, [num_blocks,
    page bytes] uint8. Host tensors.
    """

    query_start: Sequence[int]
    starts: torch.Tensor
    tables: Mapping[int, torch.Tensor]
    interval: int
    pages: Mapping[int, torch.Tensor]


LatentInputs: TypeAlias = tuple[AnyValue, AnyValue, AnyValue, AnyValue]
"""Inputs of latent attention for T tokens: queries for the compressed part [T, num_heads * rank] and the rotated part
[T, num_heads * rope_dim], the tokens' compressed vectors [T, rank] and rotated keys [T, rope_dim]."""

IndexInputs: TypeAlias = tuple[AnyValue, AnyValue, AnyValue]
"""Inputs of an indexer for T tokens: queries [T, num_heads * dim], keys [T, dim], head weights [T, num_heads]."""


class AttentionStep:
    """Planned step that layers call for attention; a back end implements what its models use. Values are rows of the T
    tokens, as tensors or placeholders, and may be overwritten. rotation: result of `Operations.rotation`, or None. A
    token sees its sequence's positions up to its own (or `AttentionBatch.last_seen`); an encoder's, all."""

    __slots__ = ()

    def attend(self, heads: HeadWeights, qkv: AnyValue, rotation: AnyValue | None) -> Value:
        """Norm and rotate query and key heads, write keys and values to the pages of `heads.shape.layer`, and attend.
        qkv: [T, (num_heads + num_kv_heads) * head_dim + num_kv_heads * value_width]. Returns [T, num_heads *
        value_width]."""
        raise NotImplementedError

    def attend_latent(
        self,
        shape: LatentShape,
        inputs: LatentInputs,
        rotation: AnyValue | None,
        selected: AnyValue | None = None,
    ) -> Value:
        """Rotate, write the latents to their pages, and attend. selected: result of `select_keys` if `shape.top` is
        set. Returns [T, num_heads * rank]."""
        raise NotImplementedError

    def attend_expanded(
        self, shape: LatentShape, expansion: LatentExpansion, inputs: LatentInputs, rotation: AnyValue | None
    ) -> Value:
        """`attend_latent`, but with prompts expanded where that is cheaper (`ExpansionRule`). The queries of `inputs`
        are [T, num_heads * nope_dim]. Returns [T, num_heads * value_dim]."""
        raise NotImplementedError

    def select_keys(self, shape: IndexShape, inputs: IndexInputs, rotation: AnyValue | None) -> Value:
        """Rotate, write the keys to their pages, and choose the keys that each token reads. Returns ascending
        positions, [T, top]; rows of tokens that see at most `top` keys are undefined."""
        raise NotImplementedError


class AttentionBackend(Protocol):
    """Plans the attention of a step over the pool's tensors; owns no memory."""

    def plan(self, batch: AttentionBatch) -> AttentionStep:
        """Plan a step, before the model's forward pass."""
        ...
