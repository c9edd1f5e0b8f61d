"""Weights packed for the native CPU kernels, in any of their formats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from quire.config.model import DTYPE_BYTES
from quire.kernels.arguments import ExpertWeights
from quire.kernels.cpu import _native
from quire.kernels.cpu.packing import Arena, PackedMatrix
from quire.kernels.cpu.quantize import fit_int4
from quire.kernels.cpu.recorder import Buffer, RecordedIndices
from quire.logging import get_logger
from quire.quantization.integer_weight import WeightTensor
from quire.quantization.interface import LinearShape
from quire.quantization.pack_parts import pack_parts
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


@dataclass(eq=False, slots=True)
class PackedParameters:
    """matrix: None until the format of the weights is known. pending: quantised parts of a matrix whose other parts
    have not come yet, by first row: parts of different formats must be brought to one."""

    shape: LinearShape
    matrix: PackedMatrix | None = None
    bias: torch.Tensor | None = None
    pending: dict[int, QuantizedWeight] = field(default_factory=dict)


class PackedLinear:
    """Instance of LinearMethod for native execution: weights in panels, calls recorded."""

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
        if parameters.matrix is not None:  # of floating point: another part came as that
            parameters.matrix.load_dense(part.dequantize(), first_row)
            return
        parameters.pending[first_row] = part
        if sum(part.shape[0] for part in parameters.pending.values()) == parameters.shape.out_features:
            self._pack(parameters)

    def apply(self, parameters: PackedParameters, x: Buffer, residual: Buffer | None = None) -> Buffer:
        shape = parameters.shape
        matrix, bias = _native_matrix(parameters)
        x.recorder.keep.append(parameters)
        return x.recorder.call(
            "linear",
            shape.width,
            over=residual,
            buffers={"x": x, "residual": residual},
            weight=matrix,
            bias=bias,
            activation=ACTIVATIONS[shape.activation],
        )

    def lookup(self, parameters: PackedParameters, indices: RecordedIndices, onto: Buffer | None = None) -> Buffer:
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
        )

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
        gate_up, down = ([_native_matrix(each) for each in part] for part in (weights.gate_up, weights.down))
        x.recorder.keep.append(weights)
        return x.recorder.call(
            "experts",
            x.width,
            over=residual,
            buffers={"x": x, "routing": routing, "residual": residual},
            gate_up=[matrix for matrix, _ in gate_up],
            down=[matrix for matrix, _ in down],
            gate_up_bias=_all_or_none([bias for _, bias in gate_up]),
            down_bias=_all_or_none([bias for _, bias in down]),
            top_k=routing.width // 2,
            activation=ACTIVATIONS[weights.gating.activation],
            limit=weights.gating.limit or 0.0,
            weighs_input=weights.weighs_input,
            counts=0 if weights.counts is None else weights.counts.by_expert.data_ptr(),
        )

    def trim(self) -> None:
        """Give back the memory that was taken for further weights: all are loaded."""
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
        if parameters.matrix is None:
            shape = parameters.shape
            parameters.matrix = PackedMatrix(
                FLOAT_TYPES[self._format.dtype],
                shape.in_features,
                shape.out_features,
                gated=shape.gated,
                memory=self._arena.allocate,
            )
        return parameters.matrix

    def _pack(self, parameters: PackedParameters) -> None:
        shape = parameters.shape
        parts = [parameters.pending[row] for row in sorted(parameters.pending)]
        rounded, memory = self._format.rounded_activations, self._arena.allocate
        parameters.matrix = pack_parts(parts, shape, rounded_activations=rounded, memory=memory)
        if parameters.matrix is None:
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


def fit_natively(groups: torch.Tensor) -> FittedGroups | None:
    """`quire.quantization.quantize.fit_groups` by native kernels."""
    found = fit_int4(groups, CLIPPING, NUDGES)
    return None if found is None else FittedGroups(*found)


def _native_matrix(parameters: PackedParameters) -> tuple[_native.PackedWeight, int]:
    """The packed matrix and the address of its bias, 0 for none."""
    matrix = _loaded(parameters)
    if parameters.bias is not None and matrix.bias is None:
        matrix.load_bias(parameters.bias)
    return matrix.as_native(), 0 if matrix.bias is None else matrix.bias.data_ptr()


def _all_or_none(biases: list[int]) -> list[int]:
    assert all(biases) or not any(biases), "all experts have biases, or none has"
    return biases if all(biases) else []


def _loaded(parameters: PackedParameters) -> PackedMatrix:
    assert parameters.matrix is not None, "weights are loaded before a model is recorded"
    return parameters.matrix
