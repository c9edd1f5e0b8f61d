"""Loading of matrices whose checkpoint has another order of rows. GLM stores rotated pairs side by side; here they are
half the rotated part apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from quire.layers.adapters import split_place
from quire.layers.context import WeightSlot
from quire.quantization.file_tensor import FileTensor
from quire.quantization.integer_weight import WeightSource


def pairs_apart(slot: WeightSlot, head_dim: int, rotary_dim: int) -> WeightSlot:
    """Slot of a query or key matrix (or bias) for a checkpoint with interleaved pairs. head_dim: rows per head;
    rotary_dim: number of leading rotated rows."""
    inside = torch.cat(
        (torch.arange(0, rotary_dim, 2), torch.arange(1, rotary_dim, 2), torch.arange(rotary_dim, head_dim))
    )
    num_heads = slot.shape[0] // head_dim
    order = (torch.arange(num_heads)[:, None] * head_dim + inside).flatten()

    def load(source: WeightSource) -> None:
        slot.load((source.read() if isinstance(source, FileTensor) else source)[order])

    return replace(slot, load=load, adapter=None if slot.adapter is None else slot.adapter.ordered(order))


def shared_slot(slots: Sequence[WeightSlot], orders: Sequence[torch.Tensor]) -> WeightSlot:
    """Slot of one checkpoint tensor that holds the rows of several slots: `orders[i]` are the rows of slot i."""

    def load(source: WeightSource) -> None:
        rows = source.read() if isinstance(source, FileTensor) else source
        for slot, order in zip(slots, orders, strict=True):
            slot.load(rows[order])

    rows = sum(slot.shape[0] for slot in slots)
    nbytes = sum(slot.nbytes for slot in slots)
    adapter = split_place(rows, [slot.adapter for slot in slots], orders)
    return replace(slots[0], shape=(rows, *slots[0].shape[1:]), load=load, nbytes=nbytes, adapter=adapter)
