"""Rotations of one step's positions, in each back end's form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, Union

import torch

if TYPE_CHECKING:
    from quire.kernels.cpu.recorder import Buffer


@dataclass(frozen=True, slots=True)
class Rotation:
    """cos and sin of a step's positions, [T, 1, rotary_dim], with the sine's first half negated."""

    cos: torch.Tensor
    sin: torch.Tensor

    def apply(self, heads: torch.Tensor) -> torch.Tensor:
        """Rotate the leading elements of each head. heads: [T, num_heads, head_dim] -> same shape and dtype."""
        rotary_dim = self.cos.shape[-1]
        turned = heads[..., :rotary_dim]
        first, second = turned.chunk(2, dim=-1)
        turned = turned * self.cos + torch.cat((second, first), dim=-1) * self.sin
        if rotary_dim == heads.shape[-1]:
            return turned
        return torch.cat((turned, heads[..., rotary_dim:]), dim=-1)


@dataclass(frozen=True, slots=True)
class DeviceRotation:
    """cos and sin of a step's positions times the magnitude: [T, rotary_dim / 2] float32 each, contiguous. Elements i
    of a head's two halves rotate by angle i."""

    cos: torch.Tensor
    sin: torch.Tensor


RotationTable: TypeAlias = Union[Rotation, DeviceRotation, "Buffer"]
"""Result of `Operations.rotation`, for AttentionStep."""
