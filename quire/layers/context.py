"""Context that layers are built with, and slots for checkpoint tensors."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from quire.kernels.arguments import CacheScale
from quire.layers.adapters import AdapterPlace, Adapters
from quire.layers.expert_balance import ExpertBalancer
from quire.layers.experts import ExpertCounters
from quire.layers.operations import Operations
from quire.parallel.interface import ExpertExchange, ProcessGroup
from quire.parallel.single import SINGLE_RANK
from quire.parallel.stage import WHOLE_MODEL, Stage
from quire.quantization.integer_weight import LoadWeight
from quire.quantization.interface import LinearMethod


@dataclass(frozen=True, slots=True)
class LayerContext:
    """Context of every layer. dtype, device: type and place of activations and norm weights.
    cache_dtype: dtype of keys and values, a key of CACHE_DTYPE_BYTES. group: ranks that share each layer. operations:
    all but linear maps and attention. linear, vocabulary, positions: storage of linear layers, vocabulary matrices, and
    position tables (and routers). expert_counts: counters of the experts' rows, or None. cache_scales: scales of an fp8
    cache by layer. adapters: model's adapters, or None. stage: layers that this rank computes. expert_placement,
    balancer, dealt_to: see LoadConfig. exchange: with other replicas' experts, or None."""

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
    balancer: ExpertBalancer | None = None
    dealt_to: int = 1
    exchange: ExpertExchange | None = None

    def replicated(self) -> LayerContext:
        """Copy for layers that every rank computes entirely."""
        return replace(self, group=SINGLE_RANK)


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """Target of one checkpoint tensor. shape: the checkpoint's. load: copies this rank's share of such a tensor (any
    dtype), or of a quantised one of `matrix_shape`. nbytes: stored bytes of the share. dummy_mean, dummy_std: random
    weights. transposed: the checkpoint stores [in, out]. turned: it may store [in, out] although `shape` is [out, in].
    adapter: target of adapters, or None."""

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
        """[out, in], the shape in quantised checkpoints of every family."""
        return (*self.shape[:-2], self.shape[-1], self.shape[-2]) if self.transposed else self.shape


WeightSlots = dict[str, WeightSlot]
"""Slots by checkpoint name, relative to the layer's."""


def prefixed(prefix: str, slots: WeightSlots) -> WeightSlots:
    return {f"{prefix}.{name}": slot for name, slot in slots.items()}
