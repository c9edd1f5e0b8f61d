"""Rows that are put over embeddings and added behind layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from quire.kernels.value import Value

NO_ROWS: Mapping[int, Any] = MappingProxyType({})
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

    def add_behind(self, layer: int, x: ValueT) -> ValueT:
        """x, [T, size], the result of `layer`, with the rows added. x is used up."""
        ...


class RowOverlay(NamedTuple):
    """An Overlay of tensors. rows: [O] int64, distinct, on the tensors' device: which of the T tokens. embeddings: [O,
    size]. behind: by number of a layer, what is added to its result, [O, size]."""

    rows: torch.Tensor
    embeddings: torch.Tensor
    behind: Mapping[int, torch.Tensor] = NO_ROWS

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self.behind)

    def put(self, x: torch.Tensor) -> torch.Tensor:
        return x.index_copy_(0, self.rows, self.embeddings.to(x.dtype))

    def add_behind(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        summed = x.index_select(0, self.rows) + self.behind[layer].to(x.dtype)
        return x.index_copy_(0, self.rows, summed)
