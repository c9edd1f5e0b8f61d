"""How the weights of a model are quantised. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

WEIGHT_ONLY = {4: "int4", 8: "int8"}
ROUNDED = {4: "w4a8", 8: "w8a8"}
FLOATS = {"fp8": 8, "mxfp4": 4, "nvfp4": 4}
BITS = {method: bits for names in (WEIGHT_ONLY, ROUNDED) for bits, method in names.items()} | FLOATS
STORED_TYPES = {"fp8": "float8", "mxfp4": "mxfp4", "nvfp4": "nvfp4"}
"""What `quire.config.model_shape` calls the types of floats."""


@dataclass(frozen=True)
class QuantizationConfig:
    """How the linear layers' weights are quantised.

    method: "int8" or "int4" (weights alone), "w8a8" or "w4a8" (activations are rounded to 8 bits token by token too,
    and integers are multiplied), "fp8", "mxfp4" or "nvfp4" (weights alone, small floats).
    group_size: input features that share a scale, None: all those of an output row (floats: what their format says).
    checkpoint_format: when the checkpoint holds quantised weights, how: "gptq" (zero points stored less one),
    "gptq_v2", "awq", "pack-quantized", "int-quantized"; "fp8", "mxfp4" (experts in one tensor), "nvfp4",
    "mxfp4-pack-quantized", "nvfp4-pack-quantized". None when it holds floating point that is to be quantised while it
    is loaded.
    symmetric: the checkpoint has no zero points of its own (compressed-tensors alone leaves them out).
    reordered: the checkpoint assigns input features to groups one by one (act-order).
    block_size: of "fp8", (output rows, input features) that share a scale; None: a row or the whole matrix.
    """

    method: str
    group_size: int | None
    checkpoint_format: str | None = None
    symmetric: bool = True
    reordered: bool = False
    block_size: tuple[int, int] | None = None

    @property
    def bits(self) -> int:
        """Of a weight."""
        return BITS[self.method]

    @property
    def is_integer(self) -> bool:
        return self.method not in FLOATS

    @property
    def rounds_activations(self) -> bool:
        return self.method in ROUNDED.values()

    @property
    def stored_type(self) -> str:
        """As `quire.config.model_shape` calls what matrices are stored in."""
        return f"int{self.bits}" if self.is_integer else STORED_TYPES[self.method]
