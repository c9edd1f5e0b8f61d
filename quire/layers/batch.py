"""Input and result of a model's forward pass."""

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
    """One step's T tokens, flat. Tensors, or placeholders while a model is recorded. token_ids, slot_positions: [T];
    the position determines the KV slot and the visible tokens. attention: planned step of the back end. logits_rows:
    [R] distinct, ascending, tokens whose hidden states are read (None: all). states: pages of layers with recurrent
    state, or None. columns: [T] each, by name (quire/worker/columns.py). version: equal ones other than 0 mean the same
    tensors and addresses. hidden: [T, size], input of the first layer in later stages and draft heads (None:
    embeddings). overlay: rows over embeddings, or None. taps: layers whose results `forward` also returns. Each
    combination of the last three is recorded or captured apart."""

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
        """Copy of the batch with these records, for a stage, images or a draft head."""
        return self._replace(hidden=hidden, overlay=overlay, taps=taps, version=0)

    @property
    def rotary_positions(self) -> Indices:
        """[T]: positions for rotation: the model's own column, or the slots' positions."""
        return self.columns.get(ROTARY_POSITIONS, self.slot_positions)

    @property
    def grid_positions(self) -> Sequence[Indices]:
        """Two GRID_POSITIONS columns, [T] each; empty for models without them."""
        return [self.columns[name] for name in GRID_POSITIONS if name in self.columns]


class ForwardResult(NamedTuple, Generic[ValueT]):
    """Result of a forward pass. hidden: [R, output_size], of the read tokens. tapped: result of each tapped layer, [T,
    size]."""

    hidden: ValueT
    tapped: Mapping[int, ValueT] = NO_ROWS
