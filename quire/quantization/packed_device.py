"""Quantised weights on a GPU: small numbers in memory, widened in registers by the product's kernel."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import overload

import torch

from quire.errors import ModelLoadError
from quire.kernels.arguments import ExpertWeights
from quire.kernels.experts import count_rows
from quire.kernels.triton.activation import activation
from quire.kernels.triton.experts import ExpertMatrices, apply_experts
from quire.kernels.triton.matmul import head_matmul, matmul
from quire.kernels.triton.quantized_product import quantized_matmul
from quire.kernels.triton.weight_formats import PLAIN, StoredMatrix
from quire.logging import get_logger
from quire.quantization.device import DeviceLinear
from quire.quantization.integer_weight import WeightTensor, copy_into
from quire.quantization.interface import LinearShape
from quire.quantization.quantized_weight import QuantizedWeight
from quire.quantization.stored_parts import empty_stack, put, store_parts
from quire.quantization.unquantized import PlainStack
from quire.quantization.weight_format import EIGHT_BITS, WeightFormat

logger = get_logger(__name__)


@dataclass(eq=False, slots=True)
class DeviceStack(Sequence["DevicePart"]):
    """Matrices of one shape and format. matrix: None until the first one is known. biases: [count, out_features] or
    None. column_order: see StoredParts. pending: by matrix, its quantised parts by first row until all have come."""

    shape: LinearShape
    size: int
    biases: torch.Tensor | None
    matrix: StoredMatrix | None = None
    column_order: torch.Tensor | None = None
    pending: dict[int, dict[int, QuantizedWeight]] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, index: int) -> DevicePart: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[DevicePart]: ...
    def __getitem__(self, index: int | slice) -> DevicePart | Sequence[DevicePart]:
        if isinstance(index, slice):
            return [self[each] for each in range(self.size)[index]]
        return DevicePart(self, index)

    @property
    def loaded(self) -> StoredMatrix:
        assert self.matrix is not None, "weights are loaded before they are multiplied"
        return self.matrix

    @property
    def is_plain(self) -> bool:
        """True if the weights are floating point: a checkpoint may quantise some layers only."""
        return self.loaded.kind == PLAIN.value


@dataclass(frozen=True, slots=True)
class DevicePart:
    """One matrix of a stack, a linear layer's parameters."""

    stack: DeviceStack
    index: int


class PackedDeviceLinear:
    """LinearMethod of quantised weights on a GPU. A row's last bits depend on the number of rows, unless `plain` (for
    matrices not quantised) is batch-invariant. weight_format: see PackedLinear. stored_bits: bits per weight, for
    estimates of memory. converts_e4m3: the device has e4m3 conversions (compute capability 8.9). rounds_activations:
    round rows of x to e4m3 for products with e4m3 matrices on tensor cores, except in `apply_heads`."""

    def __init__(
        self,
        plain: DeviceLinear,
        weight_format: WeightFormat,
        stored_bits: int,
        *,
        converts_e4m3: bool,
        rounds_activations: bool,
    ) -> None:
        self._plain = plain
        self._format = weight_format
        self._stored_bits = stored_bits
        self._converts_e4m3 = converts_e4m3
        self._rounds = rounds_activations

    def create(self, shape: LinearShape) -> DevicePart:
        return self.create_stack(shape, 1)[0]

    def create_stack(self, shape: LinearShape, count: int) -> DeviceStack:
        biases = None
        if shape.bias:
            biases = torch.empty(count, shape.out_features, dtype=shape.dtype, device=shape.device)
        return DeviceStack(shape, count, biases)

    def load_rows(
        self, parameters: DevicePart, suffix: str, tensor: WeightTensor, first_row: int, num_rows: int
    ) -> None:
        stack, index = parameters.stack, parameters.index
        if suffix == "bias":
            assert stack.biases is not None, "a bias is loaded only where the shape has one"
            copy_into(stack.biases[index, first_row : first_row + num_rows], tensor)
            return
        pending = stack.pending.setdefault(index, {})
        if isinstance(tensor, torch.Tensor):
            if self._format.bits == 0:
                self._load_plain(stack, index, {first_row: tensor, **pending})
                pending.clear()
                return
            # Rounding to 8 bits gives the same bits on every device, and is fast on this one.
            where = stack.shape.device if self._format.bits == EIGHT_BITS else torch.device("cpu")
            tensor = self._format.quantize(tensor.to(where))
        if stack.matrix is not None and stack.is_plain:  # another part was floating point
            self._load_plain(stack, index, {first_row: tensor})
            return
        pending[first_row] = tensor
        if sum(part.shape[0] for part in pending.values()) == stack.shape.out_features:
            self._store(stack, index, [pending[row] for row in sorted(pending)])
            del stack.pending[index]

    def apply(self, parameters: DevicePart, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        has_activation = parameters.stack.shape.activation is not None
        assert not has_activation or residual is None, "what an activation gives is not added to a residual"
        products = self.products(parameters, x, residual)
        return self.activate(parameters, products) if has_activation else products

    def is_interleaved(self, parameters: DevicePart) -> bool:
        return False

    def activate(self, parameters: DevicePart, products: torch.Tensor) -> torch.Tensor:
        shape = parameters.stack.shape
        return products if shape.activation is None else activation(products, shape.activation, gated=shape.gated)

    def products(self, parameters: DevicePart, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        stack = parameters.stack
        if stack.is_plain:
            return self._plain.products(_plain_stack(stack)[0], x, residual)
        if stack.column_order is not None:
            x = x.index_select(1, stack.column_order)
        bias = None if stack.biases is None else stack.biases[0]
        product = matmul if self._plain.batch_invariant else quantized_matmul
        return product(x, stack.loaded, bias, residual, rounds_activations=self._rounds_for(stack))

    def lookup(self, parameters: DevicePart, indices: torch.Tensor, onto: torch.Tensor | None = None) -> torch.Tensor:
        raise AssertionError("the matrices of vocabularies and positions are floating point on a device")

    def lookup_share(
        self, parameters: DevicePart, indices: torch.Tensor, first_row: int, num_rows: int
    ) -> torch.Tensor:
        return self.lookup(parameters, indices)

    def apply_heads(self, stack: Sequence[DevicePart], x: torch.Tensor) -> torch.Tensor:
        assert isinstance(stack, DeviceStack), "made by create_stack"
        return self._plain.apply_heads(_plain_stack(stack), x) if stack.is_plain else head_matmul(x, stack.loaded)

    def apply_experts(
        self, weights: ExpertWeights, x: torch.Tensor, routing: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        gate_up, down, gating = weights.gate_up, weights.down, weights.gating
        assert isinstance(gate_up, DeviceStack), "made by create_stack"
        assert not weights.places, "a device has all experts"
        assert isinstance(down, DeviceStack), "made by create_stack"
        count_rows(weights.counts, routing)
        rounds = self._rounds_for(gate_up) or self._rounds_for(down)
        adapters = None if weights.adapters is None else weights.adapters.on_device(x)
        matrices = ExpertMatrices(gate_up.loaded, down.loaded, gate_up.biases, down.biases, rounds, adapters)
        gated = gating.activation, gating.limit, weights.weighs_input
        return apply_experts(matrices, x, routing, residual, *gated, batch_invariant=self._plain.batch_invariant)

    def stored_bytes(self, shape: Sequence[int]) -> int:
        return self._plain.stored_bytes(shape) if len(shape) == 1 else math.prod(shape) * self._stored_bits // 8

    def _rounds_for(self, stack: DeviceStack) -> bool:
        matrix = stack.loaded
        return (self._format.rounded_activations if matrix.is_integer else self._rounds) and matrix.multiplies_bytes

    def _store(self, stack: DeviceStack, index: int, parts: Sequence[QuantizedWeight]) -> None:
        shape = stack.shape
        stored = store_parts(parts, converts_e4m3=self._converts_e4m3)
        if stored is None:
            logger.warning(
                "a matrix of %d x %d is kept as floating point: its parts differ in their formats or order their input "
                "features differently, or groups are of odd sizes",
                shape.out_features,
                shape.in_features,
            )
            first_rows = accumulate((part.shape[0] for part in parts), initial=0)
            self._load_plain(stack, index, dict(zip(first_rows, parts, strict=False)))
            return
        if self._format.rounded_activations and not stored.matrix.multiplies_bytes:
            raise ModelLoadError(
                f"groups of {stored.matrix.group_size} input features are not multiplied as integers on this device: "
                "load the model without w8a8 or w4a8"
            )
        if stored.column_order is not None:
            if len(stack) > 1:
                raise ModelLoadError("experts whose columns are reordered (act-order) are not available on this device")
            stack.column_order = stored.column_order.long().to(shape.device)
        if stack.matrix is None:
            stack.matrix = empty_stack(stored.matrix, len(stack), shape.device)
        put(stack.matrix, index, stored.matrix)

    def _load_plain(self, stack: DeviceStack, index: int, parts: Mapping[int, WeightTensor]) -> None:
        """Store unquantised parts, by first row. Raises ModelLoadError if other matrices of the stack are quantised."""
        shape = stack.shape
        if stack.matrix is None:
            size = (len(stack), shape.out_features, shape.in_features)
            stack.matrix = StoredMatrix.plain(torch.empty(size, dtype=shape.dtype, device=shape.device))
        if not stack.is_plain:
            raise ModelLoadError("some of a layer's experts are quantised, and others are not")
        for first_row, part in parts.items():
            copy_into(stack.matrix.codes[index, first_row : first_row + part.shape[0]], part)


def _plain_stack(stack: DeviceStack) -> PlainStack:
    return PlainStack(stack.shape, stack.loaded.codes, stack.biases)
