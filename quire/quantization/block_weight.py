"""Matrices in the blocks of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch

from quire.quantization.quantized_weight import QuantizedWeight

BlockFormatName = Literal[
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"
]
Unpack = Callable[[torch.Tensor], QuantizedWeight]


@dataclass(frozen=True, eq=False)
class BlockWeight(QuantizedWeight):
    """Matrix in GGUF blocks. rows: [N, bytes of a row] uint8, whole blocks with finite scales, in the mapped file or in
    memory. unpack: makes the common form of some rows. release: called when all rows are copied; drops the file's pages
    from memory."""

    rows: torch.Tensor
    format: BlockFormatName
    num_columns: int
    unpack: Unpack
    release: Callable[[], None]

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.rows), self.num_columns

    def __getitem__(self, which: int | slice | torch.Tensor) -> Self:
        return replace(self, rows=self.rows[which])

    def columns(self, start: int, length: int) -> QuantizedWeight:  # type: ignore[override]
        return self.unpacked().columns(start, length)

    def dequantize(self) -> torch.Tensor:
        return self.unpacked().dequantize()

    def unpacked(self) -> QuantizedWeight:
        """Same matrix as integers or floats with scales, for kernels without blocks."""
        unpacked = self.unpack(self.rows)
        self.release()
        return unpacked
