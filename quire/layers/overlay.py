"""Rows that replace embeddings, and rows added after layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from quire.kernels.value import Value

NO_ROWS: Mapping[int, Any] = MappingProxyType({})
ValueT = TypeVar("ValueT", bound=Value)


class Overlay(Protocol[ValueT]):
    """Rows that replace some tokens' embeddings (an image's), and rows added to these tokens after layers."""

    @property
    def layers(self) -> Sequence[int]:
        """Numbers of layers after which rows are added; never a model's last."""
        ...

    def put(self, x: ValueT) -> ValueT:
        """Embeddings x, [T, size], with the rows in place, before the first layer; x is overwritten."""
        ...

    def add_behind(self, layer: int, x: ValueT) -> ValueT:
        """Result x of `layer`, [T, size], with the rows added; x is overwritten."""
        ...


class RowOverlay(NamedTuple):
    """Overlay of tensors. rows: [O] int64, distinct indices of the T tokens, on the tensors' device. embeddings: [O,
    size]. behind: [O, size] to add to a layer's result, by its number."""

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
