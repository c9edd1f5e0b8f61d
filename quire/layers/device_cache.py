"""Operations over the KV cache on a GPU: calls of the step that the device's attention back end planned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from quire.attention.latent import IndexShape, LatentExpansion, LatentShape

if TYPE_CHECKING:
    from quire.kernels.arguments import HeadWeights


@dataclass(frozen=True, slots=True)
class DeviceRotation:
    """cos and sin of one step's positions, times the magnitude: [T, rotary_dim / 2] float32 each. Element i of a head's
    first half turns with element i of the second by angle i."""

    cos: torch.Tensor
    sin: torch.Tensor


class DeviceAttentionStep(Protocol):
    """One step of the device's attention back end. Results are `out` when that is given."""

    def attend(
        self, heads: HeadWeights, qkv: torch.Tensor, rotation: DeviceRotation | None, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Head norms, rotation, the write to the pages and attention. qkv: [T, (num_heads + 2 num_kv_heads) *
        head_dim]; used up. Returns [T, num_heads * head_dim]."""
        ...

    def write_kv(self, heads: HeadWeights, key_value: torch.Tensor, rotation: DeviceRotation | None) -> None:
        """The first half of `attend`. key_value: [T, 2 num_kv_heads * head_dim]; used up."""
        ...

    def attend_cached(
        self, heads: HeadWeights, query: torch.Tensor, rotation: DeviceRotation | None, out: torch.Tensor | None
    ) -> torch.Tensor:
        """The second half of `attend`. query: [T, num_heads * head_dim]; used up."""
        ...

    def attend_latent(
        self,
        shape: LatentShape,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        rotation: DeviceRotation | None,
        selected: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """As `CacheOperations.attend_latent`."""
        ...

    def attend_expanded(
        self,
        shape: LatentShape,
        expansion: LatentExpansion,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        rotation: DeviceRotation | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """As `CacheOperations.attend_expanded`."""
        ...

    def select_keys(
        self,
        shape: IndexShape,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        rotation: DeviceRotation | None,
        selected: torch.Tensor,
    ) -> None:
        """As `CacheOperations.select_keys`. selected: [T, top] int32, what is returned there."""
        ...


class DeviceCacheOperations:
    """CacheOperations and `Operations.attend` over tensors of one device."""

    def attend(
        self, heads: HeadWeights, qkv: torch.Tensor, rotation: DeviceRotation | None, step: DeviceAttentionStep
    ) -> torch.Tensor:
        return step.attend(heads, qkv, rotation, None)

    def write_kv(
        self, heads: HeadWeights, key_value: torch.Tensor, rotation: DeviceRotation | None, step: DeviceAttentionStep
    ) -> None:
        step.write_kv(heads, key_value, rotation)

    def attend_cached(
        self, heads: HeadWeights, query: torch.Tensor, rotation: DeviceRotation | None, step: DeviceAttentionStep
    ) -> torch.Tensor:
        return step.attend_cached(heads, query, rotation, None)

    def attend_latent(
        self,
        shape: LatentShape,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        rotation: DeviceRotation | None,
        step: DeviceAttentionStep,
        selected: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return step.attend_latent(shape, inputs, rotation, selected, None)

    def attend_expanded(
        self,
        shape: LatentShape,
        expansion: LatentExpansion,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        rotation: DeviceRotation | None,
        step: DeviceAttentionStep,
    ) -> torch.Tensor:
        return step.attend_expanded(shape, expansion, inputs, rotation, None)

    def select_keys(
        self,
        shape: IndexShape,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        rotation: DeviceRotation | None,
        step: DeviceAttentionStep,
    ) -> torch.Tensor:
        selected = torch.empty(len(inputs[0]), shape.top, dtype=torch.int32, device=inputs[0].device)
        step.select_keys(shape, inputs, rotation, selected)
        return selected

    def check_index(self, shape: IndexShape) -> None:
        """All are computed."""

    def check_latent(self, shape: LatentShape) -> None:
        """All are computed."""
