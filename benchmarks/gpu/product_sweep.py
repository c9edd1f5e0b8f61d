"""Ways to multiply with quantised matrices of Qwen3-8B, each checked against the first and timed.

The most decisive come first, and every result is a record at once. `python -m tests.kernels.triton.ahead_of_time 90
sweep cache` compiles every kernel before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.gpu.records import Record
from benchmarks.gpu.shapes import Shape
from benchmarks.gpu.timing import CACHE_BYTES, measure, num_copies
from quire.kernels.triton.matmul import ProductTiles, stored_tiles, tiled_product
from quire.kernels.triton.quantize_rows import RoundedRows, round_rows
from quire.kernels.triton.quantized_product import FEW, quantized_matmul
from quire.kernels.triton.runtime import INTERPRETED
from quire.kernels.triton.skinny import SkinnyTiles, skinny_product
from quire.kernels.triton.weight_formats import E4M3, I4, I8, MXFP4, PAIRED, StoredMatrix
from quire.kernels.triton.widen import widen

GROUP = 32
"""Columns that share a scale of 4-bit numbers."""


@dataclass(frozen=True, slots=True)
class Operands:
    """rounded: of x, or None. matrix: of a format."""

    x: torch.Tensor
    rounded: RoundedRows | None
    matrix: StoredMatrix


Way = Callable[[Operands], torch.Tensor]


def skinny(tiles: SkinnyTiles) -> tuple[str, Way]:
    def way(given: Operands) -> torch.Tensor:
        out = torch.empty(given.x.shape[0], given.matrix.shape[1], dtype=given.x.dtype, device=given.x.device)
        skinny_product(given.x, given.rounded, given.matrix, None, None, out, tiles)
        return out

    t = tiles
    name = f"skinny {t.rows} x {t.block_m}, {t.slices} of {t.block_k}, {t.num_warps} warps, {t.num_stages} stages"
    return name + (f", {t.splits} splits" if t.splits > 1 else ""), way


def tiled(tiles: ProductTiles) -> tuple[str, Way]:
    def way(given: Operands) -> torch.Tensor:
        out = torch.empty(given.x.shape[0], given.matrix.shape[1], dtype=given.x.dtype, device=given.x.device)
        tiled_product(given.x, given.rounded, given.matrix, None, None, out, tiles)
        return out

    t = tiles
    return f"tiles {t.block_m} x {t.block_n} x {t.block_k}, {t.num_warps} warps, {t.num_stages} stages", way


def present(given: Operands) -> torch.Tensor:
    """By the kernel of all numbers of rows, in its own tiles."""
    tiles = stored_tiles(given.matrix, given.x.dtype, rounds_activations=given.rounded is not None)
    return tiled(tiles)[1](given)


def through_bf16(given: Operands) -> torch.Tensor:
    return F.linear(given.x, widen(given.matrix, given.x.dtype))


def library(given: Operands, *, fast: bool) -> torch.Tensor:
    """FP8 by row scales: what PyTorch has."""
    assert given.rounded is not None, "both are e4m3 numbers"
    assert given.matrix.scales is not None, "a scale for each row"
    out = torch._scaled_mm(
        given.rounded.codes,
        given.matrix.codes[0].t(),
        given.rounded.scales,
        given.matrix.scales[0].t(),
        out_dtype=given.x.dtype,
        use_fast_accum=fast,
    )
    assert isinstance(out, torch.Tensor)
    return out


WIDENED = ("bf16 scratch, library", through_bf16)
LIBRARY = [("library", partial(library, fast=False)), ("library, fast", partial(library, fast=True))]

INT4_ONE = [
    skinny(SkinnyTiles(16, 8, 8, 64, 8, 4)),
    skinny(SkinnyTiles(16, 8, 4, 64, 4, 4)),
    skinny(SkinnyTiles(16, 8, 8, 64, 4, 4)),
    skinny(SkinnyTiles(32, 8, 8, 64, 8, 4)),
    skinny(SkinnyTiles(16, 8, 8, 64, 8, 6)),
    skinny(SkinnyTiles(32, 8, 8, 64, 4, 3)),
    skinny(SkinnyTiles(16, 8, 16, 64, 8, 3)),
    skinny(SkinnyTiles(64, 16, 1, 64, 4, 6, splits=4)),
]
INT4_16 = [
    skinny(SkinnyTiles(16, 16, 8, 64, 8, 4)),
    skinny(SkinnyTiles(32, 16, 4, 64, 4, 4)),
    skinny(SkinnyTiles(32, 16, 4, 64, 8, 4)),
    skinny(SkinnyTiles(32, 16, 8, 64, 8, 3)),
    skinny(SkinnyTiles(64, 16, 1, 64, 4, 6)),
    skinny(SkinnyTiles(64, 16, 1, 64, 4, 6, splits=4)),
]
INT4_64 = [
    skinny(SkinnyTiles(64, 64, 1, 64, 4, 4)),
    skinny(SkinnyTiles(64, 64, 1, 64, 4, 4, splits=4)),
    skinny(SkinnyTiles(128, 64, 1, 64, 8, 4)),
    skinny(SkinnyTiles(64, 32, 1, 64, 4, 5)),
    skinny(SkinnyTiles(32, 64, 4, 64, 8, 3)),
    skinny(SkinnyTiles(32, 32, 4, 64, 4, 3)),
    skinny(SkinnyTiles(16, 64, 8, 64, 8, 2)),
    WIDENED,
]
INT4_256 = [WIDENED, skinny(SkinnyTiles(128, 64, 1, 64, 8, 4)), skinny(SkinnyTiles(128, 128, 1, 64, 8, 3))]
FP8_ONE = [
    skinny(SkinnyTiles(16, 8, 8, 128, 8, 3)),
    skinny(SkinnyTiles(16, 8, 8, 64, 8, 4)),
    skinny(SkinnyTiles(16, 8, 4, 128, 4, 4)),
    skinny(SkinnyTiles(32, 8, 8, 64, 8, 4)),
    skinny(SkinnyTiles(32, 8, 4, 128, 4, 4)),
    skinny(SkinnyTiles(64, 16, 1, 128, 4, 6)),
    skinny(SkinnyTiles(64, 16, 1, 128, 4, 6, splits=4)),
    skinny(SkinnyTiles(64, 16, 1, 256, 4, 5)),
    skinny(SkinnyTiles(128, 16, 1, 128, 8, 5)),
]
FP8_16 = [
    skinny(SkinnyTiles(16, 16, 8, 64, 8, 4)),
    skinny(SkinnyTiles(32, 16, 8, 64, 8, 4)),
    skinny(SkinnyTiles(64, 16, 1, 128, 4, 6)),
    skinny(SkinnyTiles(64, 16, 1, 128, 4, 6, splits=4)),
    skinny(SkinnyTiles(64, 16, 1, 256, 4, 4)),
    LIBRARY[1],
]
FP8_64 = [
    skinny(SkinnyTiles(64, 64, 1, 128, 4, 5)),
    skinny(SkinnyTiles(64, 64, 1, 128, 4, 5, splits=4)),
    skinny(SkinnyTiles(64, 64, 1, 256, 4, 3)),
    skinny(SkinnyTiles(64, 32, 1, 128, 4, 5)),
    skinny(SkinnyTiles(32, 32, 4, 64, 4, 4)),
    *LIBRARY,
]
FP8_256 = [
    *LIBRARY,
    tiled(ProductTiles(128, 128, 128, 8, 3)),
    tiled(ProductTiles(64, 128, 128, 4, 4)),
    tiled(ProductTiles(128, 64, 128, 4, 4)),
    skinny(SkinnyTiles(128, 128, 1, 128, 8, 3)),
]
FP8_MANY = [
    *LIBRARY,
    tiled(ProductTiles(128, 128, 128, 8, 4)),
    tiled(ProductTiles(128, 128, 128, 8, 3)),
    tiled(ProductTiles(128, 256, 64, 8, 4)),
]
INT8_ONE = [
    skinny(SkinnyTiles(16, 8, 8, 128, 8, 3)),
    skinny(SkinnyTiles(16, 8, 4, 128, 4, 4)),
    skinny(SkinnyTiles(64, 16, 1, 128, 4, 6)),
]
INT8_64 = [skinny(SkinnyTiles(64, 64, 1, 128, 4, 5)), skinny(SkinnyTiles(32, 32, 4, 64, 4, 4))]
INT8_MANY = [tiled(ProductTiles(128, 256, 128, 8, 3)), tiled(ProductTiles(128, 128, 128, 8, 4))]
MXFP4_ONE = INT4_ONE[:4]

NARROW = ("o", "down", "qkv")
PLAN: Sequence[tuple[str, str, int, Sequence[tuple[str, Way]]]] = [
    ("int4", "gate_up", 1, INT4_ONE),
    ("fp8", "gate_up", 1, FP8_ONE),
    ("int4", "o", 1, INT4_ONE),
    ("fp8", "o", 1, FP8_ONE),
    ("fp8", "gate_up", 8192, FP8_MANY),
    ("int4", "gate_up", 64, INT4_64),
    ("fp8", "gate_up", 64, FP8_64),
    ("int4", "gate_up", 256, INT4_256),
    ("fp8", "gate_up", 256, FP8_256),
    ("int4", "gate_up", 16, INT4_16),
    ("fp8", "gate_up", 16, FP8_16),
    ("int4", "o", 64, INT4_64),
    ("fp8", "o", 64, FP8_64),
    ("fp8", "o", 256, FP8_256),
    ("fp8", "o", 8192, FP8_MANY),
    ("int4 in half", "gate_up", 1, INT4_ONE[:3]),
    ("int4", "o", 16, INT4_16),
    ("fp8", "o", 16, FP8_16),
    ("int4", "o", 256, INT4_256),
    ("int4", "down", 1, INT4_ONE),
    ("fp8", "down", 1, FP8_ONE),
    ("int8", "gate_up", 1, INT8_ONE),
    ("int8", "o", 1, INT8_ONE),
    ("mxfp4", "gate_up", 1, MXFP4_ONE),
    ("fp8", "down", 64, FP8_64),
    ("int4", "down", 64, INT4_64),
    ("fp8", "down", 256, FP8_256),
    ("int4", "qkv", 1, INT4_ONE),
    ("fp8", "qkv", 1, FP8_ONE),
    ("int8", "gate_up", 64, INT8_64),
    ("int8", "gate_up", 8192, INT8_MANY),
    ("int4", "gate_up", 8192, [WIDENED]),
    ("fp8", "qkv", 64, FP8_64),
    ("int4", "qkv", 64, INT4_64),
]


class ProductSweep:
    """Over the matrices of a layer. tiny: few rows, nothing that needs a card. empty: operands of any content."""

    def __init__(self, shape: Shape, device: torch.device, *, tiny: bool = False, empty: bool = False) -> None:
        attention = shape.num_heads * shape.head_dim
        self._sizes = {
            "gate_up": (2 * shape.intermediate, shape.hidden),
            "o": (shape.hidden, attention),
            "down": (shape.hidden, shape.intermediate),
            "qkv": (shape.qkv_width, shape.hidden),
        }
        self._dtype: torch.dtype = getattr(torch, shape.dtype)
        self._device = device
        self._tiny = tiny
        self._empty = empty
        self._matrices: tuple[tuple[str, str], list[StoredMatrix]] | None = None

    def records(self, seconds: float) -> Iterator[Record]:
        """One for each way, while `seconds` have not passed."""
        started = time.perf_counter()
        for index, (kind, name, rows, ways) in enumerate(self._plan()):
            if index == 4:
                yield from self.bits()
            base = {"what": "product", "format": kind, "matrix": name, "m": rows}
            try:
                operands = self._operands(kind, name, rows)
                expected = present(operands[0]).float()
            except Exception as error:
                yield {**base, "error": f"{type(error).__name__}: {str(error)[:300]}"}
                continue
            first = [] if kind == "int4" and rows == 8192 else [("present", present)]
            for variant, way in (*first, *ways):
                if time.perf_counter() - started > seconds:
                    yield {**base, "variant": variant, "left out": f"{seconds:g} s have gone"}
                    return
                try:
                    measured = self._measure(operands, way, expected)
                except Exception as error:
                    measured = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
                yield {**base, "variant": variant, **measured}

    def bits(self) -> Iterator[Record]:
        """Of some of the first rows, multiplied alone, in the engine's way: are they those among others?"""
        for kind in ("int4", "fp8"):
            base = {"what": "bits of few rows", "format": kind}
            try:
                given = self._operands(kind, "o", FEW, copies=1)[0]
                multiply = partial(quantized_matmul, matrix=given.matrix, rounds_activations=given.rounded is not None)
                together = multiply(given.x)
                rows = (1, 8, 9)
                differing = [int((multiply(given.x[:m]) != together[:m]).sum()) for m in rows]
                yield {**base, "rows": rows, "differing": differing}
            except Exception as error:
                yield {**base, "error": f"{type(error).__name__}: {str(error)[:300]}"}

    def calls(self) -> Iterator[Callable[[], object]]:
        """Each kernel once, over memory of any content: to be compiled, not run."""
        for kind, name, rows, ways in self._plan():
            (operands,) = self._operands(kind, name, rows, copies=1)
            for _, way in (("present", present), *ways):
                if way is through_bf16:
                    yield partial(widen, operands.matrix, operands.x.dtype)
                elif not isinstance(way, partial):
                    yield partial(way, operands)

    def _plan(self) -> Iterator[tuple[str, str, int, Sequence[tuple[str, Way]]]]:
        for kind, name, rows, ways in PLAN:
            if not self._tiny:
                yield kind, name, rows, ways
            elif rows < 8192:
                yield (
                    kind,
                    name,
                    min(rows, 3),
                    [(variant, way) for variant, way in ways if not isinstance(way, partial)],
                )

    def _measure(self, operands: Sequence[Operands], way: Way, expected: torch.Tensor) -> Record:
        found = way(operands[0]).float()
        error = ((found - expected).norm() / expected.norm()).item()
        timing = measure([partial(way, each) for each in operands], self._device)
        return {
            "seconds": timing.median,
            "spread": timing.spread,
            "error of all": error,
            "nan": int(found.isnan().sum()),
        }

    def _operands(self, kind: str, name: str, rows: int, copies: int | None = None) -> list[Operands]:
        n, k = self._sizes[name]
        if self._matrices is None or self._matrices[0] != (kind, name):
            self._matrices = None
            first = self._matrix(kind, n, k)
            size = sum(each.numel() * each.itemsize for each in first.tensors if each is not None)
            count = copies or num_copies(size, 1 if self._tiny else CACHE_BYTES)
            self._matrices = (kind, name), [first, *(self._matrix(kind, n, k) for _ in range(count - 1))]
        x = self._numbers(rows, k)
        matrices = self._matrices[1]
        rounded = round_rows(x, matrices[0]) if kind in ("fp8", "int8") else None
        return [Operands(x, rounded, matrix) for matrix in matrices]

    def _matrix(self, kind: str, rows: int, columns: int) -> StoredMatrix:
        """Random codes and scales."""
        if kind == "fp8":
            codes = self._numbers(1, rows, columns).to(torch.float8_e4m3fn)
            codes = codes.view(torch.uint8) if INTERPRETED else codes
            return StoredMatrix(E4M3.value, columns, codes, self._scales(rows, 1))
        if kind == "int8":
            codes = self._bytes(1, rows, columns).view(torch.int8)
            return StoredMatrix(I8.value, columns, codes, self._scales(rows, 1))
        codes = self._bytes(1, rows, -(-columns // PAIRED) * PAIRED // 2)
        groups = -(-columns // GROUP)
        if kind == "mxfp4":
            return StoredMatrix(MXFP4.value, columns, codes, self._bytes(1, rows, groups) % 6 + 118, GROUP)
        scales = self._scales(rows, groups)
        offsets = -8 * scales + 0.001
        if kind == "int4 in half":
            scales, offsets = scales.half(), offsets.half()
        return StoredMatrix(I4.value, columns, codes, scales, GROUP, offsets)

    def _numbers(self, *shape: int) -> torch.Tensor:
        make = torch.empty if self._empty else torch.randn
        return make(*shape, dtype=self._dtype, device=self._device)

    def _bytes(self, *shape: int) -> torch.Tensor:
        if self._empty:
            return torch.empty(*shape, dtype=torch.uint8, device=self._device)
        return torch.randint(256, shape, dtype=torch.uint8, device=self._device)

    def _scales(self, rows: int, groups: int) -> torch.Tensor:
        size = 1, rows, groups
        return (
            torch.empty(size, device=self._device)
            if self._empty
            else torch.rand(size, device=self._device) * 0.01 + 0.005
        )
