"""Attention of encoders: in both directions, over the tokens of a step alone. Nothing is kept for later steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from quire.attention.encoder_backend import EncoderStep
    from quire.layers.rotation import Rotation

ValueT = TypeVar("ValueT")
RotationT = TypeVar("RotationT", contravariant=True)
StepT_contra = TypeVar("StepT_contra", contravariant=True)


@dataclass(frozen=True, slots=True)
class EncoderHeads:
    """The constants of one layer's attention. As many heads have keys and values as queries. scale: multiplies q·k.
    window: most positions between a token and one that it attends to, on either side (None: any)."""

    num_heads: int
    head_dim: int
    scale: float
    window: int | None = None


class EncoderOperations(Protocol[ValueT, RotationT, StepT_contra]):
    """What encoders need of `Operations` besides the rest."""

    def attend_encoder(
        self, heads: EncoderHeads, qkv: ValueT, rotation: RotationT | None, step: StepT_contra
    ) -> ValueT:
        """qkv: [T, 3 * num_heads * head_dim], query, key and value heads; used up. rotation: of the positions (None:
        none is applied). step: what the encoder's attention back end planned; each of its sequences is in it whole.
        Returns [T, num_heads * head_dim]."""
        ...


class TorchEncoderOperations:
    """EncoderOperations of plain torch, one sequence after the other, so that no bit depends on the others."""

    def attend_encoder(
        self, heads: EncoderHeads, qkv: torch.Tensor, rotation: Rotation | None, step: EncoderStep
    ) -> torch.Tensor:
        parts = qkv.unflatten(1, (3 * heads.num_heads, heads.head_dim))
        turned, value = parts.split((2 * heads.num_heads, heads.num_heads), dim=1)
        if rotation is not None:
            turned = rotation.apply(turned)
        query, key = turned.split(heads.num_heads, dim=1)
        out = query.new_empty(query.shape)
        for start, end in step.spans:
            q, k, v = (part[None, start:end].transpose(1, 2) for part in (query, key, value))
            mask = None if heads.window is None else _window_mask(end - start, heads.window)
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=heads.scale)
            out[start:end] = attended[0].transpose(0, 1)
        return out.flatten(1)


def _window_mask(length: int, window: int) -> torch.Tensor:
    """[length, length] bool: whether a token (row) attends to another."""
    position = torch.arange(length)
    return (position[:, None] - position).abs() <= window
