from __future__ import annotations

from dataclasses import dataclass

WEIGHT_ONLY = {4: "int4", 8: "int8"}
ROUNDED = {4: "w4a8", 8: "w8a8"}
FLOATS = {"fp8": 8, "mxfp4": 4, "nvfp4": 4}
BITS = {method: bits for names in (WEIGHT_ONLY, ROUNDED) for bits, method in names.items()} | FLOATS
STORED_TYPES = {"fp8": "float8", "mxfp4": "mxfp4", "nvfp4": "nvfp4"}
"""Method -> name of its type in `quire.config.model_shape`."""


@dataclass(frozen=True)
class QuantizationConfig:
    """Quantisation of the linear layers' weights. method: "int8" or "int4" (weights only), "w8a8" or "w4a8"
    (activations in 8 bits, too), "fp8", "mxfp4" or "nvfp4" (weights only). group_size: input features that share a
    scale; None: a whole output row (floats: by their format). checkpoint_format: "gptq" (zero points stored less one),
    "gptq_v2", "awq", "pack-quantized", "int-quantized", "fp8", "mxfp4" (experts in one tensor), "nvfp4",
    "mxfp4-pack-quantized", "nvfp4-pack-quantized"; None: quantised while loading. symmetric: no zero points. reordered:
    input features are in groups one by one (act-order). block_size: (output rows, input features) that share an "fp8"
    scale; None: a row or the whole matrix."""

    method: str
    group_size: int | None
    checkpoint_format: str | None = None
    symmetric: bool = True
    reordered: bool = False
    block_size: tuple[int, int] | None = None

    @property
    def bits(self) -> int:
        return BITS[self.method]

    @property
    def is_integer(self) -> bool:
        return self.method not in FLOATS

    @property
    def rounds_activations(self) -> bool:
        return self.method in ROUNDED.values()

    @property
    def stored_type(self) -> str:
        """Type of stored matrices, as named in `quire.config.model_shape`."""
        return f"int{self.bits}" if self.is_integer else STORED_TYPES[self.method]
