"""The operations of layers besides linear maps, behind one interface: eager in torch, or recorded for native
kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, Union

import torch
import torch.nn.functional as F

from quire.attention.interface import AttentionStep, PlannedStep
from quire.errors import ConfigError
from quire.kernels.arguments import HeadWeights, NormWeights, RotaryFrequencies
from quire.kernels.value import Indices, ReadRows, Value
from quire.layers.adapters import AdapterStack, StepSlots, add_adapted
from quire.layers.cache_operations import CacheOperations, TorchCacheOperations
from quire.layers.encoder_operations import EncoderOperations, TorchEncoderOperations
from quire.layers.experts import ExpertOperations, TorchExpertOperations
from quire.layers.rotation import DeviceRotation, Rotation
from quire.layers.states import StateOperations, TorchStates
from quire.parallel.interface import ProcessGroup

if TYPE_CHECKING:
    from quire.kernels.cpu.recorder import Buffer


def require_equal_widths(heads: HeadWeights, backend: str) -> None:
    """Raise ConfigError for values of another width than the keys', which `backend` does not compute."""
    shape = heads.shape
    if shape.value_width != shape.head_dim:
        raise ConfigError(
            f"attention_backend={backend!r} computes values as wide as keys ({shape.head_dim}), not "
            f"{shape.value_width}; attention_backend='torch' computes both",
            param="attention_backend",
        )


ValueT = TypeVar("ValueT")
IndicesT_contra = TypeVar("IndicesT_contra", contravariant=True)
RowsT_contra = TypeVar("RowsT_contra", contravariant=True)
RotationT = TypeVar("RotationT")
StepT_contra = TypeVar("StepT_contra", contravariant=True)


class Operations(
    EncoderOperations[ValueT, RotationT, StepT_contra],
    CacheOperations[ValueT, RotationT, StepT_contra],
    ExpertOperations[ValueT],
    StateOperations[ValueT],
    Protocol[ValueT, IndicesT_contra, RowsT_contra, RotationT, StepT_contra],
):
    """The operations of layers besides linear maps, over one kind of values; a value has a row for each token. Rows do
    not depend on one another, bit by bit, but through attention and states."""

    def norm(self, weights: NormWeights, x: ValueT) -> ValueT:
        """[T, size] -> [T, size]."""
        ...

    def norm_columns(self, weights: NormWeights, x: ValueT, start: int) -> ValueT:
        """x, [T, width], its columns from `start` on normalised, as many as there are weights. x is used up."""
        ...

    def rotation(
        self, frequencies: RotaryFrequencies, positions: IndicesT_contra, grid: Sequence[IndicesT_contra] = ()
    ) -> RotationT:
        """The rotation of these positions, for `attend`. grid: the positions of axes 1 and 2 (`frequencies.axes`), or
        none: those of axis 0."""
        ...

    def attend(self, heads: HeadWeights, qkv: ValueT, rotation: RotationT | None, step: StepT_contra) -> ValueT:
        """qkv: [T, (num_heads + num_kv_heads) * head_dim + num_kv_heads * value_width], query, key and value heads;
        used up. rotation: of the positions (None: none is applied). step: of an attention back end. Returns [T,
        num_heads * value_width]."""
        ...

    def check_heads(self, heads: HeadWeights) -> None:
        """Raises ConfigError for heads that `attend` does not compute."""
        ...

    def gather_rows(self, x: ValueT, rows: RowsT_contra) -> ValueT:
        """[T, width] -> [R, width], the rows that are read. x is used up."""
        ...

    def add(self, x: ValueT, y: ValueT) -> ValueT:
        """x + y, [T, width] each."""
        ...

    def multiply(self, x: ValueT, y: ValueT) -> ValueT:
        """x * y, element by element, [T, width] each."""
        ...

    def gate(self, x: ValueT, y: ValueT) -> ValueT:
        """x * sigmoid(y), [T, width] each."""
        ...

    def scale(self, x: ValueT, factor: float) -> ValueT:
        """factor * x."""
        ...

    def soft_cap(self, x: ValueT, cap: float) -> ValueT:
        """cap * tanh(x / cap), computed in float32."""
        ...

    def all_reduce(self, group: ProcessGroup, x: ValueT) -> ValueT:
        """The sum of the ranks' x, [T, width] each."""
        ...

    def all_gather(self, group: ProcessGroup, x: ValueT, width: int) -> ValueT:
        """The ranks' x side by side, [T, width]: each has ceil(width / ranks) columns, the last ones may have fewer."""
        ...

    def norm_shares(self, group: ProcessGroup, norms: Sequence[NormWeights], x: ValueT) -> ValueT:
        """x, [T, width], whose first columns are shares of rows that the norms (RMSNorms with weights) normalise whole,
        one norm behind the other, normalised. The shares are equally large, and each is on equally many ranks: the mean
        of their means is that of the whole. x is used up."""
        ...

    def add_adapted(self, stack: AdapterStack, x: ValueT, y: ValueT, slots: Any) -> ValueT:
        """y + what the adapters in the slots of x's rows add to the products y of x. slots: `Adapters.step`. y is used
        up."""
        ...

    def upcast_logits(self, x: ValueT) -> ValueT:
        """Logits in the dtype that the sampler takes: float32; on a device as they are."""
        ...


RotationTable: TypeAlias = Union[Rotation, DeviceRotation, "Buffer"]
"""What `Operations.rotation` returned."""

LayerOperations: TypeAlias = Operations[Value, Indices, ReadRows, RotationTable, PlannedStep]
"""Operations as layers see them: values of one kind, whichever it is."""


class SharedOperations(TorchExpertOperations):
    """The operations that torch computes in the same way on every device."""

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


class TorchOperations(TorchCacheOperations, TorchEncoderOperations, TorchStates, SharedOperations):
    """The Operations of plain torch, computed at once."""

    def norm(self, weights: NormWeights, x: torch.Tensor) -> torch.Tensor:
        if weights.centred:
            return F.layer_norm(x, (weights.size,), weights.weight, weights.bias, weights.epsilon)
        wide = x.float()
        scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + weights.epsilon)
        scaled = (wide * scale).to(x.dtype if weights.weight is None else weights.weight.dtype)
        return scaled if weights.weight is None else (scaled * weights.weight).to(x.dtype)

    def norm_columns(self, weights: NormWeights, x: torch.Tensor, start: int) -> torch.Tensor:
        part = x[:, start : start + weights.size]
        part.copy_(self.norm(weights, part))
        return x

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

    def attend(
        self, heads: HeadWeights, qkv: torch.Tensor, rotation: Rotation | None, step: AttentionStep
    ) -> torch.Tensor:
        width = heads.shape.num_heads * heads.shape.head_dim
        self.write_kv(heads, qkv[:, width:], rotation, step)
        return self.attend_cached(heads, qkv[:, :width], rotation, step)

    def check_heads(self, heads: HeadWeights) -> None:
        """All are computed."""

    def upcast_logits(self, x: torch.Tensor) -> torch.Tensor:
        return x.float()
