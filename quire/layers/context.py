"""The context that every layer is built with, and the slots that a checkpoint's tensors are loaded into."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from quire.kernels.arguments import CacheScale
from quire.layers.adapters import AdapterPlace, Adapters
from quire.layers.experts import ExpertCounters
from quire.layers.operations import Operations
from quire.parallel.interface import ProcessGroup
from quire.parallel.single import SINGLE_RANK
from quire.parallel.stage import WHOLE_MODEL, Stage
from quire.quantization.integer_weight import LoadWeight
from quire.quantization.interface import LinearMethod


@dataclass(frozen=True, slots=True)
class LayerContext:
    """The context that every layer is built with.

    dtype, device: the activations', and those of norms' weights. cache_dtype: elements of keys and values, a key of
    CACHE_DTYPE_BYTES. group: the ranks that share each layer. operations: computes everything but the linear maps and
    an AttentionStep's operations. It and the linear methods take one kind of values. linear, vocabulary, positions:
    methods that store the weights of linear layers, the matrices of the vocabulary, and tables of learned positions
    (and what else is never quantised: routers). expert_counts: counters of the rows that each expert computes (None:
    nothing is counted). cache_scales: by layer, the scales that a checkpoint may bring for an fp8 cache, put there by
    layers with keys and values. adapters: those of the layers (None: the model takes none). stage: the layers that
    this rank computes. expert_placement: how whole experts are dealt to ranks (None: each rank has a slice of each).
    dealt_to: neighbouring ranks with the same key heads, of which each keeps a part of a sequence's tokens.
    """

    dtype: torch.dtype
    device: torch.device
    cache_dtype: str
    group: ProcessGroup
    operations: Operations
    linear: LinearMethod
    vocabulary: LinearMethod
    positions: LinearMethod
    expert_counts: ExpertCounters | None = None
    cache_scales: dict[int, CacheScale] = field(default_factory=dict)
    adapters: Adapters | None = None
    stage: Stage = WHOLE_MODEL
    expert_placement: str | None = None
    dealt_to: int = 1

    def replicated(self) -> LayerContext:
        """This context for a layer that every rank computes whole."""
        return replace(self, group=SINGLE_RANK)


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """A place for one tensor of a checkpoint.

    shape: the checkpoint's, whole (not this rank's share). load: copies this rank's share of a tensor of that shape, of
    any dtype, to where the layer keeps it, or a quantised one of `matrix_shape`; of a FileTensor it reads no more than
    that. nbytes: bytes that the share takes there. dummy_mean, dummy_std: mean and deviation of random weights.
    transposed: the checkpoint's tensor is [in, out]. turned: it may be [in, out] although `shape` is [out, in]; a
    square one is not. adapter: place of the matrix's adapters (None: it takes none).
    """

    shape: tuple[int, ...]
    load: LoadWeight
    nbytes: int
    dummy_mean: float = 0.0
    dummy_std: float = 0.02
    transposed: bool = False
    turned: bool = False
    adapter: AdapterPlace | None = None

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """[out, in], which quantised checkpoints keep to whatever the plain ones of a family do."""
        return (*self.shape[:-2], self.shape[-1], self.shape[-2]) if self.transposed else self.shape


WeightSlots = dict[str, WeightSlot]
"""Slots by the tensor's name in a checkpoint, relative to the layer's own."""


def prefixed(prefix: str, slots: WeightSlots) -> WeightSlots:
    """The same slots one level up: `prefix` and a dot before each name."""
    return {f"{prefix}.{name}": slot for name, slot in slots.items()}
