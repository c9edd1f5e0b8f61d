"""The attention batch of one step on a device: the counterpart of AttentionBatch whose tensors stay on the device.

Sizes are the host's, so that grids are chosen without asking the device; everything else lies in tensors at addresses
that stay the same for the life of a CUDA graph. A batch may be padded to the size that a graph was captured for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch

from quire.attention.interface import StateStep


class HostColumns(NamedTuple):
    """The host's knowledge of a batch's S sequences, without padding. query_start: [S + 1]. starts: [S], positions of
    their first new tokens. num_drafts: [S], number of the new tokens that are drafts (None: none is): the host knows an
    upper bound of the start of a sequence with drafts."""

    query_start: np.ndarray
    starts: np.ndarray
    num_drafts: np.ndarray | None = None


NO_PROMPTS = HostColumns(np.zeros(1, np.int64), np.zeros(0, np.int64))
"""The host's columns in a graph: none, because the steps of a graph differ in what the host knows of them."""


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """S sequences with T new tokens in all, concatenated in batch order, padding included.

    The first new token of sequence s is at position seq_lens[s] - (query_start[s + 1] - query_start[s]). Padding
    sequences come last and own no tokens; padding tokens come last and belong to no sequence. Padding rows may hold any
    values, finite or not: no kernel reads out of range or writes pages for them, and no real row depends on them.
    """

    num_seqs: int
    """S."""
    num_tokens: int
    """T."""
    max_query_len: int
    """No sequence has more new tokens. 1: token t is the one of sequence t, which the decode kernel relies on."""
    max_seq_len: int
    """No sequence is longer; bounds grids. In a graph: as long as any can become."""
    rows: torch.Tensor
    """[S] int32: the sequence's row in the block tables. Padding: 0."""
    query_start: torch.Tensor
    """[S + 1] int32: sequence s owns tokens query_start[s]:query_start[s + 1]. Padding: the number of real tokens."""
    seq_lens: torch.Tensor
    """[S] int32: tokens after this step. Padding: 0."""
    slot_positions: torch.Tensor
    """[T] int64: position of each token in its sequence. Padding: 0."""
    slot_mapping: tuple[torch.Tensor, ...]
    """Slots, [T] int64, of each KV group that keeps tokens: block * block_size + offset that the token's key and value
    are written to. Padding: -1, nothing is written."""
    block_tables: tuple[torch.Tensor, ...]
    """Block tables, [num_rows, max_blocks] int32, of each KV group that keeps tokens: the kernels' blocks in logical
    order, a row for every request that lives, persistent; kernels index it by `rows`."""
    state_tables: tuple[torch.Tensor, ...] = ()
    """Block tables, [num_rows, max_blocks] int32, of each KV group that keeps states: blocks in logical order,
    otherwise as `block_tables`."""
    host: HostColumns | None = None
    """The host's columns, for operations that compute prompts alone (None: nothing asks)."""


@dataclass(frozen=True, slots=True)
class DeviceStateStep:
    """The pages in which the sequences of a device's step keep their states: the counterpart of StateStep, which says
    what is read and written. A padding sequence owns no tokens, reads nothing and writes nothing.

    tables: by layer, [num_rows, max_blocks] int32, persistent; kernels index it by `batch.rows`. interval: tokens of a
    block. pages: by layer, [num_blocks, page bytes] uint8, the pool.
    """

    batch: DeviceBatch
    tables: Mapping[int, torch.Tensor]
    interval: int
    pages: Mapping[int, torch.Tensor]

    def floats(self, layer: int) -> torch.Tensor:
        """[num_blocks, elements of a page] float32, the pool's memory."""
        pages = self.pages[layer]
        return pages[:, : pages.shape[1] // 4 * 4].view(torch.float32)

    def compute_states(self, kernels: StateKernels, weights: Any, *tensors: torch.Tensor) -> None:
        """Launch the kernels at once."""
        kernels(weights, *tensors, self)


StateKernels: TypeAlias = Callable[..., None]
"""Takes the weights of an operation, its inputs, the tensor to write to, and a DeviceStateStep."""


class DeviceStates(Protocol):
    """A device's step to layers that keep states."""

    def compute_states(self, kernels: StateKernels, weights: Any, *tensors: torch.Tensor) -> None:
        """Launch the kernels of an operation over the step's states. weights: the operation's. tensors: its inputs and
        the tensor to write to; contiguous."""
        ...


StepStates: TypeAlias = StateStep | DeviceStates
"""The states of a step, as an operation of a layer that keeps states is given them."""


class TokenColumns(NamedTuple):
    """A model's inputs of a step's T tokens on a device, in static buffers. token_ids: [T] int64. others: [T] int64
    each, the columns of ForwardBatch. hidden: [T, size], the input of a stage behind the first."""

    token_ids: torch.Tensor
    others: Mapping[str, torch.Tensor] = MappingProxyType({})
    hidden: torch.Tensor | None = None
