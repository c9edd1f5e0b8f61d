"""Interface of the layers' operations besides linear maps and attention: eager in torch, or recorded for native
kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from quire.attention.device_batch import StepStates
from quire.attention.interface import StateStep
from quire.errors import ConfigError
from quire.kernels import experts, reference
from quire.kernels.arguments import (
    ConvolutionWeights,
    DeltaRule,
    GatedNormWeights,
    HeadWeights,
    IndexShape,
    LatentShape,
    NormWeights,
    RotaryFrequencies,
    Routing,
)
from quire.kernels.rotation import Rotation, RotationTable
from quire.kernels.value import AnyValue, Value
from quire.layers.adapters import AdapterStack, add_adapted
from quire.layers.head_adapters import HeadAdapters
from quire.layers.saved_matrices import SavedMatrices
from quire.layers.states import gated_delta_rule, gated_norm, short_convolution
from quire.parallel.interface import ProcessGroup


def require_equal_widths(heads: HeadWeights, backend: str) -> None:
    """Raise ConfigError if values are not as wide as keys, which `backend` does not support."""
    shape = heads.shape
    if shape.value_width != shape.head_dim:
        raise ConfigError(
            f"attention_backend={backend!r} computes values as wide as keys ({shape.head_dim}), not "
            f"{shape.value_width}; attention_backend='torch' computes both",
            param="attention_backend",
        )


class Operations(Protocol):
    """Operations of layers besides linear maps and attention. Values have a row per token and are of the back end's
    kind. Rows are independent, bit by bit, except through states."""

    def norm(self, weights: NormWeights, x: AnyValue) -> Value:
        """[T, size] -> [T, size]."""
        ...

    def norm_columns(self, weights: NormWeights, x: AnyValue, start: int) -> Value:
        """Normalise columns of x, [T, width], from `start` on, one per weight; x is overwritten."""
        ...

    def rotation(
        self, frequencies: RotaryFrequencies, positions: AnyValue, grid: Sequence[AnyValue] = ()
    ) -> RotationTable:
        """Rotation of these positions for an AttentionStep. grid: positions of axes 1 and 2 (`frequencies.axes`);
        empty: `positions` hold on every axis."""
        ...

    def check_heads(self, heads: HeadWeights) -> None:
        """Raise ConfigError, as a layer is built, for heads that the AttentionStep does not support."""
        ...

    def check_latent(self, shape: LatentShape) -> None:
        """Raise ConfigError for latents that this back end cannot attend to."""
        ...

    def check_index(self, shape: IndexShape) -> None:
        """Raise ConfigError for an indexer that this back end lacks."""
        ...

    def gather_rows(self, x: AnyValue, rows: AnyValue) -> Value:
        """[T, width] -> [R, width], the read rows; x is overwritten."""
        ...

    def add(self, x: AnyValue, y: AnyValue) -> Value:
        """x + y, [T, width] each."""
        ...

    def multiply(self, x: AnyValue, y: AnyValue) -> Value:
        """Element-wise x * y, [T, width] each."""
        ...

    def gate(self, x: AnyValue, y: AnyValue) -> Value:
        """x * sigmoid(y), [T, width] each."""
        ...

    def scale(self, x: AnyValue, factor: float) -> Value:
        """factor * x."""
        ...

    def soft_cap(self, x: AnyValue, cap: float) -> Value:
        """cap * tanh(x / cap), computed in float32."""
        ...

    def route(self, routing: Routing, logits: AnyValue) -> Value:
        """[T, num_experts] -> [T, 2 * top_k] float32: numbers of each token's experts, ascending, then their
        weights."""
        ...

    def add_experts(self, parts: AnyValue, routing: AnyValue, residual: AnyValue, *, weighs_input: bool) -> Value:
        """residual + the weighted sum of results that experts leave apart (`ExpertWeights.apart`), the bits of
        `LinearMethod.apply_experts` on one rank. parts: [T, top_k * size]. The residual is overwritten."""
        ...

    def gate_rows(self, x: AnyValue, gate: AnyValue) -> Value:
        """[T, width], [T, 1] -> [T, width]: x * sigmoid(gate) per row."""
        ...

    def short_convolution(self, weights: ConvolutionWeights, x: AnyValue, states: StepStates | None) -> Value:
        """Causal convolution over each sequence's tokens: [T, channels] -> [T, channels]. states: None while
        recording."""
        ...

    def gated_delta_rule(self, rule: DeltaRule, qkv: AnyValue, gates: AnyValue, states: StepStates | None) -> Value:
        """Gated delta rule. qkv: [T, 2 * num_key_heads * key_dim + num_value_heads * value_dim]. gates: [T, 2 *
        num_value_heads], of updates and decay. states: None while recording. Returns [T, num_value_heads *
        value_dim]."""
        ...

    def gated_norm(self, weights: GatedNormWeights, x: AnyValue, gate: AnyValue) -> Value:
        """[T, heads * size] each -> [T, heads * size], per head."""
        ...

    def all_reduce(self, group: ProcessGroup, x: AnyValue) -> Value:
        """Sum of the ranks' x, [T, width] each."""
        ...

    def all_gather(self, group: ProcessGroup, x: AnyValue, width: int) -> Value:
        """Ranks' x side by side, [T, width]; each has ceil(width / ranks) columns, the last ones possibly fewer."""
        ...

    def norm_shares(self, group: ProcessGroup, norms: Sequence[NormWeights], x: AnyValue) -> Value:
        """Normalise the first columns of x, [T, width]: shares of rows that `norms` (RMSNorms, one after the other)
        cover whole."""
        ...

    def add_adapted(self, stack: AdapterStack, x: AnyValue, y: AnyValue, slots: Any) -> Value:
        """y plus the adapters' results for x's rows. slots: `Adapters.step`. y is overwritten."""
        ...

    def add_head_adapted(self, adapters: HeadAdapters | SavedMatrices, x: AnyValue, y: AnyValue, slots: Any) -> Value:
        """`add_adapted` for matrices per head, or whole ones; not on a device."""
        ...

    def add_looked_up(self, adapters: Any, indices: AnyValue, y: AnyValue, slots: Any) -> Value:
        """`add_adapted` for a table; adapters: `TablePlace.added`."""
        ...

    def upcast_logits(self, x: AnyValue) -> Value:
        """Logits in the sampler's dtype: float32; unchanged on a device."""
        ...


class SharedOperations:
    """Operations that torch computes alike on host and device; the base of both."""

    def norm(self, weights: NormWeights, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def norm_columns(self, weights: NormWeights, x: torch.Tensor, start: int) -> torch.Tensor:
        part = x[:, start : start + weights.size]
        part.copy_(self.norm(weights, part))
        return x

    def check_latent(self, shape: LatentShape) -> None:
        """Does nothing: all are supported."""

    def check_index(self, shape: IndexShape) -> None:
        """Does nothing: all are supported."""

    def gather_rows(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, rows)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    def multiply(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y

    def gate(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x.float() / (torch.exp(-y.float()) + 1.0)).to(x.dtype)

    def scale(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor

    def soft_cap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        return (torch.tanh(x.float() / cap) * cap).to(x.dtype)

    def route(self, routing: Routing, logits: torch.Tensor) -> torch.Tensor:
        return experts.route(routing, logits)

    def add_experts(
        self, parts: torch.Tensor, routing: torch.Tensor, residual: torch.Tensor, *, weighs_input: bool
    ) -> torch.Tensor:
        return experts.add_experts(parts, routing, residual, weighs_input=weighs_input)

    def gate_rows(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return experts.gate_rows(x, gate)

    def all_reduce(self, group: ProcessGroup, x: torch.Tensor) -> torch.Tensor:
        return group.all_reduce(x)

    def all_gather(self, group: ProcessGroup, x: torch.Tensor, width: int) -> torch.Tensor:
        return gather_columns(group, width, x)

    def norm_shares(self, group: ProcessGroup, norms: Sequence[NormWeights], x: torch.Tensor) -> torch.Tensor:
        return norm_shares(group, norms, x)

    def add_adapted(self, stack: AdapterStack, x: torch.Tensor, y: torch.Tensor, slots: Any) -> torch.Tensor:
        return add_adapted(stack, x, y, slots)

    def add_head_adapted(
        self, adapters: HeadAdapters | SavedMatrices, x: torch.Tensor, y: torch.Tensor, slots: Any
    ) -> torch.Tensor:
        return adapters.add(x, y, slots)

    def add_looked_up(self, adapters: Any, indices: torch.Tensor, y: torch.Tensor, slots: Any) -> torch.Tensor:
        found: torch.Tensor = adapters.add(indices, y, slots)
        return found


def gather_columns(group: ProcessGroup, width: int, x: torch.Tensor) -> torch.Tensor:
    padded = F.pad(x, (0, -(-width // group.size) - x.shape[1]))
    return group.all_gather(padded, dim=1)[:, :width]


def norm_shares(group: ProcessGroup, norms: Sequence[NormWeights], x: torch.Tensor) -> torch.Tensor:
    parts = x.split([*(norm.size for norm in norms), x.shape[1] - sum(norm.size for norm in norms)], dim=1)
    wide = [part.float() for part in parts[: len(norms)]]
    squares = torch.cat([(part * part).mean(-1, keepdim=True) for part in wide], dim=1)
    means = (group.all_reduce(squares) / group.size).split(1, dim=1)
    for norm, part, values, mean in zip(norms, parts, wide, means, strict=False):
        assert norm.weight is not None, "these norms have weights"
        part.copy_((values * torch.rsqrt(mean + norm.epsilon)).to(x.dtype) * norm.weight)
    return x


class TorchOperations(SharedOperations):
    """Operations of plain torch."""

    def norm(self, weights: NormWeights, x: torch.Tensor) -> torch.Tensor:
        return reference.norm(weights, x)

    def rotation(
        self, frequencies: RotaryFrequencies, positions: torch.Tensor, grid: Sequence[torch.Tensor] = ()
    ) -> Rotation:
        of_elements = positions[:, None]
        if grid:
            assert frequencies.axes is not None, "a rotation by a grid says which elements turn by which of its axes"
            of_elements = torch.stack((positions, *grid), dim=1).index_select(1, frequencies.axes)
        angles = of_elements.float() * frequencies.inverse_frequencies
        cos, sin = angles.cos() * frequencies.magnitude, angles.sin() * frequencies.magnitude
        return Rotation(
            torch.cat((cos, cos), dim=-1).to(frequencies.dtype)[:, None],
            torch.cat((-sin, sin), dim=-1).to(frequencies.dtype)[:, None],
        )

    def short_convolution(
        self, weights: ConvolutionWeights, x: torch.Tensor, states: StepStates | None
    ) -> torch.Tensor:
        assert isinstance(states, StateStep), "a step of a model with states brings them"
        return short_convolution(weights, x, states)

    def gated_delta_rule(
        self, rule: DeltaRule, qkv: torch.Tensor, gates: torch.Tensor, states: StepStates | None
    ) -> torch.Tensor:
        assert isinstance(states, StateStep), "a step of a model with states brings them"
        return gated_delta_rule(rule, qkv, gates, states)

    def gated_norm(self, weights: GatedNormWeights, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return gated_norm(weights, x, gate)

    def check_heads(self, heads: HeadWeights) -> None:
        """Does nothing: all are supported."""

    def upcast_logits(self, x: torch.Tensor) -> torch.Tensor:
        return x.float()
