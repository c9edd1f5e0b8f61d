"""The input of a model's forward pass, and its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch

from quire.attention.device_batch import StepStates
from quire.attention.interface import PlannedStep
from quire.kernels.value import Indices, ReadRows, Value
from quire.multimodal.positions import GRID_POSITIONS, ROTARY_POSITIONS

NO_COLUMNS: Mapping[str, torch.Tensor] = MappingProxyType({})
NO_TAPS: Mapping[int, Any] = MappingProxyType({})
ValueT = TypeVar("ValueT", bound=Value)


class Overlay(Protocol[ValueT]):
    """Rows that take the place of some tokens' embeddings (an image's), and rows that are added to the same tokens
    behind layers."""

    @property
    def layers(self) -> Sequence[int]:
        """Layers behind which rows are added, by their numbers; the last of a model is none of them."""
        ...

    def put(self, x: ValueT) -> ValueT:
        """x, [T, size], the tokens' embeddings, with the rows in their places. x is used up."""
        ...

    def add(self, layer: int, x: ValueT) -> ValueT:
        """x, [T, size], the result of `layer`, with the rows added. x is used up."""
        ...


class ForwardBatch(NamedTuple):
    """One step's T tokens, flat: no batch dimension. Tensors, or placeholders while a model is recorded.

    token_ids, slot_positions: [T]; a token's position in its sequence decides its slot in the KV cache and what it
    attends to. attention: what the attention back end planned for the step. logits_rows: [R] distinct, ascending; the
    tokens whose hidden states are read, the only ones that the last layer computes behind its attention (None: all).
    states: where layers that keep a state find it (None: no layer does). columns: [T] each, those that the model reads,
    by name (quire/worker/columns.py). version: of the memory that all of these lie in: batches of one version, but 0,
    are the same tensors at the same addresses; 0: may lie anywhere.

    Optional records, each of which a model records and captures a pass of its own for. A batch with one has version 0.
    hidden: [T, size], what the first of the layers takes (None: the tokens' embeddings): of a stage behind the first,
    or of a head for drafts. overlay: None: there is none. taps: numbers of layers whose results `forward` returns too.
    """

    token_ids: Indices
    slot_positions: Indices
    attention: PlannedStep
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
    """What a forward pass computes. hidden: [R, output_size], of the tokens that are read. tapped: by number of a
    layer, its result, [T, size]; of a model's last layer [R, size], before the final norm."""

    hidden: ValueT
    tapped: Mapping[int, ValueT] = NO_TAPS


class RowOverlay(NamedTuple):
    """An Overlay of tensors. rows: [O] int64, distinct, on the tensors' device: which of the T tokens. embeddings: [O,
    size]. behind: by number of a layer, what is added to its result, [O, size]."""

    rows: torch.Tensor
    embeddings: torch.Tensor
    behind: Mapping[int, torch.Tensor] = NO_TAPS

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self.behind)

    def put(self, x: torch.Tensor) -> torch.Tensor:
        return x.index_copy_(0, self.rows, self.embeddings.to(x.dtype))

    def add(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        summed = x.index_select(0, self.rows) + self.behind[layer].to(x.dtype)
        return x.index_copy_(0, self.rows, summed)


class TokenColumns(NamedTuple):
    """What a model reads of a step's tokens on a device, in static buffers. token_ids: [T] int64. others: [T] int64
    each, as the columns of ForwardBatch. hidden: [T, size], of a stage behind the first."""

    token_ids: torch.Tensor
    others: Mapping[str, torch.Tensor] = NO_COLUMNS
    hidden: torch.Tensor | None = None


def dummy_columns(names: Sequence[str], token_ids: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """Columns of a dummy pass over `token_ids`, [T]: zeros."""
    return {name: torch.zeros_like(token_ids) for name in names}
