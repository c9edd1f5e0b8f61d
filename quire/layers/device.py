"""Operations on a GPU, with Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.attention.device_batch import DeviceStates, StepStates
from quire.attention.interface import StateStep
from quire.kernels.arguments import (
    ConvolutionWeights,
    DeltaRule,
    GatedNormWeights,
    HeadWeights,
    NormWeights,
    RotaryFrequencies,
    Routing,
)
from quire.kernels.rotation import DeviceRotation
from quire.kernels.triton.linear_state import gated_delta_rule, gated_norm, short_convolution
from quire.kernels.triton.norm import norm
from quire.kernels.triton.rotary import rotation_angles
from quire.kernels.triton.routing import gate_rows, route
from quire.layers.adapters import AdapterStack
from quire.layers.device_adapters import DeviceSlots, add_on_device, look_up_on_device
from quire.layers.operations import SharedOperations, require_equal_widths


@dataclass(frozen=True, slots=True)
class DeviceLayers:
    """Options for loading a model's layers on `device` (a GPU, or the host in Triton's interpreter). batch_invariant:
    rows of products have the same bits in any batch, at some cost. converts_e4m3, rounds_activations: see
    PackedDeviceLinear."""

    device: torch.device
    batch_invariant: bool = False
    converts_e4m3: bool = False
    rounds_activations: bool = False


class DeviceOperations(SharedOperations):
    """Layers' operations besides linear maps and attention, on a GPU; no call waits for the device."""

    def norm(self, weights: NormWeights, x: torch.Tensor) -> torch.Tensor:
        return norm(x, weights.weight, weights.bias, weights.epsilon, centred=weights.centred)

    def rotation(
        self, frequencies: RotaryFrequencies, positions: torch.Tensor, grid: Sequence[torch.Tensor] = ()
    ) -> DeviceRotation:
        turns = frequencies.inverse_frequencies, frequencies.magnitude
        return DeviceRotation(*rotation_angles(positions, *turns, grid, frequencies.axes))

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

    def route(self, routing: Routing, logits: torch.Tensor) -> torch.Tensor:
        return route(routing, logits)

    def gate_rows(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return gate_rows(x, gate)

    def add_adapted(self, stack: AdapterStack, x: torch.Tensor, y: torch.Tensor, slots: DeviceSlots) -> torch.Tensor:
        return add_on_device(stack, x, y, slots)

    def add_looked_up(
        self, adapters: AdapterStack, indices: torch.Tensor, y: torch.Tensor, slots: DeviceSlots
    ) -> torch.Tensor:
        return look_up_on_device(adapters, indices, y, slots)

    def check_heads(self, heads: HeadWeights) -> None:
        require_equal_widths(heads, "triton")

    def upcast_logits(self, x: torch.Tensor) -> torch.Tensor:
        """Logits unchanged, for the sampling kernels to convert."""
        return x


def _of_device(states: StepStates | None) -> DeviceStates:
    assert states is not None, "a step of a model with states brings them"
    assert not isinstance(states, StateStep), "on the device"
    return states
