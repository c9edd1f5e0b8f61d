"""The input of a model's forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch

from quire.attention.device_batch import StepStates
from quire.attention.interface import PlannedStep
from quire.kernels.value import Indices, ReadRows

NO_COLUMNS: Mapping[str, torch.Tensor] = MappingProxyType({})
ROTARY_POSITIONS = "rotary_positions"
"""The column of positions for rotations alone."""


class ForwardBatch(NamedTuple):
    """One step's T tokens, flat: no batch dimension. Tensors, or placeholders while a model is recorded.

    token_ids, slot_positions: [T]; a token's position in its sequence decides its slot in the KV cache and what it
    attends to. attention: what the attention back end planned for the step. logits_rows: [R] distinct, ascending; the
    tokens whose hidden states are read, the only ones that the last layer computes behind its attention (None: all).
    states: where layers that keep a state find it (None: no layer does). columns: [T] each, those that the model reads,
    by name (quire/worker/columns.py). version: of the memory that all of these lie in: batches of one version, but 0,
    are the same tensors at the same addresses; 0: may lie anywhere.
    """

    token_ids: Indices
    slot_positions: Indices
    attention: PlannedStep
    logits_rows: ReadRows | None = None
    states: StepStates | None = None
    columns: Mapping[str, Indices] = NO_COLUMNS
    version: int = 0

    @property
    def rotary_positions(self) -> Indices:
        """[T]: positions that rotations take: a column of the model's own, else those of the slots."""
        return self.columns.get(ROTARY_POSITIONS, self.slot_positions)


class TokenColumns(NamedTuple):
    """What a model reads of a step's tokens on a device, in static buffers. token_ids: [T] int64. others: [T] int64
    each, as those of ForwardBatch."""

    token_ids: torch.Tensor
    others: Mapping[str, torch.Tensor] = NO_COLUMNS


def dummy_columns(names: Sequence[str], token_ids: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """Columns of a dummy pass over `token_ids`, [T]: zeros."""
    return {name: torch.zeros_like(token_ids) for name in names}
