"""Rows of a checkpoint's matrices in another order than the layers', brought to theirs while weights are loaded.

Rotated pairs side by side (GLM): a rotation turns pairs of elements of a head. Here a pair's elements are half of the
rotated part apart; where a checkpoint has them side by side, the rows of its query and key matrices are put in the
other order. Scores are sums over all elements of a head, so that no later step sees the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from quire.layers.context import WeightSlot
from quire.quantization.file_tensor import FileTensor
from quire.quantization.integer_weight import WeightSource


def pairs_apart(slot: WeightSlot, head_dim: int, rotary_dim: int) -> WeightSlot:
    """The slot of a query or key matrix, or of its bias, for a checkpoint whose rotated pairs are side by side.

    head_dim: rows of a head; rotary_dim: number of its first rows, which are rotated.
    """
    inside = torch.cat(
        (torch.arange(0, rotary_dim, 2), torch.arange(1, rotary_dim, 2), torch.arange(rotary_dim, head_dim))
    )
    num_heads = slot.shape[0] // head_dim
    order = (torch.arange(num_heads)[:, None] * head_dim + inside).flatten()

    def load(source: WeightSource) -> None:
        slot.load((source.read() if isinstance(source, FileTensor) else source)[order])

    return replace(slot, load=load, adapter=None if slot.adapter is None else slot.adapter.ordered(order))


def shared_slot(slots: Sequence[WeightSlot], orders: Sequence[torch.Tensor]) -> WeightSlot:
    """One tensor of a checkpoint that has the rows of several slots: those of slot i are its rows `orders[i]`."""

    def load(source: WeightSource) -> None:
        rows = source.read() if isinstance(source, FileTensor) else source
        for slot, order in zip(slots, orders, strict=True):
            slot.load(rows[order])

    rows = sum(slot.shape[0] for slot in slots)
    nbytes = sum(slot.nbytes for slot in slots)
    return replace(slots[0], shape=(rows, *slots[0].shape[1:]), load=load, nbytes=nbytes, adapter=None)
