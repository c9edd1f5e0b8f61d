"""Attention batch of a step on a device: sizes on the host, tensors at addresses that CUDA graphs rely on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch

from quire.attention.interface import StateStep


class HostColumns(NamedTuple):
    """Host's knowledge of a batch's S sequences, without padding. query_start: [S + 1]. starts: [S], positions of
    the first new tokens; an upper bound with drafts. num_drafts: [S], number of draft tokens (None: none)."""

    query_start: np.ndarray
    starts: np.ndarray
    num_drafts: np.ndarray | None = None


NO_PROMPTS = HostColumns(np.zeros(1, np.int64), np.zeros(0, np.int64))
"""Host columns in a graph: empty, because its steps differ."""


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """S sequences with T new tokens, concatenated, maybe padded to a captured size. The first new token of sequence s
    is at position seq_lens[s] - (query_start[s + 1] - query_start[s]). Padding sequences and tokens come last; neither
    belongs to the other."""

    num_seqs: int
    num_tokens: int
    max_query_len: int
    """Maximum new tokens of a sequence; if 1, token t belongs to sequence t."""
    max_seq_len: int
    """Maximum sequence length, which bounds grids; in a graph the overall maximum."""
    rows: torch.Tensor
    """[S] int32: row in the block tables; padding: 0."""
    query_start: torch.Tensor
    """[S + 1] int32: see AttentionBatch; padding: number of real tokens."""
    seq_lens: torch.Tensor
    """[S] int32: tokens after this step; padding: 0."""
    slot_positions: torch.Tensor
    """[T] int64: position in the sequence; padding: 0."""
    slot_mapping: tuple[torch.Tensor, ...]
    """[T] int64 per KV group of tokens: slot to write to, block * block_size + offset; padding: -1, not written."""
    block_tables: tuple[torch.Tensor, ...]
    """[num_rows, max_blocks] int32 per KV group of tokens: kernel blocks in logical order, indexed by `rows`.
    Persistent, with a row per live request."""
    state_tables: tuple[torch.Tensor, ...] = ()
    """[num_rows, max_blocks] int32 per KV group of states; see `block_tables`."""
    host: HostColumns | None = None
    """Host columns for operations that compute prompts separately (None: unused)."""
    last_seen: torch.Tensor | None = None
    """[T] int64: see AttentionBatch; any for padding."""


@dataclass(frozen=True, slots=True)
class DeviceStateStep:
    """Pages of a device step's states; StateStep defines the accesses. tables: by layer, [num_rows, max_blocks] int32,
    persistent; indexed by `batch.rows`. interval: tokens per block. pages: by layer, [num_blocks, page bytes] uint8.
    batch_invariant: a token has the same bits in a prompt and decoded."""

    batch: DeviceBatch
    tables: Mapping[int, torch.Tensor]
    interval: int
    pages: Mapping[int, torch.Tensor]
    batch_invariant: bool = True

    def floats(self, layer: int) -> torch.Tensor:
        """[num_blocks, elements of a page] float32 view of the layer's pages, for kernels."""
        pages = self.pages[layer]
        return pages[:, : pages.shape[1] // 4 * 4].view(torch.float32)

    def compute_states(self, kernels: StateKernels, weights: Any, *tensors: torch.Tensor) -> None:
        kernels(weights, *tensors, self)


StateKernels: TypeAlias = Callable[..., None]
"""Function of an operation's weights, inputs, output tensor and a DeviceStateStep."""


class DeviceStates(Protocol):
    """Step of a device for layers with recurrent states: `StateStep` whose tensors are on the device."""

    def compute_states(self, kernels: StateKernels, weights: Any, *tensors: torch.Tensor) -> None:
        """Launch an operation's kernels over the step's states. tensors: contiguous inputs, then the output."""
        ...


StepStates: TypeAlias = StateStep | DeviceStates


class TokenColumns(NamedTuple):
    """Model inputs for T tokens, in static buffers. token_ids: [T] int64. others: [T] int64 each, ForwardBatch's
    columns. hidden: [T, size], input of later stages."""

    token_ids: torch.Tensor
    others: Mapping[str, torch.Tensor] = MappingProxyType({})
    hidden: torch.Tensor | None = None

    def without(self, name: str) -> TokenColumns:
        return self._replace(others={key: column for key, column in self.others.items() if key != name})
