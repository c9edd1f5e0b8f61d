"""Mixtures of experts: router, experts of which each token uses a few, and a shared expert."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from quire.errors import ConfigError, ModelLoadError
from quire.kernels.arguments import ExchangedExperts, ExpertWeights, Gating, Routing
from quire.kernels.value import Value
from quire.layers.adapters import Part
from quire.layers.context import LayerContext, WeightSlot, WeightSlots, prefixed
from quire.layers.expert_adapters import STACKED, ExpertAdapters, ExpertPlace, StackedPlace
from quire.layers.expert_balance import BalancedExperts
from quire.layers.linear import ColumnParallelLinear, RowParallelLinear, share_of
from quire.parallel.expert_placement import Placement, first_placement, places_of
from quire.quantization.integer_weight import WeightSource, WeightTensor, copy_into
from quire.quantization.interface import LinearShape


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Checkpoint names of a mixture's tensors, by family. router: module with the router's "weight" (and "bias"). gate,
    up, down: an expert's matrices, under `experts.<number>.`. fused_gate_up, fused_down: tensors of all experts
    instead. transposed: fused matrices are [in, out]. turned: either way round, told by their shape. interleaved: rows
    of fused gate and up alternate. correction: bias added to scores only to choose experts. shared, shared_gate: shared
    expert and its gate."""

    router: str = "gate"
    experts: str = "experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    fused_gate_up: str = ""
    fused_down: str = ""
    transposed: bool = False
    turned: bool = False
    interleaved: bool = False
    correction: str = "gate.e_score_correction_bias"
    shared: str = "shared_expert"
    shared_gate: str = "shared_expert_gate"


@dataclass(frozen=True, slots=True)
class MixtureShape:
    """Sizes and kinds of a mixture's parts. size, intermediate: dimensions of an expert. bias, router_bias: True if
    experts and router have biases. has_correction: the checkpoint has a bias for the choice. weighs_input: see
    ExpertWeights."""

    size: int
    intermediate: int
    bias: bool = False
    router_bias: bool = False
    has_correction: bool = False
    weighs_input: bool = False


class SharedExpert:
    """x -> residual + down(activation(gate(x)) * up(x)). is_gated: the sigmoid of a further one-output product of x
    scales the result."""

    def __init__(self, size: int, intermediate: int, activation: str, *, is_gated: bool, context: LayerContext) -> None:
        self._gate_up = ColumnParallelLinear(
            size, (intermediate, intermediate), bias=False, context=context, activation=activation, gated=True
        )
        self._down = RowParallelLinear(intermediate, size, bias=False, context=context)
        self._gate = ColumnParallelLinear(size, (1,), bias=False, context=unquantized(context)) if is_gated else None
        self._operations = context.operations

    def __call__(self, x: Value, residual: Value) -> Value:
        """[T, size] each -> [T, size]; the residual is overwritten."""
        inner = self._gate_up(x)
        if self._gate is not None:
            inner = self._operations.gate_rows(inner, self._gate(x))
        return self._down(inner, residual)

    def slots(self, names: ExpertNames) -> WeightSlots:
        slots = {**self._gate_up.slots(("gate_proj", "up_proj")), **self._down.slots("down_proj")}
        slots = prefixed(names.shared, slots)
        return slots if self._gate is None else {**slots, **self._gate.slots((names.shared_gate,))}


class MixtureOfExperts:
    """x -> residual + shared(x) + the weighted sum of chosen experts' results. Ranks share each expert's inner width,
    or whole experts (`LayerContext.expert_placement`); of the shared expert (or None) always the width."""

    def __init__(
        self,
        shape: MixtureShape,
        routing: Routing,
        gating: Gating,
        context: LayerContext,
        shared: SharedExpert | None = None,
    ) -> None:
        self._context = context
        self._size = self.size = size = shape.size
        self.top_k = routing.top_k
        self._intermediate = shape.intermediate
        self._bias = bias = shape.bias
        self._shared = shared
        self._router = ColumnParallelLinear(
            size, (routing.num_experts,), bias=shape.router_bias, context=unquantized(context)
        )
        if shape.has_correction:
            correction = torch.empty(routing.num_experts, dtype=torch.float32, device=context.device)
            routing = replace(routing, bias=correction)
        self._routing = routing
        self._start, self._local = 0, shape.intermediate
        self._has_down_bias = bias
        create, count, group = context.linear.create_stack, routing.num_experts, context.group
        balancer, places = context.balancer, None
        held: Sequence[int] = range(count)
        placement: Placement = ()
        exchange, exchanged = context.exchange, None
        ranks = group if exchange is None else exchange
        if ranks.size > 1 and context.expert_placement is not None:
            placement = _placement(context, count, ranks.size)
            places = torch.tensor(places_of(placement, ranks.rank, count), dtype=torch.int32)
            held = placement[ranks.rank]
        else:
            self._start, self._local = share_of(shape.intermediate, group.size, group)
            self._has_down_bias = bias and group.rank == 0
        self._places = {number: place for place, number in enumerate(held)}
        """Place of each expert on this rank, by its number, while it is loaded."""
        gate_up = LinearShape(size, 2 * self._local, bias, context.dtype, context.device, gated=True)
        down = LinearShape(self._local, size, self._has_down_bias, context.dtype, context.device)
        counts = None
        if context.expert_counts is not None:
            counts = context.expert_counts.add_layer(count, context.device)
        stacks = create(gate_up, len(held)), create(down, len(held))
        is_balanced = balancer is not None and places is not None
        self._adapters = None
        if context.adapters is not None:
            inner = Part(shape.intermediate, self._start, self._local)
            self._adapters = ExpertAdapters(context.adapters, count, size, inner, len(held), places)
        weighs, adapters = shape.weighs_input, self._adapters
        if exchange is not None:
            holders = {number: rank for rank, own in enumerate(placement) for number in own}
            exchanged = ExchangedExperts(exchange.native, [holders[number] for number in range(count)])
            exchange.add_layer(self)
        self._weights = ExpertWeights(
            *stacks, gating, weighs, counts, places, apart=is_balanced, adapters=adapters, exchange=exchanged
        )
        if balancer is not None and is_balanced:
            balancer.add_layer(BalancedExperts(self._weights, placement, group))

    def __call__(self, x: Value, residual: Value) -> Value:
        """[T, size] each -> [T, size]; the residual is overwritten."""
        operations, linear, group = self._context.operations, self._context.linear, self._context.group
        routing = operations.route(self._routing, self._router(x))
        if self._shared is not None:
            residual = self._shared(x, residual)
        if group.size == 1 or self._weights.exchange is not None:
            return linear.apply_experts(self._weights, x, routing, residual)
        total = operations.all_reduce(group, linear.apply_experts(self._weights, x, routing))
        if self._weights.apart:
            return operations.add_experts(total, routing, residual, weighs_input=self._weights.weighs_input)
        return operations.add(residual, total)

    def record_experts(self, x: Value, routing: Value, residual: Value) -> Value:
        return self._context.linear.apply_experts(self._weights, x, routing, residual)

    def slots(self, names: ExpertNames) -> WeightSlots:
        slots = self._router.slots((names.router,))
        if self._routing.bias is not None:
            vector = self._routing.bias
            slots[names.correction] = WeightSlot(tuple(vector.shape), partial(copy_into, vector), vector.nbytes)
        experts = self._fused_slots(names) if names.fused_gate_up else self._slots_by_expert(names)
        slots |= prefixed(names.experts, experts)
        return slots if self._shared is None else {**slots, **self._shared.slots(names)}

    # -- experts one by one -----------------------------------------------------------------------------------------

    def _slots_by_expert(self, names: ExpertNames) -> WeightSlots:
        slots: WeightSlots = {}
        wide, narrow = (self._intermediate, self._size), (self._size, self._intermediate)
        wide_bytes, narrow_bytes, wide_bias, narrow_bias = self._stored_bytes()
        for expert in self._places:
            for name, shape, part, nbytes, bias_bytes in (
                (names.gate, wide, 0, wide_bytes, wide_bias),
                (names.up, wide, 1, wide_bytes, wide_bias),
                (names.down, narrow, None, narrow_bytes, narrow_bias),
            ):
                load = partial(self._load_part, expert, part, "weight")
                adapter = None if self._adapters is None else ExpertPlace(self._adapters, expert, part)
                slots[f"{expert}.{name}.weight"] = WeightSlot(shape, load, nbytes, adapter=adapter)
                if self._bias:
                    load = partial(self._load_part, expert, part, "bias")
                    slots[f"{expert}.{name}.bias"] = WeightSlot(shape[:1], load, bias_bytes)
        return slots

    def _load_part(self, expert: int, part: int | None, suffix: str, tensor: WeightSource) -> None:
        """Load one matrix of an expert. part: 0 for gate, 1 for up, None for down."""
        load, place = self._context.linear.load_rows, self._places[expert]
        if part is not None:
            rows = tensor.narrow(0, self._start, self._local)
            load(self._weights.gate_up[place], suffix, rows, part * self._local, self._local)
        elif suffix == "weight":
            columns = tensor.narrow(1, self._start, self._local)
            load(self._weights.down[place], suffix, columns, 0, self._size)
        elif self._has_down_bias:
            load(self._weights.down[place], suffix, tensor.narrow(0, 0, self._size), 0, self._size)

    # -- experts in one tensor --------------------------------------------------------------------------------------

    def _fused_slots(self, names: ExpertNames) -> WeightSlots:
        count, wide, size = self._routing.num_experts, 2 * self._intermediate, self._size
        stored = (len(self._places) * each for each in self._stored_bytes())
        wide_bytes, narrow_bytes, wide_bias, narrow_bias = stored
        matrices = ((names.fused_gate_up, (wide, size)), (names.fused_down, (size, self._intermediate)))
        slots: WeightSlots = {}
        for matrix, (name, (rows, columns), loader, nbytes, bias_bytes) in zip(
            STACKED,
            (
                (*matrices[0], self._load_gate_up, 2 * wide_bytes, 2 * wide_bias),
                (*matrices[1], self._load_down, narrow_bytes, narrow_bias),
            ),
            strict=True,
        ):
            shape = (count, columns, rows) if names.transposed else (count, rows, columns)
            load = self._expert_by_expert("weight", names, loader, (rows, columns))
            adapter = None
            if self._adapters is not None:
                adapter = StackedPlace(self._adapters, matrix, alternates=names.interleaved)
            slots[name] = WeightSlot(
                shape, load, nbytes, transposed=names.transposed, turned=names.turned, adapter=adapter
            )
            if self._bias:
                load = self._expert_by_expert("bias", names, loader)
                slots[f"{name}_bias"] = WeightSlot((count, rows), load, bias_bytes)
        return slots

    def _expert_by_expert(
        self,
        suffix: str,
        names: ExpertNames,
        load_one: Callable[[int, str, WeightTensor, bool], None],
        matrix: tuple[int, ...] = (),
    ) -> Callable[[WeightSource], None]:
        def load(tensor: WeightSource) -> None:
            for expert in self._places:
                own = tensor.narrow(0, expert, 1)[0]
                is_turned = names.transposed or (names.turned and tuple(own.shape) != matrix)
                if suffix == "weight" and is_turned and isinstance(own, torch.Tensor):
                    own = own.t()
                try:
                    load_one(expert, suffix, own, names.interleaved)
                except ModelLoadError as error:
                    raise ModelLoadError(f"expert {expert}: {error.message}") from None

        return load

    def _load_gate_up(self, expert: int, suffix: str, rows: WeightTensor, interleaved: bool) -> None:
        middle = self._intermediate
        halves = (rows[0::2], rows[1::2]) if interleaved else (rows[:middle], rows[middle:])
        for part, half in enumerate(halves):
            self._load_part(expert, part, suffix, half)

    def _load_down(self, expert: int, suffix: str, rows: WeightTensor, interleaved: bool) -> None:
        self._load_part(expert, None, suffix, rows)

    def _stored_bytes(self) -> tuple[int, int, int, int]:
        stored = self._context.linear.stored_bytes
        bias = stored((self._size,)) if self._has_down_bias else 0
        return stored((self._local, self._size)), stored((self._size, self._local)), stored((self._local,)), bias


def _placement(context: LayerContext, count: int, size: int) -> Placement:
    if count < size:
        raise ConfigError(
            f"enable_expert_parallel is not possible: {count} experts are fewer than tensor_parallel_size={size}",
            param="enable_expert_parallel",
        )
    assert context.expert_placement is not None, "ranks have whole experts"
    redundant = 0 if context.balancer is None else context.balancer.num_redundant
    return first_placement(count, size, redundant, context.expert_placement)


def unquantized(context: LayerContext) -> LayerContext:
    """Copy for small unquantised matrices that every rank computes entirely."""
    return replace(context.replicated(), linear=context.positions)
