"""What is timed: the products of a layer in several formats, with what each of them cannot do without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.gpu.limits import Work
from benchmarks.gpu.shapes import Shape
from benchmarks.gpu.timing import Call, num_copies
from quire.kernels.triton.matmul import matmul
from quire.kernels.triton.quantized_product import quantized_matmul
from quire.kernels.triton.runtime import INTERPRETED
from quire.kernels.triton.weight_formats import E4M3, I4, PAIRED, StoredMatrix

PRODUCT_ROWS = (1, 32, 256, 8192)
GROUP = 32
"""Columns that share a scale of 4-bit numbers."""
Build = Callable[[], Call]
"""Makes operands of its own, and what computes with them."""


@dataclass(frozen=True, slots=True)
class Subject:
    """kernel, case: names. work: of one call. variants: by name, ways to do it; the first is ours, the others are what
    it is compared with."""

    kernel: str
    case: str
    work: Work
    variants: dict[str, Build]

    def calls(self, variant: str, cache_bytes: int) -> Sequence[Call]:
        """As many as exceed the cache."""
        return [self.variants[variant]() for _ in range(num_copies(self.work.bytes, cache_bytes))]


class Products:
    """Products with matrices of a layer. scale: divides numbers of tokens, for trying things out."""

    def __init__(self, shape: Shape, device: torch.device, scale: int = 1) -> None:
        self._shape, self._device, self._scale = shape, device, scale
        self._dtype: torch.dtype = getattr(torch, shape.dtype)

    def all(self) -> Iterator[Subject]:
        """The widest matrix and a narrow one: bfloat16 by the library and batch-invariant, FP8 with rounded activations
        as the engine has it, 4-bit integers. The limit counts operations at the peak of bfloat16, which products of
        8-bit numbers exceed."""
        shape = self._shape
        for name, n, k in (
            ("gate_up", 2 * shape.intermediate, shape.hidden),
            ("o", shape.hidden, shape.num_heads * shape.head_dim),
        ):
            for count in PRODUCT_ROWS:
                t = max(1, count // self._scale)
                plain = {"library": partial(self.library, t, n, k), "invariant": partial(self.stored, t, n, k, None)}
                yield self._subject("bf16", name, count, t, n, k, 8 * shape.itemsize, plain)
                fp8: dict[str, Build] = {"quire": partial(self.stored, t, n, k, E4M3.value)}
                yield self._subject("fp8", name, count, t, n, k, 8, fp8)
                if name == "gate_up":
                    yield self._subject(
                        "int4", name, count, t, n, k, 4, {"quire": partial(self.stored, t, n, k, I4.value)}
                    )

    def _subject(
        self, kind: str, name: str, count: int, t: int, n: int, k: int, bits: int, variants: dict[str, Build]
    ) -> Subject:
        work = Work(n * k * bits / 8 + t * (n + k) * self._shape.itemsize, 2.0 * t * n * k)
        return Subject(f"{kind} product {name}", f"{count} tokens", work, variants)

    def library(self, t: int, n: int, k: int) -> Call:
        x, weight = self._random(t, k), self._random(n, k)
        return lambda: F.linear(x, weight)

    def stored(self, t: int, n: int, k: int, kind: int | None) -> Call:
        """kind: None for a plain matrix by the kernel of batch-invariant products."""
        x = self._random(t, k)
        if kind is None:
            plain = self._random(n, k)
            return lambda: matmul(x, plain)
        matrix = self._matrix(kind, n, k)
        return lambda: quantized_matmul(x, matrix, rounds_activations=kind == E4M3.value)

    def _matrix(self, kind: int, rows: int, columns: int) -> StoredMatrix:
        """Random codes. FP8: a scale for each row, as `quantization="fp8"` has them."""
        if kind == E4M3.value:
            codes = torch.randn(1, rows, columns, device=self._device).to(torch.float8_e4m3fn)
            scales = torch.ones(1, rows, 1, device=self._device)
            return StoredMatrix(kind, columns, codes.view(torch.uint8) if INTERPRETED else codes, scales, 0)
        size = 1, rows, -(-columns // PAIRED) * PAIRED // 2
        codes = torch.randint(256, size, dtype=torch.uint8, device=self._device)
        scales = torch.full((1, rows, -(-columns // GROUP)), 0.01, device=self._device)
        return StoredMatrix(kind, columns, codes, scales, GROUP, -8 * scales)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self._device).to(self._dtype)
