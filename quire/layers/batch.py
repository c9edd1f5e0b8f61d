"""The input of a model's forward pass, and its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, NamedTuple

import torch

from quire.attention.device_batch import StepStates
from quire.attention.interface import AttentionStep
from quire.kernels.value import Indices, ReadRows, Value
from quire.layers.overlay import NO_ROWS, Overlay, ValueT
from quire.multimodal.positions import GRID_POSITIONS, ROTARY_POSITIONS

NO_COLUMNS: Mapping[str, torch.Tensor] = MappingProxyType({})


class ForwardBatch(NamedTuple):
    """One step's T tokens, flat: no batch dimension. Tensors, or placeholders while a model is recorded.

    token_ids, slot_positions: [T]; a token's position in its sequence decides its slot in the KV cache and what it
    attends to. attention: the step that the attention back end planned. logits_rows: [R] distinct, ascending; the
    tokens whose hidden states are read, the only ones that the last layer computes behind its attention (None: all).
    states: the pages of layers that keep a state (None: no layer does). columns: [T] each, the columns that the model
    reads, by name (quire/worker/columns.py). version: number of the memory that all of these lie in: batches of one
    version, but 0, are the same tensors at the same addresses; 0: may lie anywhere.

    Optional records, each of which a model records and captures a pass of its own for. A batch with one has version 0.
    hidden: [T, size], input of the first layer in a stage behind the first, or in a head for drafts (None: the tokens'
    embeddings). overlay: None: there is none. taps: numbers of layers whose results `forward` returns too.
    """

    token_ids: Indices
    slot_positions: Indices
    attention: AttentionStep
    logits_rows: ReadRows | None = None
    states: StepStates | None = None
    columns: Mapping[str, Indices] = NO_COLUMNS
    version: int = 0
    hidden: Value | None = None
    overlay: Overlay[Any] | None = None
    taps: tuple[int, ...] = ()

    def having(
        self, hidden: Value | None = None, overlay: Overlay[Any] | None = None, taps: tuple[int, ...] = ()
    ) -> ForwardBatch:
        """The same batch with these optional records."""
        return self._replace(hidden=hidden, overlay=overlay, taps=taps, version=0)

    @property
    def rotary_positions(self) -> Indices:
        """[T]: positions that rotations take: a column of the model's own, else those of the slots."""
        return self.columns.get(ROTARY_POSITIONS, self.slot_positions)

    @property
    def grid_positions(self) -> Sequence[Indices]:
        """[T] each, the two columns GRID_POSITIONS; none for a model that does not read them."""
        return [self.columns[name] for name in GRID_POSITIONS if name in self.columns]


class ForwardResult(NamedTuple, Generic[ValueT]):
    """hidden: [R, output_size], of the tokens that are read. tapped: by number of a layer, its result, [T, size]."""

    hidden: ValueT
    tapped: Mapping[int, ValueT] = NO_ROWS
