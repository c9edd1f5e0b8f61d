"""Linear layers split over ranks by output (column) or input (row), with several checkpoint matrices in one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from quire.errors import ConfigError
from quire.kernels.value import Value
from quire.layers.adapters import AdapterPlace, AdapterStack, Part
from quire.layers.context import LayerContext, WeightSlot, WeightSlots
from quire.parallel.interface import ProcessGroup
from quire.quantization.integer_weight import LoadWeight, WeightSource, WeightTensor
from quire.quantization.interface import LinearShape, Parameters
from quire.quantization.quantized_weight import QuantizedWeight


class ColumnParallelLinear:
    """y = activation(x W^T + b) with outputs shared by the ranks. parts: output sizes of the fused matrices.
    num_shares: per part; with fewer than ranks, neighbours hold the same share. gated: two equal parts, y =
    activation(gate) * up. Raises ConfigError for parts that cannot be shared equally."""

    def __init__(
        self,
        in_features: int,
        parts: Sequence[int],
        *,
        bias: bool,
        context: LayerContext,
        num_shares: Sequence[int] | None = None,
        activation: str | None = None,
        gated: bool = False,
    ) -> None:
        self._context = context
        self._in_features = in_features
        self.parts = tuple(parts)
        self._bias = bias
        group = context.group
        counts = num_shares or [group.size] * len(parts)
        shares = [share_of(part, count, group) for part, count in zip(parts, counts, strict=True)]
        self.local_starts = tuple(start for start, _ in shares)
        self.local_parts = tuple(length for _, length in shares)
        self._parameters = context.linear.create(
            LinearShape(in_features, sum(self.local_parts), bias, context.dtype, context.device, activation, gated)
        )
        shared = [Part(part, *share) for part, share in zip(parts, shares, strict=True)]
        self._product = AdaptedProduct(context, self._parameters, AdapterStack(in_features, 0, in_features, shared))

    def __call__(self, x: Value) -> Value:
        """[T, in_features] -> [T, sum(local_parts)], half as wide if gated."""
        return self._product(x)

    def slots(self, names: Sequence[str], *, transposed: bool = False) -> WeightSlots:
        """Slots by checkpoint names: one per part, or one for all if fused. transposed: the checkpoint stores [in,
        out]."""
        slots: WeightSlots = {}
        groups = [range(len(self.parts))] if len(names) == 1 else [range(i, i + 1) for i in range(len(names))]
        for name, parts in zip(names, groups, strict=True):
            rows = sum(self.parts[part] for part in parts)
            place = self._product.place(parts)
            for suffix in ("weight", "bias") if self._bias else ("weight",):
                shape = _weight_shape(suffix, rows, self._in_features, transposed)
                turned = transposed and len(shape) == 2
                local_rows = sum(self.local_parts[part] for part in parts)
                nbytes = self._context.linear.stored_bytes((local_rows, *([self._in_features] * (len(shape) - 1))))
                load = self._loader(suffix, parts, turned)
                adapter = place if suffix == "weight" else None
                slots[f"{name}.{suffix}"] = WeightSlot(shape, load, nbytes, transposed=turned, adapter=adapter)
        return slots

    def _loader(self, suffix: str, parts: range, transposed: bool) -> LoadWeight:
        def load(tensor: WeightSource) -> None:
            tensor = _outputs_first(tensor, transposed)
            start = 0
            for part in parts:
                local = self.local_parts[part]
                share = tensor.narrow(0, start + self.local_starts[part], local)
                first_row = sum(self.local_parts[:part])
                self._context.linear.load_rows(self._parameters, suffix, share, first_row, local)
                start += self.parts[part]

        return load


class AdaptedProduct:
    """Product x W^T of a linear layer's share plus its adapters' results."""

    def __init__(self, context: LayerContext, parameters: Parameters, stack: AdapterStack) -> None:
        self._linear, self._operations, self._parameters = context.linear, context.operations, parameters
        self._adapters = context.adapters
        self._stack = stack
        if self._adapters is not None:
            self._adapters.add_layer(stack, partial(self._linear.is_interleaved, parameters))

    def __call__(self, x: Value, residual: Value | None = None) -> Value:
        """Product with what adapters add (`LinearMethod.apply`)."""
        slots = None if self._adapters is None else self._adapters.step
        if slots is None:
            return self._linear.apply(self._parameters, x, residual)
        products = self._linear.products(self._parameters, x, residual)
        return self._linear.activate(self._parameters, self._operations.add_adapted(self._stack, x, products, slots))

    def place(self, parts: range) -> AdapterPlace | None:
        """Target of adapters for the checkpoint matrix with these parts; None without adapters."""
        if self._adapters is None:
            return None
        if parts not in self._stack.pieces:
            self._stack.pieces.append(parts)
        return AdapterPlace(self._stack, self._stack.pieces.index(parts))


class RowParallelLinear:
    """y = residual + x W^T + b with inputs shared by the ranks, whose partial sums are added. The first rank has the
    bias."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, context: LayerContext) -> None:
        self._context = context
        self._shape = (out_features, in_features)
        self._bias = bias
        self._local_start, self._local_in = share_of(in_features, context.group.size, context.group)
        self._holds_bias = bias and context.group.rank == 0
        self._parameters = context.linear.create(
            LinearShape(self._local_in, out_features, self._holds_bias, context.dtype, context.device)
        )
        stack = AdapterStack(self._local_in, self._local_start, in_features, [Part(out_features, 0, out_features)])
        self._product = AdaptedProduct(context, self._parameters, stack)

    def __call__(self, x: Value, residual: Value | None) -> Value:
        """[T, in_features / ranks] -> [T, out_features] on every rank; a residual is overwritten."""
        group = self._context.group
        if group.size == 1:
            return self._product(x, residual)
        operations = self._context.operations
        total = operations.all_reduce(group, self._product(x))
        return total if residual is None else operations.add(residual, total)

    def slots(self, name: str, *, transposed: bool = False) -> WeightSlots:
        out_features, in_features = self._shape
        stored_bytes = self._context.linear.stored_bytes
        shape = _weight_shape("weight", out_features, in_features, transposed)
        load = partial(self._load_weight, transposed=transposed)
        nbytes = stored_bytes((out_features, self._local_in))
        place = self._product.place(range(1))
        slots = {f"{name}.weight": WeightSlot(shape, load, nbytes, transposed=transposed, adapter=place)}
        if self._bias:
            size = (out_features,)
            slots[f"{name}.bias"] = WeightSlot(size, self._load_bias, stored_bytes(size) if self._holds_bias else 0)
        return slots

    def _load_weight(self, tensor: WeightSource, transposed: bool) -> None:
        share = _outputs_first(tensor, transposed).narrow(1, self._local_start, self._local_in)
        self._context.linear.load_rows(self._parameters, "weight", share, 0, self._shape[0])

    def _load_bias(self, tensor: WeightSource) -> None:
        if self._holds_bias:
            bias = tensor.narrow(0, 0, self._shape[0])
            self._context.linear.load_rows(self._parameters, "bias", bias, 0, self._shape[0])


def _outputs_first(tensor: WeightSource, transposed: bool) -> WeightSource:
    return tensor.t() if transposed and not isinstance(tensor, QuantizedWeight) else tensor


def share_of(size: int, num_shares: int, group: ProcessGroup) -> tuple[int, int]:
    """(start, length) of this rank's share of `size` elements. num_shares: divides the number of ranks."""
    if size % num_shares:
        raise ConfigError(
            f"tensor_parallel_size={group.size} is not possible for this model: it does not divide a matrix of {size} "
            "rows or columns",
            param="tensor_parallel_size",
        )
    length = size // num_shares
    return group.rank * num_shares // group.size * length, length


def _weight_shape(suffix: str, rows: int, columns: int, transposed: bool) -> tuple[int, ...]:
    if suffix == "bias":
        return (rows,)
    return (columns, rows) if transposed else (rows, columns)


def side_by_side(left: WeightSlot, right: WeightSlot) -> WeightSlot:
    """Slot of a checkpoint's matrix whose first input features are `left`'s, the others `right`'s."""
    widths = left.shape[1], right.shape[1]

    def load(tensor: WeightSource) -> None:
        left.load(tensor.narrow(1, 0, widths[0]))
        right.load(tensor.narrow(1, *widths))

    return WeightSlot((left.shape[0], sum(widths)), load, left.nbytes + right.nbytes)


class LocalRows:
    """Linear layer [out_features, in_features] that every rank holds whole."""

    def __init__(self, in_features: int, out_features: int, context: LayerContext, *, bias: bool = False) -> None:
        self._linear = context.linear
        self._shape = LinearShape(in_features, out_features, bias, context.dtype, context.device)
        self._parameters = context.linear.create(self._shape)
        stack = AdapterStack(in_features, 0, in_features, [Part(out_features, 0, out_features)])
        self._product = AdaptedProduct(context, self._parameters, stack)
        self.nbytes = context.linear.stored_bytes((out_features, in_features))
        self.bias_bytes = context.linear.stored_bytes((out_features,)) if bias else 0

    def __call__(self, x: Value) -> Value:
        """[T, in_features] -> [T, out_features]."""
        return self._product(x)

    def place(self) -> AdapterPlace | None:
        """Target of adapters; None without."""
        return self._product.place(range(1))

    def load(self, tensor: WeightTensor, suffix: str = "weight") -> None:
        self._linear.load_rows(self._parameters, suffix, tensor, 0, self._shape.out_features)

    def slots(self, name: str) -> WeightSlots:
        """Slots of a checkpoint matrix with the same rows."""
        shape = self._shape
        size = (shape.out_features, shape.in_features)
        load = partial(self._load_whole, "weight")
        slots = {f"{name}.weight": WeightSlot(size, load, self.nbytes, adapter=self.place())}
        if shape.bias:
            slots[f"{name}.bias"] = WeightSlot(size[:1], partial(self._load_whole, "bias"), self.bias_bytes)
        return slots

    def _load_whole(self, suffix: str, tensor: WeightSource) -> None:
        self.load(tensor.narrow(0, 0, self._shape.out_features), suffix)
