"""The operations of layers besides linear maps and what an AttentionStep computes, behind one interface: eager in
torch, or recorded for native kernels."""

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
from quire.layers.adapters import AdapterStack, StepSlots, add_adapted
from quire.layers.states import gated_delta_rule, gated_norm, short_convolution
from quire.parallel.interface import ProcessGroup


def require_equal_widths(heads: HeadWeights, backend: str) -> None:
    """Raise ConfigError for values of another width than the keys', which `backend` does not compute."""
    shape = heads.shape
    if shape.value_width != shape.head_dim:
        raise ConfigError(
            f"attention_backend={backend!r} computes values as wide as keys ({shape.head_dim}), not "
            f"{shape.value_width}; attention_backend='torch' computes both",
            param="attention_backend",
        )


class Operations(Protocol):
    """The operations of layers besides linear maps and an AttentionStep's. A value has a row for each token, and all
    values of a model are of one kind, which its back end computes. Rows do not depend on one another, bit by bit, but
    through states."""

    def norm(self, weights: NormWeights, x: AnyValue) -> Value:
        """[T, size] -> [T, size]."""
        ...

    def norm_columns(self, weights: NormWeights, x: AnyValue, start: int) -> Value:
        """x, [T, width], its columns from `start` on normalised, as many as there are weights. x is used up."""
        ...

    def rotation(
        self, frequencies: RotaryFrequencies, positions: AnyValue, grid: Sequence[AnyValue] = ()
    ) -> RotationTable:
        """The rotation of these positions, for an AttentionStep. grid: the positions of axes 1 and 2
        (`frequencies.axes`), or none: those of axis 0."""
        ...

    def check_heads(self, heads: HeadWeights) -> None:
        """Raises ConfigError for heads that the AttentionStep does not compute."""
        ...

    def check_latent(self, shape: LatentShape) -> None:
        """Raises ConfigError for latents that the AttentionStep does not compute."""
        ...

    def check_index(self, shape: IndexShape) -> None:
        """Raises ConfigError for an indexer that the AttentionStep does not compute."""
        ...

    def gather_rows(self, x: AnyValue, rows: AnyValue) -> Value:
        """[T, width] -> [R, width], the rows that are read. x is used up."""
        ...

    def add(self, x: AnyValue, y: AnyValue) -> Value:
        """x + y, [T, width] each."""
        ...

    def multiply(self, x: AnyValue, y: AnyValue) -> Value:
        """x * y, element by element, [T, width] each."""
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
        """[T, num_experts] -> [T, 2 * top_k] float32: the numbers of each token's experts, ascending, then their
        weights."""
        ...

    def gate_rows(self, x: AnyValue, gate: AnyValue) -> Value:
        """[T, width], [T, 1] -> [T, width]: x * sigmoid(gate), a factor for each row."""
        ...

    def short_convolution(self, weights: ConvolutionWeights, x: AnyValue, states: StepStates | None) -> Value:
        """A convolution over successive tokens of each sequence, causal: [T, channels] -> [T, channels]. states: the
        step's (None while recording)."""
        ...

    def gated_delta_rule(self, rule: DeltaRule, qkv: AnyValue, gates: AnyValue, states: StepStates | None) -> Value:
        """qkv: [T, 2 * num_key_heads * key_dim + num_value_heads * value_dim], query, key and value heads. gates: [T, 2
        * num_value_heads], for the updates and for the decay. states: the step's (None while recording). Returns [T,
        num_value_heads * value_dim]."""
        ...

    def gated_norm(self, weights: GatedNormWeights, x: AnyValue, gate: AnyValue) -> Value:
        """[T, heads * size] each -> [T, heads * size], each head by itself."""
        ...

    def all_reduce(self, group: ProcessGroup, x: AnyValue) -> Value:
        """The sum of the ranks' x, [T, width] each."""
        ...

    def all_gather(self, group: ProcessGroup, x: AnyValue, width: int) -> Value:
        """The ranks' x side by side, [T, width]: each has ceil(width / ranks) columns, the last ones may have fewer."""
        ...

    def norm_shares(self, group: ProcessGroup, norms: Sequence[NormWeights], x: AnyValue) -> Value:
        """x, [T, width], whose first columns are shares of rows that the norms (RMSNorms with weights) normalise whole,
        one norm behind the other, normalised. The shares are equally large, and each is on equally many ranks: the mean
        of their means is that of the whole. x is used up."""
        ...

    def add_adapted(self, stack: AdapterStack, x: AnyValue, y: AnyValue, slots: Any) -> Value:
        """y + what the adapters in the slots of x's rows add to the products y of x. slots: `Adapters.step`. y is used
        up."""
        ...

    def upcast_logits(self, x: AnyValue) -> Value:
        """Logits in the dtype that the sampler takes: float32; on a device as they are."""
        ...


class SharedOperations:
    """The operations that torch computes in the same way on every device."""

    def norm(self, weights: NormWeights, x: torch.Tensor) -> torch.Tensor:
        """The norm of a back end: Operations.norm."""
        raise NotImplementedError

    def norm_columns(self, weights: NormWeights, x: torch.Tensor, start: int) -> torch.Tensor:
        part = x[:, start : start + weights.size]
        part.copy_(self.norm(weights, part))
        return x

    def check_latent(self, shape: LatentShape) -> None:
        """All are computed."""

    def check_index(self, shape: IndexShape) -> None:
        """All are computed."""

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

    def gate_rows(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return experts.gate_rows(x, gate)

    def all_reduce(self, group: ProcessGroup, x: torch.Tensor) -> torch.Tensor:
        return group.all_reduce(x)

    def all_gather(self, group: ProcessGroup, x: torch.Tensor, width: int) -> torch.Tensor:
        return gather_columns(group, width, x)

    def norm_shares(self, group: ProcessGroup, norms: Sequence[NormWeights], x: torch.Tensor) -> torch.Tensor:
        return norm_shares(group, norms, x)

    def add_adapted(self, stack: AdapterStack, x: torch.Tensor, y: torch.Tensor, slots: StepSlots) -> torch.Tensor:
        return add_adapted(stack, x, y, slots)


def gather_columns(group: ProcessGroup, width: int, x: torch.Tensor) -> torch.Tensor:
    """`Operations.all_gather` in torch."""
    padded = F.pad(x, (0, -(-width // group.size) - x.shape[1]))
    return group.all_gather(padded, dim=1)[:, :width]


def norm_shares(group: ProcessGroup, norms: Sequence[NormWeights], x: torch.Tensor) -> torch.Tensor:
    """`Operations.norm_shares` in torch."""
    parts = x.split([*(norm.size for norm in norms), x.shape[1] - sum(norm.size for norm in norms)], dim=1)
    wide = [part.float() for part in parts[: len(norms)]]
    squares = torch.cat([(part * part).mean(-1, keepdim=True) for part in wide], dim=1)
    means = (group.all_reduce(squares) / group.size).split(1, dim=1)
    for norm, part, values, mean in zip(norms, parts, wide, means, strict=False):
        assert norm.weight is not None, "these norms have weights"
        part.copy_((values * torch.rsqrt(mean + norm.epsilon)).to(x.dtype) * norm.weight)
    return x


class TorchOperations(SharedOperations):
    """The Operations of plain torch, computed at once."""

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
        """All are computed."""

    def upcast_logits(self, x: torch.Tensor) -> torch.Tensor:
        return x.float()
