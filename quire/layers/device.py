"""Operations on a GPU: Triton kernels between the matrix products, attention as the device back end computes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from quire.attention.device_batch import DeviceStates, StepStates
from quire.attention.interface import StateStep
from quire.attention.latent import IndexShape, LatentExpansion, LatentShape
from quire.kernels.arguments import (
    ConvolutionWeights,
    DeltaRule,
    GatedNormWeights,
    HeadWeights,
    NormWeights,
    RotaryFrequencies,
)
from quire.kernels.triton.encoder_attention import attend
from quire.kernels.triton.linear_state import gated_delta_rule, gated_norm, short_convolution
from quire.kernels.triton.norm import norm
from quire.kernels.triton.rotary import rotation_angles
from quire.layers.encoder_operations import EncoderHeads
from quire.layers.operations import SharedOperations, require_equal_widths
from quire.layers.rotation import DeviceRotation

if TYPE_CHECKING:
    from quire.attention.triton_backend import TritonAttentionStep, TritonEncoderStep


class DeviceCacheOperations:
    """CacheOperations and `Operations.attend` over tensors of one device."""

    def attend(
        self, heads: HeadWeights, qkv: torch.Tensor, rotation: DeviceRotation | None, step: TritonAttentionStep
    ) -> torch.Tensor:
        return step.attend(heads, qkv, rotation, None)

    def write_kv(
        self, heads: HeadWeights, key_value: torch.Tensor, rotation: DeviceRotation | None, step: TritonAttentionStep
    ) -> None:
        step.write_kv(heads, key_value, rotation)

    def attend_cached(
        self, heads: HeadWeights, query: torch.Tensor, rotation: DeviceRotation | None, step: TritonAttentionStep
    ) -> torch.Tensor:
        return step.attend_cached(heads, query, rotation, None)

    def attend_latent(
        self,
        shape: LatentShape,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        rotation: DeviceRotation | None,
        step: TritonAttentionStep,
        selected: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return step.attend_latent(shape, inputs, rotation, selected, None)

    def attend_expanded(
        self,
        shape: LatentShape,
        expansion: LatentExpansion,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        rotation: DeviceRotation | None,
        step: TritonAttentionStep,
    ) -> torch.Tensor:
        return step.attend_expanded(shape, expansion, inputs, rotation, None)

    def select_keys(
        self,
        shape: IndexShape,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        rotation: DeviceRotation | None,
        step: TritonAttentionStep,
    ) -> torch.Tensor:
        selected = torch.empty(len(inputs[0]), shape.top, dtype=torch.int32, device=inputs[0].device)
        step.select_keys(shape, inputs, rotation, selected)
        return selected

    def check_index(self, shape: IndexShape) -> None:
        """All are computed."""

    def check_latent(self, shape: LatentShape) -> None:
        """All are computed."""


class DeviceEncoderOperations:
    """EncoderOperations over tensors of one device."""

    def attend_encoder(
        self, heads: EncoderHeads, qkv: torch.Tensor, rotation: DeviceRotation | None, step: TritonEncoderStep
    ) -> torch.Tensor:
        turn = None if rotation is None else (rotation.cos, rotation.sin)
        return attend(qkv, turn, step.query_start, heads.num_heads, heads.scale, heads.window)


class DeviceStateOperations:
    """StateOperations over tensors of one device."""

    def short_convolution(
        self, weights: ConvolutionWeights, x: torch.Tensor, states: StepStates | None
    ) -> torch.Tensor:
        out = torch.empty_like(x)
        _of_device(states).compute_states(short_convolution, weights, x, out)
        return out

    def gated_delta_rule(
        self, rule: DeltaRule, qkv: torch.Tensor, gates: torch.Tensor, states: StepStates | None
    ) -> torch.Tensor:
        out = qkv.new_empty(len(qkv), rule.num_value_heads * rule.value_dim)
        _of_device(states).compute_states(gated_delta_rule, rule, qkv, gates, out)
        return out

    def gated_norm(self, weights: GatedNormWeights, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return gated_norm(weights, x, gate)


def _of_device(states: StepStates | None) -> DeviceStates:
    assert states is not None, "a step of a model with states brings them"
    assert not isinstance(states, StateStep), "on the device"
    return states


@dataclass(frozen=True, slots=True)
class DeviceLayers:
    """The choice of a model on `device` (a GPU, or the host in Triton's interpreter). batch_invariant: matrix products
    whose rows have the same bits whatever else is in the batch, at some cost in speed. converts_e4m3,
    rounds_activations: as PackedDeviceLinear has them."""

    device: torch.device
    batch_invariant: bool = False
    converts_e4m3: bool = False
    rounds_activations: bool = False


class DeviceOperations(DeviceCacheOperations, DeviceEncoderOperations, DeviceStateOperations, SharedOperations):
    """Instance of Operations over tensors of one device. Nothing in it waits for the device."""

    def norm(self, weights: NormWeights, x: torch.Tensor) -> torch.Tensor:
        return norm(x, weights.weight, weights.bias, weights.epsilon, centred=weights.centred)

    def norm_columns(self, weights: NormWeights, x: torch.Tensor, start: int) -> torch.Tensor:
        part = x[:, start : start + weights.size]
        part.copy_(self.norm(weights, part))
        return x

    def rotation(
        self, frequencies: RotaryFrequencies, positions: torch.Tensor, grid: Sequence[torch.Tensor] = ()
    ) -> DeviceRotation:
        turns = frequencies.inverse_frequencies, frequencies.magnitude
        return DeviceRotation(*rotation_angles(positions, *turns, grid, frequencies.axes))

    def check_heads(self, heads: HeadWeights) -> None:
        require_equal_widths(heads, "triton")

    def upcast_logits(self, x: torch.Tensor) -> torch.Tensor:
        """The logits unchanged: the sampling kernels upcast what they read, and half the bytes are written and read."""
        return x
