"""The operations of layers besides linear maps, behind one interface: eager in torch, or recorded for native
kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from quire.attention.interface import LayerAttention
from quire.kernels.value import Indices, Value


@dataclass(frozen=True, slots=True)
class NormWeights:
    """weight, bias: [size] in the activations' dtype, or None for ones and zeros. centred: LayerNorm, which subtracts
    the mean; else RMSNorm."""

    size: int
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    epsilon: float
    centred: bool


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """One layer's attention between its two projections. query_norm, key_norm: RMSNorms over each head, or None."""

    shape: LayerAttention
    query_norm: NormWeights | None
    key_norm: NormWeights | None


@dataclass(frozen=True, slots=True)
class RotaryFrequencies:
    """inverse_frequencies: [rotary_dim / 2] float32. magnitude: factor of cos and sin."""

    inverse_frequencies: torch.Tensor
    magnitude: float
    dtype: torch.dtype


class Operations(Protocol):
    """The operations of layers; every tensor has T rows, one per token."""

    def norm(self, weights: NormWeights, x: Value) -> Value:
        """[T, size] -> [T, size]."""
        ...

    def rotation(self, frequencies: RotaryFrequencies, positions: Indices) -> Any:
        """The rotation of these positions, for `attend`."""
        ...

    def attend(self, heads: HeadWeights, qkv: Value, rotation: Any, step: Any) -> Value:
        """qkv: [T, (num_heads + 2 num_kv_heads) * head_dim], query, key and value heads; used up. rotation: of the
        positions (None: none is applied). step: of an attention back end. Returns [T, num_heads * head_dim]."""
        ...

    def upcast_logits(self, x: Value) -> Value:
        """Logits in the dtype that the sampler takes: float32; on a device as they are."""
        ...


@dataclass(frozen=True, slots=True)
class Rotation:
    """cos and sin of one step's positions, [T, 1, rotary_dim], the sine's first half negated."""

    cos: torch.Tensor
    sin: torch.Tensor

    def apply(self, heads: torch.Tensor) -> torch.Tensor:
        """Rotate the leading elements of each head. heads: [T, num_heads, head_dim] -> the same shape and dtype."""
        rotary_dim = self.cos.shape[-1]
        turned = heads[..., :rotary_dim]
        first, second = turned.chunk(2, dim=-1)
        turned = turned * self.cos + torch.cat((second, first), dim=-1) * self.sin
        if rotary_dim == heads.shape[-1]:
            return turned
        return torch.cat((turned, heads[..., rotary_dim:]), dim=-1)


class TorchOperations:
    """The Operations of plain torch, computed at once."""

    def norm(self, weights: NormWeights, x: torch.Tensor) -> torch.Tensor:
        if weights.centred:
            return F.layer_norm(x, (weights.size,), weights.weight, weights.bias, weights.epsilon)
        wide = x.float()
        scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + weights.epsilon)
        scaled = (wide * scale).to(x.dtype)
        return scaled if weights.weight is None else scaled * weights.weight

    def rotation(self, frequencies: RotaryFrequencies, positions: torch.Tensor) -> Rotation:
        angles = positions[:, None].float() * frequencies.inverse_frequencies
        cos, sin = angles.cos() * frequencies.magnitude, angles.sin() * frequencies.magnitude
        return Rotation(
            torch.cat((cos, cos), dim=-1).to(frequencies.dtype)[:, None],
            torch.cat((-sin, sin), dim=-1).to(frequencies.dtype)[:, None],
        )

    def attend(self, heads: HeadWeights, qkv: torch.Tensor, rotation: Rotation | None, step: Any) -> torch.Tensor:
        shape = heads.shape
        all_heads = qkv.view(qkv.shape[0], shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
        turned, value = all_heads.split((shape.num_heads + shape.num_kv_heads, shape.num_kv_heads), dim=1)
        if heads.query_norm is not None and heads.key_norm is not None:
            query, key = turned.split((shape.num_heads, shape.num_kv_heads), dim=1)
            turned = torch.cat((self.norm(heads.query_norm, query), self.norm(heads.key_norm, key)), dim=1)
        if rotation is not None:
            turned = rotation.apply(turned)
        query, key = turned.split((shape.num_heads, shape.num_kv_heads), dim=1)
        attended: torch.Tensor = step.attend(shape, query, key, value)
        return attended.flatten(1)

    def upcast_logits(self, x: torch.Tensor) -> torch.Tensor:
        return x.float()
