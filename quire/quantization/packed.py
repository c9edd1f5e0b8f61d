"""Weights packed for the native CPU kernels, in any of their formats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from quire.config.model import DTYPE_BYTES
from quire.errors import ModelLoadError
from quire.kernels.arguments import ExpertWeights
from quire.kernels.cpu import _native
from quire.kernels.cpu.packing import Arena, PackedMatrix
from quire.kernels.cpu.quantize import fit_int4
from quire.kernels.cpu.recorder import Buffer, RecordedIndices
from quire.logging import get_logger
from quire.quantization.integer_weight import WeightTensor
from quire.quantization.interface import LinearShape
from quire.quantization.pack_parts import pack_parts, runs_of_blocks
from quire.quantization.quantize import CLIPPING, NUDGES, FittedGroups
from quire.quantization.quantized_weight import QuantizedWeight
from quire.quantization.weight_format import EIGHT_BITS, WeightFormat

logger = get_logger(__name__)

ACTIVATIONS = {
    None: _native.Activation.NONE,
    "relu": _native.Activation.RELU,
    "silu": _native.Activation.SILU,
    "swish": _native.Activation.SILU,
    "gelu": _native.Activation.GELU,
    "gelu_new": _native.Activation.GELU_TANH,
    "gelu_fast": _native.Activation.GELU_TANH,
    "gelu_pytorch_tanh": _native.Activation.GELU_TANH,
    "quick_gelu": _native.Activation.QUICK_GELU,
}
FLOAT_TYPES = {
    "float32": _native.WeightType.F32,
    "bfloat16": _native.WeightType.BF16,
    "float16": _native.WeightType.F16,
}
GATED_PARTS = 2
PANEL = 16
"""Columns per turn of gate and up in a gated matrix."""


@dataclass(eq=False, slots=True)
class PackedParameters:
    """Weights of one linear layer in native panels. matrices: stacked, empty until the format is known; a gated layer
    has one, or gate and up. pending: quantised parts by first row, until all have come."""

    shape: LinearShape
    matrices: list[PackedMatrix] = field(default_factory=list)
    bias: torch.Tensor | None = None
    pending: dict[int, QuantizedWeight] = field(default_factory=dict)

    @property
    def matrix(self) -> PackedMatrix | None:
        """Only matrix of a layer that is not split; None until its format is known."""
        assert len(self.matrices) < 2, "a matrix in several formats has no single one"
        return self.matrices[0] if self.matrices else None

    def stored(self) -> list[torch.Tensor]:
        """Tensors in memory that kernels read, once all are loaded."""
        return [tensor for matrix, _ in _native_matrices(self) for tensor in matrix.tensors()]


class PackedLinear:
    """LinearMethod of native kernels on a CPU: weights in panels, calls recorded."""

    def __init__(self, weight_format: WeightFormat) -> None:
        self._format = weight_format
        self._arena = Arena()

    def create(self, shape: LinearShape) -> PackedParameters:
        return PackedParameters(shape)

    def create_stack(self, shape: LinearShape, count: int) -> list[PackedParameters]:
        return [PackedParameters(shape) for _ in range(count)]

    def load_rows(
        self, parameters: PackedParameters, suffix: str, tensor: WeightTensor, first_row: int, num_rows: int
    ) -> None:
        if suffix == "bias":
            assert isinstance(tensor, torch.Tensor), "a bias is never quantised"
            if parameters.bias is None:
                parameters.bias = torch.zeros(parameters.shape.out_features)
            parameters.bias[first_row : first_row + num_rows].copy_(tensor)
            return
        if isinstance(tensor, torch.Tensor) and self._format.bits == 0:
            matrix = self._float_matrix(parameters)
            matrix.load_dense(tensor, first_row)
            for row, waiting in parameters.pending.items():
                matrix.load_dense(waiting.dequantize(), row)
            parameters.pending.clear()
            return
        part = self._format.quantize(tensor, fit_natively) if isinstance(tensor, torch.Tensor) else tensor
        if parameters.matrices:  # another part was floating point, so this one is stored as such
            parameters.matrices[0].load_dense(part.dequantize(), first_row)
            return
        parameters.pending[first_row] = part
        if sum(part.shape[0] for part in parameters.pending.values()) == parameters.shape.out_features:
            self._pack(parameters)

    def apply(self, parameters: PackedParameters, x: Buffer, residual: Buffer | None = None) -> Buffer:
        shape = parameters.shape
        x.recorder.keep.append(parameters)
        matrices = _native_matrices(parameters)
        if shape.gated and len(matrices) == GATED_PARTS:
            return _apply_gated(shape, matrices, x)
        return _stacked(shape.width, matrices, x, residual, ACTIVATIONS[shape.activation])

    def products(self, parameters: PackedParameters, x: Buffer, residual: Buffer | None = None) -> Buffer:
        shape = parameters.shape
        x.recorder.keep.append(parameters)
        matrices = _native_matrices(parameters)
        if self.is_interleaved(parameters):
            ((matrix, bias),) = matrices
            weight = matrix.as_native(interleaved=True)
            return x.recorder.call(
                "linear",
                matrix.padded_columns,
                buffers={"x": x, "residual": None},
                weight=weight,
                bias=bias,
                activation=ACTIVATIONS[None],
            )
        return _stacked(shape.out_features, matrices, x, residual, ACTIVATIONS[None])

    def is_interleaved(self, parameters: PackedParameters) -> bool:
        return parameters.shape.gated and len(_native_matrices(parameters)) == 1

    def activate(self, parameters: PackedParameters, products: Buffer) -> Buffer:
        shape = parameters.shape
        if shape.activation is None:
            return products
        turns = self.is_interleaved(parameters)
        return products.recorder.call(
            "activate",
            shape.width,
            buffers={"x": products},
            activation=ACTIVATIONS[shape.activation],
            width=shape.width,
            step=2 * PANEL if turns else PANEL,
            up=0 if not shape.gated else PANEL if turns else shape.width,
        )

    def lookup(self, parameters: PackedParameters, indices: RecordedIndices, onto: Buffer | None = None) -> Buffer:
        return _embed(parameters, indices, onto)

    def lookup_share(
        self, parameters: PackedParameters, indices: RecordedIndices, first_row: int, num_rows: int
    ) -> Buffer:
        return _embed(parameters, indices, None, start=first_row, shared_rows=num_rows)

    def apply_heads(self, stack: Sequence[PackedParameters], x: Buffer) -> Buffer:
        matrices = [_loaded(parameters) for parameters in stack]
        x.recorder.keep.append(stack)
        return x.recorder.call(
            "heads",
            len(stack) * stack[0].shape.out_features,
            buffers={"x": x},
            weights=[matrix.as_native() for matrix in matrices],
        )

    def apply_experts(
        self, weights: ExpertWeights, x: Buffer, routing: Buffer, residual: Buffer | None = None
    ) -> Buffer:
        (gate_up, up), (down, _) = (_stack_of(part) for part in (weights.gate_up, weights.down))
        x.recorder.keep.append(weights)
        top_k = routing.width // 2
        return x.recorder.call(
            "experts",
            x.width * (top_k if weights.apart else 1),
            over=residual,
            buffers={"x": x, "routing": routing, "residual": residual},
            gate_up=[matrix for matrix, _ in gate_up],
            up=[matrix for matrix, _ in up],
            down=[matrix for matrix, _ in down],
            gate_up_bias=_all_or_none([bias for _, bias in gate_up]),
            up_bias=_all_or_none([bias for _, bias in up]),
            down_bias=_all_or_none([bias for _, bias in down]),
            top_k=top_k,
            activation=ACTIVATIONS[weights.gating.activation],
            limit=weights.gating.limit or 0.0,
            weighs_input=weights.weighs_input,
            apart=weights.apart,
            counts=0 if weights.counts is None else weights.counts.by_expert.data_ptr(),
            places=0 if weights.places is None else weights.places.data_ptr(),
            num_placed=0 if weights.places is None else len(weights.places),
            **({} if weights.adapters is None else weights.adapters.recorded()),
            **(
                {}
                if weights.exchange is None
                else {"exchange": weights.exchange.native, "ranks": weights.exchange.ranks}
            ),
        )

    def trim(self) -> None:
        """Free memory reserved for further weights, once all are loaded."""
        self._arena.trim()

    def stored_bytes(self, shape: Sequence[int]) -> int:
        if len(shape) == 1:
            return math.prod(shape) * 4
        weight_format, size = self._format, math.prod(shape)
        if weight_format.bits == 0:
            return size * DTYPE_BYTES[weight_format.dtype]
        bytes_of_scale = 1 if weight_format.small_floats and weight_format.bits != EIGHT_BITS else 4
        num_scales = size // (weight_format.group_size or shape[1])
        return size * weight_format.bits // 8 + num_scales * bytes_of_scale

    def _float_matrix(self, parameters: PackedParameters) -> PackedMatrix:
        if not parameters.matrices:
            shape = parameters.shape
            parameters.matrices.append(
                PackedMatrix(
                    FLOAT_TYPES[self._format.dtype],
                    shape.in_features,
                    shape.out_features,
                    gated=shape.gated,
                    memory=self._arena.allocate,
                )
            )
        return parameters.matrices[0]

    def _pack(self, parameters: PackedParameters) -> None:
        shape = parameters.shape
        parts = [parameters.pending[row] for row in sorted(parameters.pending)]
        rounded, memory = self._format.rounded_activations, self._arena.allocate
        runs = runs_of_blocks(parts)
        of_run = replace(shape, gated=False) if len(runs) > 1 else shape
        packed = [pack_parts(run, of_run, rounded_activations=rounded, memory=memory) for run in runs]
        parameters.matrices = [matrix for matrix in packed if matrix is not None]
        for matrix in parameters.matrices:
            matrix.activation_bits = matrix.activation_bits or self._format.activation_bits
        if not parameters.matrices:
            logger.warning(
                "a matrix of %d x %d is kept as floating point: its parts differ in their formats, or order their "
                "input features differently",
                shape.out_features,
                shape.in_features,
            )
            matrix = self._float_matrix(parameters)
            for row, part in parameters.pending.items():
                matrix.load_dense(part.dequantize(), row)
        parameters.pending.clear()


def _stacked(
    width: int,
    matrices: Sequence[tuple[PackedMatrix, int]],
    x: Buffer,
    residual: Buffer | None,
    activation: _native.Activation,
) -> Buffer:
    out, row = residual, 0
    for matrix, bias in matrices:
        out = x.recorder.call(
            "linear",
            width,
            over=out,
            in_place=row > 0,
            out_column=row,
            buffers={"x": x, "residual": residual},
            weight=matrix.as_native(),
            bias=bias,
            activation=activation,
        )
        row += matrix.out_features
    assert out is not None, "a linear layer has a matrix"
    return out


def _apply_gated(shape: LinearShape, matrices: Sequence[tuple[PackedMatrix, int]], x: Buffer) -> Buffer:
    gate, up = (
        x.recorder.call(
            "linear",
            shape.width,
            buffers={"x": x, "residual": None},
            weight=matrix.as_native(),
            bias=bias,
            activation=ACTIVATIONS[activation],
        )
        for (matrix, bias), activation in zip(matrices, (shape.activation, None), strict=True)
    )
    return x.recorder.call(
        "elementwise",
        shape.width,
        over=gate,
        buffers={"x": gate, "y": up},
        kind=_native.Elementwise.MULTIPLY,
        factor=1.0,
        width=shape.width,
    )


def _embed(
    parameters: PackedParameters,
    indices: RecordedIndices,
    onto: Buffer | None,
    start: int = 0,
    shared_rows: int = 0,
) -> Buffer:
    """Record a lookup of rows. start, shared_rows: first row and total rows of a table shared among ranks."""
    matrix = _loaded(parameters)
    indices.recorder.keep.append(parameters)
    return indices.recorder.call(
        "embed",
        parameters.shape.in_features,
        over=onto,
        in_place=onto is not None,
        table=matrix.as_native(),
        width=parameters.shape.in_features,
        shift=indices.shift,
        column=indices.column,
        accumulate=onto is not None,
        start=start,
        shared_rows=shared_rows,
    )


def fit_natively(groups: torch.Tensor) -> FittedGroups | None:
    """Native `quire.quantization.quantize.fit_groups`."""
    found = fit_int4(groups, CLIPPING, NUDGES)
    return None if found is None else FittedGroups(*found)


def _native_matrices(parameters: PackedParameters) -> list[tuple[PackedMatrix, int]]:
    assert parameters.matrices, "weights are loaded before a model is recorded"
    row = 0
    for matrix in parameters.matrices:
        if parameters.bias is not None and matrix.bias is None:
            matrix.load_bias(parameters.bias[row : row + matrix.out_features])
        row += matrix.out_features
    return [(each, 0 if each.bias is None else each.bias.data_ptr()) for each in parameters.matrices]


def _stack_of(part: Sequence[PackedParameters]) -> tuple[list[tuple[_native.PackedWeight, int]], ...]:
    """Each expert's packed matrix and its bias's address (0: none); if gate and up are apart, gate's, then up's."""
    matrices = [[(matrix.as_native(), bias) for matrix, bias in _native_matrices(each)] for each in part]
    firsts, seconds = [each[0] for each in matrices], [each[1] for each in matrices if len(each) == GATED_PARTS]
    if seconds and len(seconds) != len(firsts):
        raise ModelLoadError("the experts of a layer are quantised in different formats")
    return firsts, seconds


def _all_or_none(biases: list[int]) -> list[int]:
    assert all(biases) or not any(biases), "all experts have biases, or none has"
    return biases if all(biases) else []


def _loaded(parameters: PackedParameters) -> PackedMatrix:
    assert parameters.matrix is not None, "weights are loaded before a model is recorded"
    return parameters.matrix
