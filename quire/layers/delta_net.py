"""Gated delta net of Qwen3-Next and Qwen 3.5: a layer with recurrent state instead of keys and values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from quire.attention.device_batch import StepStates
from quire.errors import ConfigError
from quire.kernels.arguments import ConvolutionWeights, DeltaRule, GatedNormWeights
from quire.kernels.value import ReadRows, Value
from quire.kv_cache.spec import LayerSpec, StateSpec
from quire.layers.context import LayerContext, WeightSlot, WeightSlots
from quire.layers.interleaved import shared_slot
from quire.layers.linear import ColumnParallelLinear, RowParallelLinear
from quire.quantization.integer_weight import WeightSource, copy_into


@dataclass(frozen=True, slots=True)
class DeltaNetShape:
    """Sizes of a gated delta net. width: taps of the convolution. num_spare: see `ConvolutionWeights`."""

    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    width: int
    num_spare: int = 0


class GatedDeltaNet:
    """x -> residual + output(norm(rule(convolution(qkv(x)), gates(x))) * silu(z(x))). layer: number in the cache.
    epsilon: the norm's. activation: after the convolution. projections_by_head, gates_by_head: the checkpoint has one
    matrix, rows grouped by key head, else two. Ranks share the key heads; raises ConfigError if they do not divide
    them."""

    def __init__(
        self,
        shape: DeltaNetShape,
        layer: int,
        *,
        epsilon: float,
        activation: str,
        projections_by_head: bool,
        gates_by_head: bool,
        context: LayerContext,
    ) -> None:
        rank, ranks = context.group.rank, context.group.size
        if shape.num_key_heads % ranks:
            raise ConfigError(
                f"tensor_parallel_size={ranks} is not possible for this model: it does not divide the "
                f"{shape.num_key_heads} key heads of the layers that keep a state",
                param="tensor_parallel_size",
            )
        self._operations, self._shape = context.operations, shape
        self._projections_by_head, self._gates_by_head = projections_by_head, gates_by_head
        size, heads = shape.hidden_size, shape.num_value_heads
        keys, wide = shape.num_key_heads * shape.key_dim, heads * shape.value_dim
        self._qkv = ColumnParallelLinear(size, (keys, keys, wide), bias=False, context=context)
        self._z = ColumnParallelLinear(size, (wide,), bias=False, context=context)
        self._gates = ColumnParallelLinear(
            size, (heads, heads), bias=False, context=replace(context, linear=context.positions)
        )
        floats = partial(torch.empty, dtype=torch.float32, device=context.device)
        local = heads // ranks
        self._first_head = rank * local
        sizes = (shape.num_key_heads // ranks, local, shape.key_dim, shape.value_dim)
        self._rule = DeltaRule(*sizes, floats(local), floats(local), layer, offset=0)
        self._convolution = ConvolutionWeights(
            floats(shape.width, sum(self._qkv.local_parts)),
            None,
            activation,
            layer,
            self._rule.end_offset,
            shape.num_spare,
        )
        weight = torch.empty(shape.value_dim, dtype=context.dtype, device=context.device)
        self._norm = GatedNormWeights(shape.value_dim, weight, epsilon)
        self._output = RowParallelLinear(wide, size, bias=False, context=context)

    def __call__(self, x: Value, residual: Value, states: StepStates | None, rows: ReadRows | None = None) -> Value:
        """[T, hidden_size] -> [T, hidden_size]; the residual is overwritten. rows: [R], tokens whose results are needed
        (None: all): then [R, hidden_size]."""
        operations = self._operations
        qkv = operations.short_convolution(self._convolution, self._qkv(x), states)
        result = operations.gated_delta_rule(self._rule, qkv, self._gates(x), states)
        if rows is not None:
            result, x, residual = (operations.gather_rows(each, rows) for each in (result, x, residual))
        return self._output(operations.gated_norm(self._norm, result, self._z(x)), residual)

    def cache_spec(self) -> LayerSpec:
        return StateSpec(self._convolution.inputs.end_offset)

    def slots(self) -> WeightSlots:
        kernel, shape = self._convolution.kernel, self._shape
        channels = 2 * shape.num_key_heads * shape.key_dim + shape.num_value_heads * shape.value_dim
        return {
            **self._projection_slots(),
            **self._gate_slots(),
            "conv1d.weight": WeightSlot((channels, 1, shape.width), self._load_kernel, kernel.nbytes),
            "A_log": WeightSlot((shape.num_value_heads,), self._load_rate, self._rule.rate.nbytes),
            "dt_bias": WeightSlot(
                (shape.num_value_heads,), self._load_time_bias, self._rule.time_bias.nbytes, 0.0, 0.0
            ),
            "norm.weight": _vector_slot(self._norm.weight, 1.0),
            **self._output.slots("out_proj"),
        }

    def _projection_slots(self) -> WeightSlots:
        if not self._projections_by_head:
            return {**self._qkv.slots(("in_proj_qkv",)), **self._z.slots(("in_proj_z",))}
        shape, values = self._shape, self._values_of_a_key * self._shape.value_dim
        rows = torch.arange(shape.num_key_heads * 2 * (shape.key_dim + values)).view(shape.num_key_heads, -1)
        query, key, value, z = rows.split((shape.key_dim, shape.key_dim, values, values), dim=1)
        orders = torch.cat((query.flatten(), key.flatten(), value.flatten())), z.flatten()
        slots = self._qkv.slots(("qkv",))["qkv.weight"], self._z.slots(("z",))["z.weight"]
        return {"in_proj_qkvz.weight": shared_slot(slots, orders)}

    def _gate_slots(self) -> WeightSlots:
        if not self._gates_by_head:
            return self._gates.slots(("in_proj_b", "in_proj_a"))
        shape = self._shape
        rows = torch.arange(2 * shape.num_value_heads).view(shape.num_key_heads, 2, self._values_of_a_key)
        order = torch.cat((rows[:, 0].flatten(), rows[:, 1].flatten()))
        return {"in_proj_ba.weight": shared_slot((self._gates.slots(("gates",))["gates.weight"],), (order,))}

    @property
    def _values_of_a_key(self) -> int:
        return self._shape.num_value_heads // self._shape.num_key_heads

    def _load_kernel(self, source: WeightSource) -> None:
        kernel, first, done = self._convolution.kernel, 0, 0
        whole = torch.empty(tuple(source.shape), device=kernel.device)
        copy_into(whole, source)
        for part, start, own in zip(self._qkv.parts, self._qkv.local_starts, self._qkv.local_parts, strict=True):
            kernel[:, done : done + own].copy_(whole[first + start : first + start + own, 0].t())
            first, done = first + part, done + own

    def _load_rate(self, source: WeightSource) -> None:
        copy_into(self._rule.rate, source.narrow(0, self._first_head, len(self._rule.rate)))
        self._rule.rate.exp_()

    def _load_time_bias(self, source: WeightSource) -> None:
        copy_into(self._rule.time_bias, source.narrow(0, self._first_head, len(self._rule.time_bias)))


def _vector_slot(vector: torch.Tensor, mean: float) -> WeightSlot:
    return WeightSlot(tuple(vector.shape), partial(copy_into, vector), vector.nbytes, mean, 0.0)
